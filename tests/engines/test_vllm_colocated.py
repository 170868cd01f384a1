"""Memory that the workers of a real vLLM open: what they load, refuse, undo and let go of."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.trainers import Trainers
from weight_update import ConfigurationError, EngineState, WeightUpdateError
from weight_update.delivery.delivery import Delivery
from weight_update.delivery.vllm import VLLMDeployment
from weight_update.options import UpdateOptions
from weight_update.report import UpdateReport

from . import dead_trainer
from .models import SEED_A, SEED_B, greedy
from .vllm_server import VLLMServer, vllm_llama

PROMPT = [3, 14, 15, 92, 65, 35, 89]
TOKENS = 16
SECONDS = 120.0
NORM = "model.norm.weight"
QUERY = "model.layers.0.self_attn.q_proj.weight"


@contextmanager
def delivery_to(url: str, **options: Any) -> Iterator[Delivery]:
    settings = {"transport": "ipc", "timeout": 60.0} | options
    delivery = Delivery([url], UpdateOptions(**settings), VLLMDeployment)
    try:
        yield delivery
    finally:
        delivery.shutdown()


def push(server: VLLMServer, source: Any, **options: Any) -> UpdateReport:
    with delivery_to(server.url, **options) as delivery:
        return delivery.update(lambda: source)


def serves(server: VLLMServer, seed: int) -> bool:
    return server.generate(PROMPT, TOKENS) == greedy(vllm_llama(seed), PROMPT, TOKENS)


def changed(seed: int, **weights: torch.Tensor) -> dict[str, torch.Tensor]:
    """A model's weights with other ones in place of some, and then those that it has not."""
    own = {name: value.detach() for name, value in vllm_llama(seed).named_parameters()}
    return own | {name.replace("__", "."): value for name, value in weights.items()}


def shared_files() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob(f"torch_{os.getpid()}_*")}


# ---- what arrives


@pytest.mark.parametrize(
    ("load_format", "bucket_bytes"), [("auto", None), ("auto", 20_000), ("tensors", 20_000)]
)
def test_output_equals_that_of_transformers_before_and_after(
    vllm: VLLMServer, load_format: Any, bucket_bytes: int | None
) -> None:
    assert serves(vllm, SEED_A)

    report = push(vllm, vllm_llama(SEED_B), load_format=load_format, bucket_bytes=bucket_bytes)

    assert serves(vllm, SEED_B)
    assert (report.buckets > 1) is (bucket_bytes is not None)
    assert report.route is not None
    assert (report.route.way, report.route.backend) == ("ipc", "shared memory")
    assert report.engines[vllm.url].state is EngineState.NEW
    assert vllm.label() == str(report.version)
    assert not vllm.is_paused()


def test_a_layer_whose_weights_come_in_several_buckets_gets_all_of_them(vllm: VLLMServer) -> None:
    """Its first ones wait, while the memory that they came in is written again."""
    weights = changed(SEED_B)
    late = sorted(weights, key=lambda name: name.endswith("bias"))
    assert late[-1].endswith("bias")

    push(vllm, {name: weights[name] for name in late}, bucket_bytes=1)

    assert serves(vllm, SEED_B)


def test_the_same_memory_is_opened_again_at_every_update(vllm: VLLMServer) -> None:
    models = {seed: vllm_llama(seed) for seed in (SEED_A, SEED_B)}
    before = shared_files()
    with delivery_to(vllm.url, bucket_bytes=50_000) as delivery:
        delivery.update(lambda: models[SEED_A])
        used = shared_files()
        for seed in (SEED_B, SEED_A, SEED_B):
            delivery.update(lambda seed=seed: models[seed])  # type: ignore[misc]
        assert shared_files() == used
        assert len(used - before) == 2
        assert serves(vllm, SEED_B)
    assert shared_files() <= before


# ---- what is refused, and what is left then


def test_what_is_refused_before_anything_was_loaded_leaves_the_old_weights(
    vllm: VLLMServer,
) -> None:
    for wrong in ({"nonsense": torch.ones(3)}, {NORM: torch.ones(3)}):
        with pytest.raises(WeightUpdateError, match=f"at '{next(iter(wrong))}'") as caught:
            push(vllm, wrong, verify="off")

        assert caught.value.phase == "transfer"
        assert caught.value.report is not None
        assert caught.value.report.engines[vllm.url].state is EngineState.OLD
        assert not vllm.is_paused()
        assert serves(vllm, SEED_A)


@pytest.mark.parametrize(
    ("wrong", "at"),
    [
        ({"nonsense": torch.ones(3)}, "nonsense"),
        ({NORM.replace(".", "__"): torch.ones(3)}, NORM),
        ({QUERY.replace(".", "__"): torch.ones(7, 128)}, QUERY),
    ],
    ids=["a wrong name", "a wrong shape", "a wrong shape of a part"],
)
def test_a_failed_update_is_held_and_the_next_whole_one_heals(
    vllm: VLLMServer, wrong: dict[str, torch.Tensor], at: str
) -> None:
    with pytest.raises(WeightUpdateError, match=f"at '{at}'") as caught:
        push(vllm, changed(SEED_B, **wrong), verify="off", bucket_bytes=20_000)

    assert caught.value.report is not None
    outcome = caught.value.report.engines[vllm.url]
    assert (outcome.state, outcome.paused) == (EngineState.MIXED, True)
    assert vllm.is_paused()

    push(vllm, vllm_llama(SEED_B))
    assert serves(vllm, SEED_B)


def test_weights_that_cannot_be_read_any_more_are_undone(vllm: VLLMServer) -> None:
    """The trainer gives up in the middle: what no bucket brought is as it was."""
    weights: Any = changed(SEED_B)

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(weights.items())[:3]
        raise RuntimeError("the checkpoint ends here")

    with pytest.raises(WeightUpdateError, match="ends here") as caught:
        push(vllm, stream, bucket_bytes=1)

    assert caught.value.report is not None
    assert caught.value.report.engines[vllm.url].state is EngineState.MIXED
    push(vllm, vllm_llama(SEED_A))
    assert serves(vllm, SEED_A)


def test_a_trainer_that_is_killed_frees_the_server_and_another_one_heals_it(
    vllm: VLLMServer, workplace: Trainers
) -> None:
    trainer = workplace.start(dead_trainer.of_vllm_in_shared_memory, url=vllm.url)
    assert trainer.wait(SECONDS) == -9

    # The calls of a server wait while an update blocks its workers.
    assert vllm.is_paused()
    with pytest.raises(ConfigurationError, match="half updated"):
        push(vllm, {NORM: torch.ones(128)})
    push(vllm, vllm_llama(SEED_B))

    assert serves(vllm, SEED_B)


def test_an_update_after_one_that_nobody_completed_needs_a_whole_model(vllm: VLLMServer) -> None:
    """Whoever resumed the server knew less of it than its workers do."""
    with pytest.raises(WeightUpdateError):
        push(vllm, changed(SEED_B, nonsense=torch.ones(3)), verify="off", bucket_bytes=20_000)
    vllm.post("resume", {})

    with pytest.raises(ConfigurationError, match="another trainer left its update open"):
        push(vllm, {NORM: torch.ones(128)})

    push(vllm, vllm_llama(SEED_A))
    assert serves(vllm, SEED_A)
