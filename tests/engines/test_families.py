"""Model families against the engines' own classes, and with the transformers that they run with.

No server runs for most of this: SGLang builds the class of each tiny model on the CPU, forgets its
weights, and loads the push. What is left over, on either side, would have been a silent failure.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from weight_update import SGLangWeightSyncScheme
from weight_update.engines.sglang.names import RuntimeNames, are_names_known, check_names
from weight_update.errors import WeightMismatchError

from .conftest import require
from .engine_server import engine_python
from .models import SEED_A, SEED_B, greedy, tiny_tokenizer
from .sglang_server import RELEASE, SGLangServer, engine_of

ROOT = Path(__file__).parents[2]
TINY = ROOT / "tests" / "weights" / "families" / "tiny.py"
sys.path.insert(0, str(TINY.parent))
import tiny  # noqa: E402

PROMPT = [3, 14, 15, 92, 65]
OLD_TRANSFORMERS = "0.5.9"  # of SGLang; it runs with transformers 4.57
# Its LLaVA builds vision towers by way of transformers, and fails at that on a CPU.
NOT_BUILT = {"llava", "llava-moe"}
# It joins these two as soon as both have come in one request, and ignores each alone.
JOINED = ("q_a_proj.weight", "kv_a_proj_with_mqa.weight")
# In transformers 5 the published name of the class is another than transformers' own.
PUBLISHED = {"PhimoeForCausalLM": "PhiMoEForCausalLM"}
SERVED = ("qwen3-moe",)


def in_engine(release: str, *arguments: str | Path) -> str:
    """What a script prints that an engine's Python runs."""
    command = [engine_python(engine_of(release)), *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command, env=environment, check=True, timeout=500, stdout=subprocess.PIPE, text=True
    )
    return done.stdout


def publish(directory: Path) -> None:
    """Writes the published name of its class into a checkpoint's configuration."""
    file = directory / "config.json"
    config = json.loads(file.read_text())
    config["architectures"] = [PUBLISHED.get(name, name) for name in config["architectures"]]
    file.write_text(json.dumps(config))


@pytest.fixture(scope="module")
def in_sglang(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What SGLang makes of the push of each family."""
    require(engine_of(RELEASE))
    root = tmp_path_factory.mktemp("families")
    tiny.main(root, list(tiny.CONFIGS))
    for directory in root.iterdir():
        publish(directory)
    script = Path(__file__).with_name("load_in_sglang.py")
    lines = in_engine(RELEASE, script, *sorted(root.iterdir())).splitlines()
    results = [json.loads(line[7:]) for line in lines if line.startswith("RESULT ")]
    found = {Path(result["directory"]).name: result for result in results}
    for family, result in found.items():
        result["push"] = list(load_file(root / family / "push.safetensors"))
    return found


@pytest.mark.parametrize("family", tiny.CONFIGS.keys() - NOT_BUILT)
def test_the_servers_class_loads_all_its_weights_from_the_push_and_ignores_none(
    in_sglang: dict[str, Any], family: str
) -> None:
    result = in_sglang[family]

    assert "error" not in result
    assert result["stale"] == []
    assert [name for name in result["ignored"] if not name.endswith(JOINED)] == []


@pytest.mark.parametrize("family", tiny.CONFIGS.keys() - NOT_BUILT)
def test_what_loads_raises_no_alarm_before_the_pause(
    in_sglang: dict[str, Any], family: str
) -> None:
    result = in_sglang[family]
    if not are_names_known({}, [result["kind"]]):
        pytest.skip(f"the names of {result['kind']} are not known")
    heads = [
        name for name in (*result["names"], *result["push"]) if name.endswith("lm_head.weight")
    ]
    runtime = RuntimeNames(frozenset(result["names"]), tied=not heads)

    found = check_names(result["push"], runtime, [result["kind"]])

    assert (found.unknown, found.lacking, found.remark) == ((), (), "")


@pytest.fixture(scope="module")
def of_old_transformers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoint and push of each family, both by transformers 4.57."""
    require(engine_of(OLD_TRANSFORMERS))
    root = tmp_path_factory.mktemp("old")
    in_engine(OLD_TRANSFORMERS, TINY, root, *tiny.CONFIGS)
    return root


@pytest.mark.parametrize("family", tiny.CONFIGS)
def test_with_transformers_4_the_push_is_what_save_pretrained_writes(
    of_old_transformers: Path, family: str
) -> None:
    push = load_file(of_old_transformers / family / "push.safetensors")
    saved = load_file(of_old_transformers / family / "model.safetensors")

    assert push.keys() == saved.keys()
    assert all(
        push[name].dtype == value.dtype and torch.equal(push[name], value)
        for name, value in saved.items()
    )


@pytest.fixture(params=SERVED)
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, SGLangServer]]:
    """A server of a mixture of experts, on weights A."""
    require(engine_of(RELEASE))
    directory = tmp_path / request.param
    tiny.tiny_model(request.param, SEED_A).save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    with SGLangServer(directory, tmp_path / "server.log", ["--skip-tokenizer-init"]) as started:
        yield request.param, started


def test_a_mixture_of_experts_generates_what_transformers_does_before_and_after(
    server: tuple[str, SGLangServer],
) -> None:
    family, engine = server
    a, b = tiny.tiny_model(family, SEED_A), tiny.tiny_model(family, SEED_B)
    assert engine.generate(PROMPT, 16) == greedy(a, PROMPT, 16)

    with SGLangWeightSyncScheme(engine.url, timeout=60).create_sender() as sender:
        with pytest.raises(WeightMismatchError, match=r"ignore 'model\.nrom\.weight'"):
            sender.update_weights({"model.nrom.weight": b.model.norm.weight})
        sender.update_weights(b)

    assert engine.generate(PROMPT, 16) == greedy(b, PROMPT, 16)
