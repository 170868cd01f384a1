"""SGLang on devices of its own, with our facades: real HTTP, a real group, two engines."""

from __future__ import annotations

import copy
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import requests
import torch

from tests import warm
from tests.integration import kit
from tests.integration.kit import (
    BEGIN,
    CONTINUE,
    END,
    FLUSH,
    INIT,
    LEAVE,
    PAUSE,
    UPDATE,
    USUAL_STEPS,
)
from weight_update import ConfigurationError, EngineState, WeightUpdateError
from weight_update.errors import EngineRejected, UpdateTimeout
from weight_update.ports import free_port
from weight_update.reference_engine import Fault, ReferenceEngine
from weight_update.synchronizers import SGLangGeneration, TorchPolicy, create_weight_synchronizer
from weight_update.transports.process_group import UpdateGroup
from weight_update.waiting import spawn

RELEASE, RESUME = "/release_memory_occupation", "/resume_memory_occupation"
ROOT = Path(__file__).parents[2]


@contextmanager
def synchronizer(
    engines: Any,
    model: Any,
    *,
    gigabytes: float | None = None,
    seconds: float = 60.0,
    **options: Any,
) -> Iterator[Any]:
    """What the factory makes of a trainer and SGLang servers that share nothing."""
    made = create_weight_synchronizer(
        TorchPolicy(model),
        SGLangGeneration([engine.url for engine in engines], **options),
        "sglang",
        colocated=False,
        refit_buffer_size_gb=gigabytes,
        refit_timeout_s=seconds,
    )
    made.init_communicator()
    yield made
    made.shutdown()


def states(report: Any) -> list[str]:
    return [outcome.state.value for outcome in report.engines.values()]


def trained(seed: int = 0) -> Any:
    """A model of its own, which a test may change."""
    return copy.deepcopy(kit.llama(seed))


# ---- what a sync does


def test_every_server_generates_with_the_policys_weights(two: list[ReferenceEngine]):
    with synchronizer(two, kit.llama(1)) as sync:
        assert sync.is_stale
        told = sync.sync_weights()
        assert not sync.is_stale

    assert [kit.served(engine) for engine in two] == [kit.tokens_of(1)] * 2
    assert [kit.label(engine) for engine in two] == [str(sync.report.version)] * 2
    assert told["version"] == sync.report.version
    assert told["bytes"] == sum(p.nbytes for p in kit.llama(1).parameters())


def test_every_sync_counts_once_and_sends_what_the_policy_has_then(two: list[ReferenceEngine]):
    model = trained()
    with synchronizer(two, model) as sync:
        sync.sync_weights()
        first = sync.report.version
        model.load_state_dict(kit.llama(1).state_dict())
        sync.sync_weights()

    assert sync.report.version == first + 1
    assert [kit.label(engine) for engine in two] == [str(first + 1)] * 2
    assert [kit.served(engine) for engine in two] == [kit.tokens_of(1)] * 2


def test_memory_comes_back_around_the_update(two: list[ReferenceEngine]):
    log = kit.Log(*two)
    with synchronizer(two, kit.llama(1), needs_offload=True) as sync:
        sync.generation.finish_generation()
        sync.sync_weights()

    wanted = [RELEASE, RESUME, INIT, *USUAL_STEPS, RESUME]
    told = {RELEASE, RESUME, INIT, *USUAL_STEPS}
    for engine in two:
        paths = [r["path"] for r in log.records(engine) if r["path"] in told]
        assert [p for i, p in enumerate(paths) if i == 0 or paths[i - 1] != p] == wanted
        tags = [body["tags"] for body in log.bodies(engine, RESUME)]
        assert tags == [["weights"], ["kv_cache", "cuda_graph"]]


@pytest.fixture(scope="module")
def saver() -> Iterator[ReferenceEngine]:
    """An engine that really frees its memory, and ends over every mistake with it."""
    with ReferenceEngine(kit.llama(0), memory_saver=True) as engine:
        yield engine


def test_an_engine_that_really_frees_its_memory_survives_rollouts_and_syncs(
    saver: ReferenceEngine,
):
    with synchronizer([saver], kit.llama(1), needs_offload=True) as sync:
        for _ in range(2):
            sync.generation.finish_generation()
            sync.sync_weights()
            assert kit.served(saver) == kit.tokens_of(1)


def test_the_policy_keeps_its_memory(engine: ReferenceEngine, monkeypatch: pytest.MonkeyPatch):
    moved: list[str] = []
    for name in ("offload_before_refit", "offload_after_refit"):
        monkeypatch.setattr(TorchPolicy, name, lambda _, name=name: moved.append(name))

    with synchronizer([engine], kit.llama(1)) as sync:
        sync.sync_weights()

    assert moved == []


