"""Who comes from ``torchrl.weight_update.llm`` finds the same names, and a page that holds true."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torchrl.weight_update.llm as theirs
from torchrl.weight_update import WeightSyncScheme, weight_sync_schemes

import weight_update
from tests.collectors.worlds import Idle, client
from tests.integration import kit
from weight_update import SGLangWeightSyncScheme, VLLMWeightSyncScheme
from weight_update.collectors.torchrl_adapter import register_backend
from weight_update.reference_engine import ReferenceEngine

PAGE = (Path(__file__).parents[2] / "docs" / "coming_from_torchrl.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
URL = "http://127.0.0.1:30000"
# Whose arguments the page lists, since they are others.
OTHER_ARGUMENTS = {"VLLMWeightSyncScheme"}
has_backends = pytest.mark.skipif(
    not hasattr(WeightSyncScheme, "from_backend"), reason="torchrl 0.14 and later have it"
)


def positional(function: Any) -> list[str]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in inspect.signature(function).parameters.values() if p.kind in kinds]


def methods_of(kind: Any) -> set[str]:
    return {n for n, m in vars(kind).items() if inspect.isfunction(m) and not n.startswith("_")}


def not_covered() -> set[str]:
    """Names in the page's table of those that are not here."""
    table = PAGE.partition("\nNot covered:\n")[2].partition("\n## ")[0]
    first_cells = re.findall(r"^\|([^|]+)\|", table, re.MULTILINE)
    return set(re.findall(r"`(\w+)`", " ".join(first_cells)))


COVERED = sorted(set(theirs.__all__) - not_covered())


def test_every_name_is_here_or_on_the_page() -> None:
    assert not_covered() <= set(theirs.__all__)
    assert set(COVERED) <= set(weight_update.__all__)


@pytest.mark.parametrize("name", COVERED)
def test_a_name_takes_the_same_positional_arguments(name: str) -> None:
    before, now = positional(getattr(theirs, name)), positional(getattr(weight_update, name))
    if name in OTHER_ARGUMENTS:
        assert all(f"`{argument}`" in PAGE for argument in before)
    else:
        assert now[: len(before)] == before


@pytest.mark.parametrize("name", [name for name in COVERED if name[0].isupper()])
def test_a_class_has_the_same_methods_with_the_same_arguments(name: str) -> None:
    before, now = getattr(theirs, name), getattr(weight_update, name)
    for method in methods_of(before) - {"create_receiver", "create_transport"}:
        wanted = positional(getattr(before, method))
        assert positional(getattr(now, method))[: len(wanted)] == wanted, method


# -- the page -------------------------------------------------------------------------------


def test_every_block_of_the_page_runs(engine: ReferenceEngine) -> None:
    kit.relabel(engine, "default")
    collectors = [kit.Collector(), kit.Collector()]
    names: dict[str, Any] = {
        "policy_training": SimpleNamespace(model=kit.llama(1)),
        "collectors": collectors,
        "env": Idle(),
        "client": client(),
    }
    assert len(BLOCKS) == 5
    for number, block in enumerate(BLOCKS, 1):
        code = compile(block.replace(URL, engine.url), f"<block {number} of the page>", "exec")
        exec(code, names)

    assert kit.served(engine) == kit.tokens_of(1)
    assert [each.version for each in collectors] == [1, 1]  # registered after the first update
    assert names["report"].version == 3
    assert set(names["frames"]["next", "policy_version"].flatten().tolist()) == {1}
    assert names["scheme"].pause_mode == "abort"


# -- from_backend ---------------------------------------------------------------------------


@has_backends
def test_a_scheme_is_made_by_the_name_of_its_backend() -> None:
    sglang = WeightSyncScheme.from_backend("sglang", server_url=URL, pause_mode="abort")
    vllm = WeightSyncScheme.from_backend("vllm", server_url=URL)
    assert (type(sglang), type(vllm)) == (SGLangWeightSyncScheme, VLLMWeightSyncScheme)
    assert sglang.pause_mode == "abort"


@has_backends
def test_a_name_that_torchrl_has_given_away_stays_its_own() -> None:
    class Ours:
        """A class that would take a name."""

    taken = weight_sync_schemes._WEIGHT_SYNC_SCHEMES["ray"]
    assert register_backend("ray")(Ours) is Ours  # type: ignore[type-var]
    assert weight_sync_schemes._WEIGHT_SYNC_SCHEMES["ray"] is taken


def test_a_torchrl_without_backends_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(weight_sync_schemes, "register_weight_sync_backend", raising=False)
    assert register_backend("sglang")(SGLangWeightSyncScheme) is SGLangWeightSyncScheme


def test_importing_the_library_imports_no_torchrl() -> None:
    code = "import sys, weight_update; print('torchrl' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=150
    )
    assert done.stdout == "False\n"
