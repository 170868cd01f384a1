"""Whole models reach a real vLLM through its own weight transfer, and it serves them."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.integration.trainers import Trainers
from weight_update.errors import (
    ConfigurationError,
    EngineRejected,
    WeightMismatchError,
    WeightUpdateError,
)
from weight_update.report import EngineState
from weight_update.torch_private import process_groups
from weight_update.transports.address import listen
from weight_update.transports.id_group import RENDEZVOUS_KEY, pickled_id
from weight_update.weights.stream import Stream

from . import dead_trainer
from .conftest import require
from .engine_server import engine_python, is_installed
from .long_request import LongRequest, wait_until
from .models import SEED_A
from .vllm_pushes import (
    BUCKET_BYTES,
    PROMPT,
    SECONDS,
    delivery_to,
    holds,
    is_of_both,
    push,
    serves,
    with_weight,
)
from .vllm_server import (
    ENGINE,
    OLDER,
    LongVLLMRequest,
    VLLMServer,
    save_vllm_model,
    vllm_llama,
)

SEED_B, SEED_C = 21, 22
FIRST_TOKENS = 10
# Over several of the blocks that vLLM keeps prefixes in.
LONG_PROMPT = [(7 * place) % 250 + 3 for place in range(300)]

FORMATS: dict[str, dict[str, Any]] = {
    "packed": {},
    "packed in several buckets": {"bucket_bytes": BUCKET_BYTES},
    "one broadcast a tensor": {"load_format": "tensors"},
    "one a tensor in several buckets": {"load_format": "tensors", "bucket_bytes": BUCKET_BYTES},
}


def test_two_trainers_update_in_turn_and_one_may_leave(vllm: VLLMServer) -> None:
    with delivery_to(vllm) as other:
        with delivery_to(vllm) as one:
            for delivery, seed in ((one, SEED_B), (other, SEED_C), (one, SEED_B), (other, SEED_C)):
                push(delivery, vllm_llama(seed))
                assert serves(vllm, seed)
        push(other, vllm_llama(SEED_B))
    assert serves(vllm, SEED_B)


@pytest.mark.parametrize("options", FORMATS.values(), ids=FORMATS)
def test_the_output_equals_transformers_before_and_after(
    vllm: VLLMServer, options: dict[str, Any]
) -> None:
    assert serves(vllm, SEED_A)
    with delivery_to(vllm, **options) as delivery:
        for seed in (SEED_B, SEED_C):
            report = push(delivery, vllm_llama(seed))

            assert serves(vllm, seed)
            assert report.buckets > 1 or "bucket_bytes" not in options


def test_the_label_follows_and_nothing_is_claimed_to_be_proved(vllm: VLLMServer) -> None:
    with delivery_to(vllm) as delivery:
        for version in (1, 2):
            report = push(delivery, vllm_llama(SEED_B))

            assert (report.version, vllm.label()) == (version, str(version))
            assert report.verification == "unverified"


def test_a_complete_module_alone_is_replaced_and_the_others_stay(vllm: VLLMServer) -> None:
    head = vllm_llama(SEED_B).state_dict()["lm_head.weight"]
    expected = vllm_llama(SEED_A)
    with torch.no_grad():
        expected.lm_head.weight.copy_(head)
    with delivery_to(vllm) as delivery:
        push(delivery, {"lm_head.weight": head})

    assert holds(vllm, expected)


# ---- what is refused before anything is paused

QKV, OUT = (f"model.layers.0.self_attn.{module}.weight" for module in ("q_proj", "o_proj"))


def some_of(seed: int, *names: str) -> dict[str, torch.Tensor]:
    weights = vllm_llama(seed).state_dict()
    return {name: weights[name] for name in names}


REFUSED: dict[str, tuple[Any, type[WeightUpdateError], str]] = {
    "a part of a fused module": (
        lambda: some_of(SEED_B, QKV),
        ConfigurationError,
        "incomplete",
    ),
    "a weight without its bias": (lambda: some_of(SEED_B, OUT), ConfigurationError, "incomplete"),
    "a bias without its weight": (
        lambda: some_of(SEED_B, OUT.replace("weight", "bias")),
        ConfigurationError,
        "incomplete",
    ),
    "an unknown name": (
        lambda: with_weight(SEED_B, "model.nonsense.weight", torch.zeros(4)),
        WeightMismatchError,
        "model.nonsense.weight",
    ),
    "another shape": (
        lambda: with_weight(SEED_B, "model.layers.1.mlp.up_proj.weight", torch.zeros(5, 128)),
        WeightMismatchError,
        "up_proj",
    ),
}


@pytest.mark.parametrize(("weights", "error", "words"), REFUSED.values(), ids=REFUSED)
def test_it_is_refused_and_the_server_serves_on(
    vllm: VLLMServer, weights: Any, error: type[WeightUpdateError], words: str
) -> None:
    with delivery_to(vllm) as delivery:
        with pytest.raises(error, match=words) as caught:
            push(delivery, weights())

        assert caught.value.report is not None
        assert caught.value.report.engines[vllm.url].state is EngineState.OLD
    assert not vllm.is_paused()
    assert serves(vllm, SEED_A)


# ---- what the server itself refuses, in the middle of an update

WRONG = {
    "an unknown layer": ("model.layers.9.self_attn.o_proj.weight", torch.zeros(4, 4)),
    "an unknown name": ("model.nonsense.weight", torch.zeros(4, 4)),
    "a wrong shape": ("model.layers.1.self_attn.o_proj.weight", torch.zeros(5, 128)),
    "a wrong shape of a fused part": ("model.layers.1.mlp.up_proj.weight", torch.zeros(5, 128)),
    "a wrong shape of the last part": (
        "model.layers.1.self_attn.v_proj.weight",
        torch.zeros(5, 128),
    ),
}


@pytest.mark.parametrize(("name", "value"), WRONG.values(), ids=WRONG)
def test_a_failed_update_holds_the_server_until_the_next_whole_push(
    vllm: VLLMServer, name: str, value: torch.Tensor
) -> None:
    with delivery_to(vllm, verify="off") as delivery:
        with pytest.raises(EngineRejected, match="Worker failed with error") as caught:
            push(delivery, with_weight(SEED_B, name, value), whole=True)

        assert caught.value.report is not None
        outcome = caught.value.report.engines[vllm.url]
        assert (outcome.state, outcome.paused) == (EngineState.MIXED, True)
        assert vllm.is_paused()
        assert vllm.label() == "default"
        push(delivery, vllm_llama(SEED_C))

    assert not vllm.is_paused()
    assert serves(vllm, SEED_C)


def test_a_stream_in_another_order_than_the_models_is_served(vllm: VLLMServer) -> None:
    """Of the alphabet, as in many files: the parts of a layer come in several buckets."""
    weights = sorted(vllm_llama(SEED_B).state_dict().items())
    with delivery_to(vllm, bucket_bytes=BUCKET_BYTES // 10) as delivery:
        report = push(delivery, Stream(weights, whole=True))

    assert report.buckets > 10
    assert serves(vllm, SEED_B)


def test_a_source_that_breaks_off_leaves_a_server_that_the_next_push_heals(
    vllm: VLLMServer,
) -> None:
    def breaks_off() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(vllm_llama(SEED_B).state_dict().items())[:12]
        raise RuntimeError("the trainer lost a weight")

    with delivery_to(vllm, bucket_bytes=BUCKET_BYTES, verify="off") as delivery:
        with pytest.raises(WeightUpdateError, match="lost a weight") as caught:
            push(delivery, Stream(breaks_off(), whole=True))

        assert caught.value.report is not None
        assert caught.value.report.engines[vllm.url].state is EngineState.MIXED
        push(delivery, vllm_llama(SEED_C))
    assert serves(vllm, SEED_C)


@pytest.mark.parametrize(
    "dies", [dead_trainer.of_vllm_between_buckets, dead_trainer.of_vllm_in_a_broadcast]
)
def test_another_trainer_heals_what_a_killed_one_left(
    vllm: VLLMServer, workplace: Trainers, dies: Callable[..., None]
) -> None:
    with workplace.start(dies, url=vllm.url) as trainer:
        trainer.wait_for(dead_trainer.STANDS_STILL, SECONDS)
    wait_until(vllm.is_paused)
    with delivery_to(vllm) as delivery:
        with pytest.raises(ConfigurationError, match="paused"):
            push(delivery, {"lm_head.weight": vllm_llama(SEED_B).state_dict()["lm_head.weight"]})
        push(delivery, vllm_llama(SEED_C))

    assert not vllm.is_paused()
    assert serves(vllm, SEED_C)


# ---- requests in flight


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_a_frozen_request_goes_on_after_the_update(vllm: VLLMServer, mode: str) -> None:
    model = vllm_llama(SEED_B)

    with delivery_to(vllm, pause_mode=mode) as delivery:
        push(delivery, vllm_llama(SEED_A))  # the next one is quick
        request = in_flight(vllm)
        report = push(delivery, model)
    request.wait_for(FIRST_TOKENS)
    tokens = request.cut()["output_ids"]
    anew = is_of_both(PROMPT, tokens, SEED_A, SEED_B, at_least=FIRST_TOKENS)
    assert anew == (mode == "retract")  # else it goes on from what the old weights computed
    assert any("prefixes cached" in text for text in report.warnings) == (mode == "in_place")


def test_abort_ends_requests_in_flight_with_what_they_have(vllm: VLLMServer) -> None:
    with delivery_to(vllm, pause_mode="abort") as delivery:
        delivery.connect()
        request = in_flight(vllm)
        push(delivery, vllm_llama(SEED_B))
    answer = request.end()
    assert answer["finish_reason"] == "abort"
    assert len(answer["output_ids"]) >= FIRST_TOKENS
    assert serves(vllm, SEED_B)


def in_flight(server: VLLMServer) -> LongRequest:
    request = LongVLLMRequest(server.url, PROMPT)
    request.wait_for(FIRST_TOKENS)
    return request


@pytest.mark.parametrize("mode", ["retract", "abort"])
def test_no_prefix_of_older_weights_is_served(vllm: VLLMServer, mode: str) -> None:
    with delivery_to(vllm, pause_mode=mode) as delivery:
        assert serves(vllm, SEED_A, LONG_PROMPT)

        push(delivery, vllm_llama(SEED_B))

        assert serves(vllm, SEED_B, LONG_PROMPT)


def test_a_prefix_that_was_kept_on_purpose_is_served_and_warned_of(vllm: VLLMServer) -> None:
    """It shows that the test above can fail."""
    with delivery_to(vllm, pause_mode="abort", flush_cache_on_update=False) as delivery:
        assert serves(vllm, SEED_A, LONG_PROMPT)

        report = push(delivery, vllm_llama(SEED_B))

    assert any("not flushed, as configured" in text for text in report.warnings)
    assert not serves(vllm, SEED_B, LONG_PROMPT)


# ---- a server without what an update needs


def test_a_trainer_that_sends_by_another_backend_is_told_how_to_start_the_server(
    vllm: VLLMServer,
) -> None:
    from weight_update.engines.vllm.engine import VLLMEngine
    from weight_update.options import HttpOptions
    from weight_update.waiting import Deadline

    deadline = Deadline(60)
    engine = VLLMEngine(vllm.url, HttpOptions())
    engine.inspect(deadline)
    with pytest.raises(ConfigurationError, match="weight_update_gloo") as caught:
        engine.join(
            address="127.0.0.1",
            port=1,
            rank_offset=1,
            world_size=2,
            group_name="g",
            backend="nccl",
            deadline=deadline,
        )
    assert '--weight-transfer-config \'{"backend": "nccl"}\'' in caught.value.remedy


READS_THE_ID = """
import sys
from vllm.distributed.device_communicators.pynccl_wrapper import ncclUniqueId
from vllm.distributed.utils import StatelessProcessGroup