def test_adapters_are_merged_on_the_way(engine: ReferenceEngine):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    model = peft.get_peft_model(trained(), config)

    with synchronizer([engine], model) as sync:
        sync.sync_weights()

    merged = copy.deepcopy(model).merge_and_unload()
    assert kit.served(engine) == kit.greedy(merged) != kit.tokens_of(0)


@pytest.mark.parametrize(("gigabytes", "requests"), [(1.0, 1), (20_000 / 1024**3, 4)])
def test_the_buffer_size_decides_how_many_requests_there_are(
    engine: ReferenceEngine, gigabytes: float, requests: int
):
    log = kit.Log(engine)
    with synchronizer([engine], kit.llama(1), gigabytes=gigabytes) as sync:
        sync.sync_weights()

    assert log.count(engine, UPDATE) >= requests
    assert (log.count(engine, UPDATE) == 1) == (requests == 1)


def test_the_transfer_is_timed_under_its_label(engine: ReferenceEngine):
    timed: list[str] = []

    class Timer:
        @contextmanager
        def time(self, label: str) -> Iterator[None]:
            timed.append(label)
            yield

    with synchronizer([engine], kit.llama(1)) as sync:
        sync.sync_weights(timer=Timer())

    assert timed == ["prepare_for_generation/transfer_and_update_weights"]


def test_every_rank_of_a_sharded_trainer_calls_and_all_get_the_same(two: list[ReferenceEngine]):
    log, urls, port = kit.Log(*two), [engine.url for engine in two], str(free_port())
    script = [sys.executable, "-m", "tests.synchronizers.sharded_policy"]
    ranks = [
        warm.start([*script, str(rank), port, *urls], cwd=ROOT, stdout=subprocess.PIPE)
        for rank in range(2)
    ]
    told = [rank.communicate(timeout=300)[0].decode().splitlines()[-1] for rank in ranks]

    assert [log.count(engine, RELEASE) for engine in two] == [2, 2]  # a second one would end it
    assert [log.count(engine, RESUME) for engine in two] == [4, 4]
    assert told[0] == told[1]
    assert [kit.served(engine) for engine in two] == [kit.tokens_of(1)] * 2
    assert {kit.label(engine) for engine in two} == {told[0].split()[0]}


# ---- the group


def test_the_group_is_made_once(two: list[ReferenceEngine]):
    log = kit.Log(*two)
    with synchronizer(two, kit.llama(1)) as sync:
        for _ in range(3):
            sync.sync_weights()

    assert [log.count(engine, INIT) for engine in two] == [1, 1]


def test_a_server_that_started_anew_is_joined_anew(two: list[ReferenceEngine]):
    log = kit.Log(*two)
    with synchronizer(two, kit.llama(1)) as sync:
        sync.sync_weights()
        two[1].restart()
        assert kit.served(two[1]) == kit.tokens_of(0)
        sync.sync_weights()

    assert [log.count(engine, INIT) for engine in two] == [2, 2]
    assert [kit.served(engine) for engine in two] == [kit.tokens_of(1)] * 2


def test_a_shutdown_leaves_the_group_and_makes_it_stale(two: list[ReferenceEngine]):
    log = kit.Log(*two)
    with synchronizer(two, kit.llama(1)) as sync:
        sync.sync_weights()
        sync.shutdown()
        assert sync.is_stale
        kit.wait_for(lambda: [log.count(engine, LEAVE) for engine in two] == [1, 1])

        sync.sync_weights()
        assert not sync.is_stale


# ---- failures


def test_a_server_that_refuses_leaves_known_states_and_the_next_sync_heals(
    two: list[ReferenceEngine],
):
    with synchronizer(two, kit.llama(1), gigabytes=20_000 / 1024**3) as sync:
        sync.sync_weights()
        two[1].inject(Fault(UPDATE, "refuse", after=1, times=1, status=400, message="no room"))

        with pytest.raises(RuntimeError, match=r"Weight transfer failed.*no room") as caught:
            sync.sync_weights()

        assert sync.is_stale
        assert isinstance(caught.value, EngineRejected)
        assert caught.value.engine == two[1].url
        assert states(caught.value.report) == [EngineState.MIXED] * 2
        assert [kit.is_paused(engine) for engine in two] == [True, True]

        sync.sync_weights()
        assert not sync.is_stale
        assert states(sync.report) == [EngineState.NEW] * 2

    assert [kit.served(engine) for engine in two] == [kit.tokens_of(1)] * 2


def test_a_server_that_dies_is_unreachable_and_comes_back(two: list[ReferenceEngine]):
    with synchronizer(two, kit.llama(1)) as sync:
        sync.sync_weights()
        two[1].inject(Fault(UPDATE, "die", times=1))

        with pytest.raises(WeightUpdateError) as caught:
            sync.sync_weights()
        assert sync.is_stale
        assert caught.value.report.engines[two[1].url].state is EngineState.UNREACHABLE

        two[1].restart()
        sync.sync_weights()

    assert [kit.served(engine) for engine in two] == [kit.tokens_of(1)] * 2


