"""The parity table, played to real servers and to the reference engine that imitates them."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

from weight_update import reference_engine
from weight_update.reference_engine import ReferenceEngine

from .conftest import Older
from .models import SEED_A, SEED_B, TinyModels, tiny_llama
from .parity import Player
from .parity_table import CASES, DIFFERENCES, LEFT_OUT, OLDER, SECTIONS, Case, Step
from .sglang_server import RELEASE, SGLangServer

# A server starts in 20 s on a quiet machine, and in minutes on a busy one.
pytestmark = pytest.mark.timeout(600)

README = Path(reference_engine.__file__).with_name("README.md")
Both = tuple[Player, Player]


def players(server: SGLangServer, models: TinyModels) -> Iterator[Both]:
    weights = {"a": tiny_llama(SEED_A).eval(), "b": tiny_llama(SEED_B).eval()}
    # It waits for its scheduler as long as the real one does, however busy the machine is.
    with ReferenceEngine(models.a, release=server.release, health_timeout=20.0) as engine:
        both = Player(server.url, weights), Player(engine.url, weights)
        yield both
        for player in both:
            player.close()


@pytest.fixture(scope="module")
def real_and_reference(sglang: SGLangServer, tiny_models: TinyModels) -> Iterator[Both]:
    sglang.load(tiny_models.a)
    yield from players(sglang, tiny_models)


@pytest.fixture(scope="module")
def older_and_reference(older: Older) -> Iterator[Both]:
    yield from players(older.server, older.models)


def compare(case: Case, both: Both, differing: Collection[int]) -> None:
    """Steps agree, but for those that must not, so that no difference outlives its cause."""
    real, reference = (player.play(case.steps) for player in both)
    for number, step in enumerate(case.steps):
        if number in differing:
            assert reference[number] != real[number], f"no longer differs: {step}"
        else:
            assert reference[number] == real[number], f"step {number}: {step}"


def marked(case: Case) -> set[int]:
    """The steps that differ from 0.5.23."""
    return {number for number, step in enumerate(case.steps) if step.differs}


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=f"{RELEASE}, {name}") for name, case in CASES.items()]
)
def test_the_reference_engine_does_as_the_real_server(case: Case, real_and_reference: Both) -> None:
    compare(case, real_and_reference, marked(case))


@pytest.mark.parametrize("name", [name for name in CASES if name not in LEFT_OUT])
@pytest.mark.parametrize("older", OLDER, indirect=True)
def test_the_reference_engine_does_as_an_older_server(
    older: Older, name: str, older_and_reference: Both
) -> None:
    case, known = CASES[name], OLDER[older.server.release].values()
    differing = {number for steps in known for number in steps.get(name, ())}
    compare(case, older_and_reference, marked(case) | differing)


def differing_steps() -> list[tuple[Case, Step]]:
    return [(case, step) for case in CASES.values() for step in case.steps if step.differs]


def test_every_difference_has_a_reason_and_every_reason_a_difference() -> None:
    assert {step.differs for _, step in differing_steps()} == set(DIFFERENCES)


@pytest.mark.parametrize("release", OLDER)
def test_an_older_release_is_said_to_differ_in_cases_that_are_played(release: str) -> None:
    differing = {name for steps in OLDER[release].values() for name in steps}
    assert differing <= set(CASES) - set(LEFT_OUT)


def test_what_is_left_out_is_in_the_table() -> None:
    assert set(LEFT_OUT) <= set(CASES)


@pytest.mark.parametrize("release", [RELEASE, *OLDER])
def test_the_readme_of_the_reference_engine_lists_the_same_differences(release: str) -> None:
    """Under a heading of their own, one bullet each, in the words of the table."""
    known = DIFFERENCES.values() if release == RELEASE else OLDER[release]
    section = README.read_text().partition(f"### What the parity table shows of {release}\n")[2]
    bullets = section.partition("\n#")[0].split("\n- ")[1:]
    assert [" ".join(bullet.split()) for bullet in bullets] == list(known)


def test_no_case_stands_twice_in_the_table() -> None:
    assert len(CASES) == sum(map(len, SECTIONS.values()))