group = StatelessProcessGroup.create("127.0.0.1", int(sys.argv[1]), rank=1, world_size=2)
print(bytes(group.broadcast_obj(ncclUniqueId(), src=0).internal).hex())
"""


def test_the_rendezvous_of_vllm_itself_finds_the_id_of_the_trainers_group() -> None:
    """Releases that take no id look for it there; NCCL itself needs GPUs, and this does not."""
    require(ENGINE)
    listener = listen("127.0.0.1", None)
    port = listener.getsockname()[1]
    store = process_groups.serve_store("127.0.0.1", port, 2, listener.detach())
    unique_id = bytes(range(128))
    store.set(RENDEZVOUS_KEY, pickled_id(unique_id))
    command = [str(engine_python(ENGINE)), "-c", READS_THE_ID, str(port)]

    found = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    assert found.stdout.split()[-1] == unique_id.hex()


# ---- two workers, and an older release, in servers of their own

OTHERS: dict[str, dict[str, Any]] = {
    "two workers": {
        "extra_args": ("--tensor-parallel-size", "2"),
        "variables": {"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
    },
    OLDER: {"engine": OLDER, "lora": False},
}


@pytest.fixture(scope="module", params=OTHERS.values(), ids=OTHERS)
def other(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VLLMServer]:
    settings = request.param
    if settings.get("engine") == OLDER and not is_installed(OLDER):
        pytest.skip(f"{OLDER} is optional, and not installed here")
    require(ENGINE)
    home = tmp_path_factory.mktemp("vllm-other")
    with VLLMServer(save_vllm_model(home / "model"), home / "server.log", **settings) as server:
        yield server


def test_other_servers_take_whole_models_and_fail_and_heal_alike(other: VLLMServer) -> None:
    assert serves(other, SEED_A)
    with delivery_to(other, bucket_bytes=BUCKET_BYTES) as delivery:
        assert push(delivery, vllm_llama(SEED_B)).buckets > 1
    assert serves(other, SEED_B)
    assert other.label() == "1"

    name, value = WRONG["a wrong shape of a fused part"]
    with delivery_to(other, bucket_bytes=BUCKET_BYTES, verify="off") as delivery:
        with pytest.raises(EngineRejected):
            push(delivery, with_weight(SEED_B, name, value), whole=True)
        assert other.is_paused()

        push(delivery, vllm_llama(SEED_C))
    assert serves(other, SEED_C)