def test_a_server_that_hangs_is_given_up_after_the_refits_time(two: list[ReferenceEngine]):
    two[1].inject(Fault(UPDATE, "hang", times=1))
    with synchronizer(two, kit.llama(1), seconds=8.0) as sync:
        with pytest.raises(UpdateTimeout, match="Weight transfer failed"):
            sync.sync_weights()
        assert sync.is_stale


def test_memory_comes_back_after_a_failure_too(engine: ReferenceEngine):
    log = kit.Log(engine)
    engine.inject(Fault(PAUSE, "refuse", times=1, status=400, message="no"))
    with synchronizer([engine], kit.llama(1), needs_offload=True) as sync:
        sync.generation.finish_generation()
        with pytest.raises(RuntimeError):
            sync.sync_weights()

    assert log.count(engine, RESUME) == 2


def test_servers_that_are_gone_before_the_update_begins_are_unreachable(
    two: list[ReferenceEngine],
):
    with synchronizer(two, kit.llama(1), needs_offload=True) as sync:
        sync.sync_weights()
        sync.generation.finish_generation()
        for engine in two:
            os.kill(engine.pid, signal.SIGKILL)
            engine.process.wait(30)

        with pytest.raises(WeightUpdateError) as caught:
            sync.sync_weights()
        assert sync.is_stale
        assert states(caught.value.report) == [EngineState.UNREACHABLE] * 2

        for engine in two:
            engine.restart()
        sync.sync_weights()

    assert [kit.served(engine) for engine in two] == [kit.tokens_of(1)] * 2


def test_with_a_quorum_the_others_go_on(two: list[ReferenceEngine]):
    with synchronizer(two, kit.llama(1), quorum=1) as sync:
        sync.sync_weights()
        two[1].inject(Fault(UPDATE, "refuse", times=1, status=400, message="no room"))

        sync.sync_weights()
        assert not sync.is_stale
        assert sync.report.engines[two[0].url].state is EngineState.NEW
        assert any(two[1].url in warning for warning in sync.report.warnings)

        sync.sync_weights()
        assert states(sync.report) == [EngineState.NEW] * 2


REFUSED = [
    pytest.param({"k": 1.0}, ["k"], id="some"),
    pytest.param({}, [], id="none, and named all the same"),
]


@pytest.mark.parametrize(("scales", "named"), REFUSED)
def test_scales_are_refused_before_anything_is_asked(
    two: list[ReferenceEngine], scales: dict[str, float], named: list[str]
):
    log = kit.Log(*two)
    with synchronizer(two, kit.llama(1), needs_offload=True) as sync:
        with pytest.raises(ValueError, match=r"do not support kv_scales; got \[") as caught:
            sync.sync_weights(kv_scales=scales)
        assert str(named) in str(caught.value)
        assert [log.records(engine) for engine in two] == [[], []]


def test_a_server_that_forgot_its_weights_does_not_generate_until_a_sync_succeeds(
    saver: ReferenceEngine,
):
    saver.inject(Fault(UPDATE, "refuse", times=1, status=400, message="no room"))
    with synchronizer([saver], kit.llama(1), needs_offload=True) as sync:
        sync.generation.finish_generation()
        for mistake in ({"kv_scales": {"k": 1.0}}, {}):  # before an update begins, and during it
            sync.generation.prepare_for_generation()
            with pytest.raises(WeightUpdateError):
                sync.sync_weights(**mistake)
            assert kit.is_paused(saver)
            assert sync._carrier.delivery.engines[saver.url].state is EngineState.MIXED

        sync.sync_weights()

    assert kit.served(saver) == kit.tokens_of(1)


# ---- old prefixes


def cached_tokens(engine: ReferenceEngine) -> int:
    return int(engine.generate(kit.PROMPT, 1)["meta_info"]["cached_tokens"])


@pytest.mark.parametrize(("kv_policy", "kept"), [("flush", False), ("auto", False), ("keep", True)])
def test_prefixes_of_older_weights_go_or_stay(engine: ReferenceEngine, kv_policy: Any, kept: bool):
    with synchronizer([engine], kit.llama(1), kv_policy=kv_policy) as sync:
        engine.call("POST", FLUSH)
        cached_tokens(engine)
        assert cached_tokens(engine) > 0

        sync.sync_weights()

        assert (cached_tokens(engine) > 0) == kept


