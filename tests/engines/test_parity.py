"""The parity table, played to the real server and to the reference engine that imitates it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from weight_update import reference_engine
from weight_update.reference_engine import ReferenceEngine

from .models import SEED_A, SEED_B, TinyModels, tiny_llama
from .parity import Player
from .parity_table import DIFFERENCES, SECTIONS, Case, Step
from .sglang_server import SGLangServer

# A server starts in 20 s on a quiet machine, and in minutes on a busy one.
pytestmark = pytest.mark.timeout(600)

README = Path(reference_engine.__file__).with_name("README.md")
CASES = [
    pytest.param(case, id=f"{section}: {case.name}")
    for section, cases in SECTIONS.items()
    for case in cases
]


def players(server: SGLangServer, models: TinyModels) -> Iterator[tuple[Player, Player]]:
    weights = {"a": tiny_llama(SEED_A).eval(), "b": tiny_llama(SEED_B).eval()}
    # It waits for its scheduler as long as the real one does, however busy the machine is.
    with ReferenceEngine(models.a, release="0.5.23", health_timeout=20.0) as engine:
        both = Player(server.url, weights), Player(engine.url, weights)
        yield both
        for player in both:
            player.close()


@pytest.fixture(scope="module")
def real_and_reference(
    sglang: SGLangServer, tiny_models: TinyModels
) -> Iterator[tuple[Player, Player]]:
    sglang.load(tiny_models.a)
    yield from players(sglang, tiny_models)


@pytest.mark.parametrize("case", CASES)
def test_the_reference_engine_does_as_the_real_server(
    case: Case, real_and_reference: tuple[Player, Player]
) -> None:
    real, reference = (player.play(case.steps) for player in real_and_reference)
    for number, step in enumerate(case.steps):
        if step.differs:
            assert reference[number] != real[number], f"no longer differs: {step}"
        else:
            assert reference[number] == real[number], f"step {number}: {step}"


def differing_steps() -> list[tuple[Case, Step]]:
    cases = [case for section in SECTIONS.values() for case in section]
    return [(case, step) for case in cases for step in case.steps if step.differs]


def test_every_difference_has_a_reason_and_every_reason_a_difference() -> None:
    assert {step.differs for _, step in differing_steps()} == set(DIFFERENCES)


def test_the_readme_of_the_reference_engine_lists_the_same_differences() -> None:
    """Under a heading of their own, one bullet each, in the words of the table."""
    section = README.read_text().partition("### What the parity table shows\n")[2]
    bullets = section.partition("\n#")[0].split("\n- ")[1:]
    assert [" ".join(bullet.split()) for bullet in bullets] == list(DIFFERENCES.values())


def test_no_case_stands_twice_in_the_table() -> None:
    names: list[Any] = [(section, c.name) for section, cases in SECTIONS.items() for c in cases]
    assert len(names) == len(set(names))