@pytest.fixture(scope="module")
def old() -> Iterator[ReferenceEngine]:
    """A release that cannot flush while requests wait to be resumed."""
    with ReferenceEngine(kit.llama(0), release="0.5.15") as engine:
        yield engine


def test_a_release_that_cannot_flush_is_refused_before_it_is_paused(old: ReferenceEngine):
    log = kit.Log(old)
    with synchronizer([old], kit.llama(1)) as sync:
        with pytest.raises(ConfigurationError, match="cannot flush its prefix cache"):
            sync.sync_weights()
        assert sync.is_stale

    assert log.count(old, PAUSE) == 0


@pytest.mark.parametrize(
    "options", [{"kv_policy": "auto"}, {"pause_generation_mode": "abort"}, {"kv_policy": "keep"}]
)
def test_it_is_taken_where_the_flush_may_fail_or_can_be_done(
    old: ReferenceEngine, options: dict[str, Any]
):
    log = kit.Log(old)
    with synchronizer([old], kit.llama(1), **options) as sync:
        sync.sync_weights()

    assert log.count(old, CONTINUE) > 0
    warned = any("prefix" in warning for warning in sync.report.warnings)
    assert warned == ("kv_policy" in options)


def test_requests_may_stand_still_where_prefixes_are_kept(engine: ReferenceEngine):
    with synchronizer(
        [engine], kit.llama(1), kv_policy="keep", pause_generation_mode="in_place"
    ) as sync:
        sync.sync_weights()

    assert not sync.report.engines[engine.url].held


# ---- a policy that sends by itself, as NeMo-RL's do


class SendingPolicy:
    """Stands for NeMo-RL's policy: its method names and signatures, over a real gloo group."""

    def __init__(self, model: Any) -> None:
        self._tensors = {name: p.detach() for name, p in model.named_parameters()}
        self._group: Any = None
        self.connected = 0

    def prepare_refit_info(self) -> dict[str, Any]:
        return {name: (tensor.shape, tensor.dtype) for name, tensor in self._tensors.items()}

    def get_free_memory_bytes(self) -> int:
        return 1 << 30

    def connect_sglang_rollout_engines_distributed(
        self, *, rollout_engines: list[str], engine_gpu_counts: list[int]
    ) -> None:
        self.connected += 1
        name, world = f"nemo-{id(self)}-{self.connected}", 1 + sum(engine_gpu_counts)
        group = UpdateGroup(
            address="127.0.0.1", port=None, world_size=world, device=torch.device("cpu"), name=name
        )
        place = {"master_address": group.address, "master_port": group.port, "world_size": world}
        offsets = [1 + sum(engine_gpu_counts[:i]) for i in range(len(rollout_engines))]
        joins = [
            spawn(post, url, INIT, {**place, "rank_offset": o, "group_name": name, **GLOO})
            for url, o in zip(rollout_engines, offsets, strict=True)
        ]
        group.join()
        assert {join.result(30) for join in joins} == {200}
        self._group = group

    def update_weights_to_sglang_distributed(
        self,
        *,
        rollout_engines: list[str],
        buffer_size_bytes: int,
        target_precision: str,
        sglang_quantization_cfg: dict[str, Any],
        rollout_engine_lock: Any,
    ) -> list[Any]:
        assert (buffer_size_bytes > 0, target_precision) == (True, "bf16")
        with rollout_engine_lock:
            body = {
                "names": list(self._tensors),
                "dtypes": [str(t.dtype).removeprefix("torch.") for t in self._tensors.values()],
                "shapes": [list(t.shape) for t in self._tensors.values()],
                "group_name": self._group.name,
                "flush_cache": False,
            }
            answers = [spawn(post, url, UPDATE, body) for url in rollout_engines]
            self._group.broadcast(list(self._tensors.values()))
            kit.wait_for(lambda: not self._group.moving())
            assert {answer.result(30) for answer in answers} == {200}
        return [spawn(lambda: True)]


GLOO = {"backend": "gloo"}


def post(url: str, path: str, body: Any) -> int:
    return requests.post(f"{url}{path}", json=body, timeout=60).status_code


def test_a_policy_that_sends_by_itself_fits_our_generation(two: list[ReferenceEngine]):
    policy = SendingPolicy(kit.llama(1))
    generation = SGLangGeneration([engine.url for engine in two], timeout=60.0)
    log = kit.Log(*two)
    sync = create_weight_synchronizer(policy, generation, "sglang", colocated=False)
    sync.init_communicator()

    for _ in range(2):
        sync.sync_weights()
        assert not sync.is_stale
    two[1].restart()
    sync.sync_weights()

    assert policy.connected == 2
    assert [kit.served(engine) for engine in two] == [kit.tokens_of(1)] * 2
    assert log.steps(two[0])[:6] == [PAUSE, BEGIN, UPDATE, END, FLUSH, CONTINUE]
