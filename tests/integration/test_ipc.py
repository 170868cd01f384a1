"""Updates through shared memory: no group, one request a bucket, and engines that may end."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from weight_update import (
    ConfigurationError,
    EngineState,
    EngineUnreachable,
    Stream,
    WeightUpdateError,
)
from weight_update.reference_engine import Fault, ReferenceEngine
from weight_update.transports import shared_memory

from . import kit
from .kit import BEGIN, CONTINUE, END, FLUSH, INIT, LEAVE, PAUSE, STAMP

OPEN = "/update_weights_from_tensor"
NORM = "model.norm.weight"
SHORT = 2.0
NEW, MIXED, OLD = EngineState.NEW, EngineState.MIXED, EngineState.OLD
GONE = EngineState.UNREACHABLE


def make_sender(engines: Any, **options: Any) -> Any:
    return kit.make_sender(engines, transport="ipc", **options)


def own_files() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob(f"torch_{os.getpid()}_*")}


def open_files(pid: int) -> int:
    """How many files a process has open, less its sockets: HTTP connections come and go."""
    count = 0
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # it was closed meanwhile
            count += not os.readlink(file).startswith("socket:")
    return count


# ---- a plain update


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("load_format", ["auto", "flattened_bucket", "tensors"])
@pytest.mark.parametrize("bucket_bytes", [None, 20_000])
def test_engines_generate_with_the_new_weights_after_an_update(
    size: int, load_format: str, bucket_bytes: int | None, three: list[ReferenceEngine]
) -> None:
    engines = three[:size]
    with make_sender(engines, load_format=load_format, bucket_bytes=bucket_bytes) as sender:
        for seed in (0, 1):
            report = sender.update_weights(kit.llama(seed))
            assert [kit.served(e) for e in engines] == [kit.tokens_of(seed)] * size
            assert {outcome.state for outcome in report.engines.values()} == {NEW}
    assert (report.buckets > 1) is (bucket_bytes is not None)
    assert report.route is not None
    assert (report.route.way, report.route.backend) == ("ipc", "shared memory")


def test_nobody_joins_a_group_and_the_steps_come_in_order(engine: ReferenceEngine) -> None:
    with make_sender(engine, bucket_bytes=20_000) as sender:
        sender.update_weights(kit.llama(0))
        log = kit.Log(engine)
        report = sender.update_weights(kit.llama(1))
    steps = (PAUSE, BEGIN, OPEN, END, STAMP, CONTINUE)
    paths = [r["path"] for r in log.records(engine) if r["path"] in (*steps, FLUSH, INIT, LEAVE)]
    assert [p for i, p in enumerate(paths) if i == 0 or paths[i - 1] != p] == list(steps)
    assert log.count(engine, OPEN) == report.buckets
    bodies = log.bodies(engine, OPEN)
    assert {body["abort_all_requests"] for body in bodies} == {False}
    # Two requests are on their way at a time: the log may show them in either order.
    assert sum(log.flags(engine, OPEN)) == 1


def test_whether_memory_can_be_opened_is_tried_before_the_first_update(
    engine: ReferenceEngine,
) -> None:
    log = kit.Log(engine)
    with make_sender(engine) as sender:
        sender.update_weights(kit.llama(1))
    first = next(body for body in log.bodies(engine, OPEN))
    assert len(str(first)) < len(str(log.bodies(engine, OPEN)[-1]))
    paths = [r["path"] for r in log.records(engine) if r["path"] in (OPEN, CONTINUE)]
    assert paths.index(CONTINUE) < len(paths) - 1 - paths[::-1].index(OPEN)


def test_dtypes_may_be_mixed_and_strides_may_be_any(engine: ReferenceEngine) -> None:
    kinds = (torch.float32, torch.bfloat16, torch.float64)
    tensors = {
        name: value.detach().to(kinds[i % 3]).mT.contiguous().mT
        if value.dim() == 2
        else value.detach().to(kinds[i % 3])
        for i, (name, value) in enumerate(kit.llama(1).state_dict().items())
    }
    expected = LlamaForCausalLM(kit.llama(1).config)
    expected.load_state_dict({name: value.float() for name, value in tensors.items()})
    for load_format in ("auto", "tensors"):
        kit.push(engine, kit.llama(0))
        with make_sender(engine, load_format=load_format, verify="off") as sender:
            sender.update_weights(tensors)
        assert kit.served(engine) == kit.greedy(expected.eval())


def test_a_stream_arrives_bucket_by_bucket(engine: ReferenceEngine) -> None:
    def pairs() -> Iterator[tuple[str, torch.Tensor]]:
        yield from ((name, p.detach().clone()) for name, p in kit.llama(1).named_parameters())

    with make_sender(engine, bucket_bytes=20_000) as sender:
        report = sender.update_weights(Stream(pairs(), whole=True))
    assert report.buckets > 2
    assert kit.served(engine) == kit.tokens_of(1)


@pytest.mark.parametrize("load_format", ["auto", "tensors"])
def test_every_tensor_parallel_rank_opens_all_of_it(load_format: str) -> None:
    with (
        ReferenceEngine(kit.llama(0), tp=2) as wide,
        make_sender(wide, load_format=load_format, bucket_bytes=20_000) as sender,
    ):
        for seed in (1, 0, 1):
            sender.update_weights(kit.llama(seed))
            assert kit.served(wide) == kit.tokens_of(seed)


@pytest.mark.parametrize("release", ["0.5.9", "0.5.15"])
def test_releases_before_sessions_take_it_too(release: str) -> None:
    with (
        ReferenceEngine(kit.llama(0), release=release) as older,
        make_sender(older) as sender,
    ):
        sender.update_weights(kit.llama(1))
        assert kit.served(older) == kit.tokens_of(1)


# ---- nothing grows


@pytest.mark.parametrize("load_format", ["auto", "tensors"])
def test_a_hundred_updates_leave_no_file_more_and_no_memory_behind(
    engine: ReferenceEngine, load_format: str
) -> None:
    before = own_files()
    with make_sender(engine, load_format=load_format, bucket_bytes=30_000) as sender:
        sender.update_weights(kit.llama(1))
        sender.update_weights(kit.llama(1))
        used, ours, theirs = own_files(), open_files(os.getpid()), open_files(engine.pid)
        for index in range(100):
            sender.update_weights(kit.llama(index % 2))
        assert own_files() == used
        assert open_files(os.getpid()) <= ours
        assert open_files(engine.pid) <= theirs
        assert kit.served(engine) == kit.tokens_of(1)
    assert own_files() <= before


def test_errors_that_somebody_keeps_cost_no_more_memory(engine: ReferenceEngine) -> None:
    with make_sender(engine) as sender:
        sender.update_weights(kit.llama(0))
        used, kept = own_files(), []
        for _ in range(3):
            engine.inject(Fault(OPEN, "refuse", times=1))
            with pytest.raises(WeightUpdateError) as caught:
                sender.update_weights(kit.llama(1))
            kept.append(caught.value)
            sender.update_weights(kit.llama(1))
        assert own_files() == used
    assert kit.served(engine) == kit.tokens_of(1)


def test_an_engine_opens_memory_though_another_has_already_refused_it(
    three: list[ReferenceEngine],
) -> None:
    """One that finds it gone would end."""
    refusing, late = three[:2]
    with make_sender([refusing, late]) as sender:
        sender.update_weights(kit.llama(0))
        late.inject(Fault(OPEN, "slow", seconds=1.0, times=1))
        refusing.inject(Fault(OPEN, "refuse", times=1))
        with pytest.raises(WeightUpdateError):
            sender.update_weights(kit.llama(1))
        sender.update_weights(kit.llama(1))
        assert kit.served(late) == kit.tokens_of(1)
        assert late.process.poll() is None


# ---- what speaks against it is said before anything is paused


def test_an_engine_of_another_host_is_refused(
    engine: ReferenceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_memory, "_is_here", lambda _: False)
    log = kit.Log(engine)
    with (
        make_sender(engine) as sender,
        pytest.raises(ConfigurationError, match="on this host") as caught,
    ):
        sender.update_weights(kit.llama(1))
    assert (caught.value.phase, caught.value.engine) == ("connect", engine.url)
    assert log.count(engine, PAUSE) == 0


def test_a_shape_that_would_end_the_engine_is_refused(engine: ReferenceEngine) -> None:
    with make_sender(engine) as sender:
        sender.update_weights(kit.llama(1))
        log = kit.Log(engine)
        with pytest.raises(WeightUpdateError, match="took"):
            sender.update_weights({NORM: torch.ones(3)})
    assert log.count(engine, PAUSE) == 0
    assert kit.served(engine) == kit.tokens_of(1)


def test_buffers_without_room_are_refused(
    engine: ReferenceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make_sender(engine) as sender:
        sender.update_weights(kit.llama(1))
        log = kit.Log(engine)
        monkeypatch.setattr(shared_memory, "_free", lambda _: -(1 << 20))
        with pytest.raises(ConfigurationError, match="do not fit on cpu"):
            sender.update_weights(kit.llama(0))
    assert log.count(engine, PAUSE) == 0


# ---- engines that fail

FAULTS: list[tuple[str, dict[str, Any], set[EngineState]]] = [
    ("refuse", {}, {OLD, MIXED}),  # the next bucket may be on its way, and is taken
    ("success_false", {}, {OLD, MIXED}),
    ("close", {}, {MIXED}),
    ("die", {}, {GONE}),
    ("die", {"when": "after_receive"}, {GONE}),
    ("die", {"when": "after_load", "tensors": 3}, {GONE}),
    ("refuse", {"when": "after_load", "tensors": 3}, {GONE}),
    ("refuse", {"after": 2}, {MIXED}),
    ("close", {"when": "before_answer"}, {MIXED}),
    ("hang", {"when": "after_receive"}, {MIXED, GONE}),
    ("stop", {"when": "after_load", "tensors": 3}, {GONE}),
]


@pytest.mark.parametrize(
    ("kind", "fields", "states"),
    FAULTS,
    ids=[f"{kind}-{'-'.join(map(str, fields.values()))}" for kind, fields, _ in FAULTS],
)
def test_a_failure_says_what_the_engine_holds_and_the_next_update_heals_it(
    kind: Any, fields: dict[str, Any], states: set[EngineState], three: list[ReferenceEngine]
) -> None:
    struck = three[0]
    bystanders = three[1:2]
    with make_sender([struck, *bystanders], bucket_bytes=20_000) as sender:
        sender.update_weights(kit.llama(0))
        struck.inject(Fault(OPEN, kind, times=1, **fields))
        waits = kind in ("hang", "stop")
        with (
            kit.timeout_of(sender, SHORT if waits else 60.0),
            pytest.raises(WeightUpdateError) as caught,
        ):
            sender.update_weights(kit.llama(1))
        assert caught.value.phase == "transfer"
        assert caught.value.report is not None
        assert caught.value.report.engines[struck.url].state in states
        for engine in bystanders:
            assert caught.value.report.engines[engine.url].state in (MIXED, OLD)
        kit.revive(struck)
        sender.update_weights(kit.llama(1))
        assert [kit.served(e) for e in (struck, *bystanders)] == [kit.tokens_of(1)] * 2


def test_an_engine_that_ended_is_said_to_have_ended(engine: ReferenceEngine) -> None:
    with make_sender(engine) as sender:
        sender.update_weights(kit.llama(0))
        engine.inject(Fault(OPEN, "die", when="after_receive", times=1))
        with pytest.raises(EngineUnreachable, match="the server ended"):
            sender.update_weights(kit.llama(1))


def test_an_engine_that_cannot_open_memory_is_found_out_before_the_first_update(
    engine: ReferenceEngine,
) -> None:
    engine.inject(Fault(OPEN, "die", times=1))
    with make_sender(engine) as sender:
        with pytest.raises(EngineUnreachable, match="the server ended") as caught:
            sender.update_weights(kit.llama(1))
        assert caught.value.report is not None
        assert caught.value.report.bytes == 0
        engine.restart()
        sender.update_weights(kit.llama(1))
        assert kit.served(engine) == kit.tokens_of(1)


def test_an_engine_that_reads_late_ends_up_with_the_weights_of_the_next_update(
    engine: ReferenceEngine,
) -> None:
    """It obeys in order: what it reads from a buffer that was filled anew is overwritten."""
    with make_sender(engine, bucket_bytes=20_000) as sender:
        sender.update_weights(kit.llama(0))
        late = Fault(OPEN, "slow", when="after_receive", tensors=0, seconds=6.0, times=1)
        engine.inject(late)
        with kit.timeout_of(sender, SHORT), pytest.raises(WeightUpdateError):
            sender.update_weights(kit.llama(1))
        assert sender.engines[engine.url].state is not NEW
        for seed in (2, 3):
            sender.update_weights(kit.llama(seed))
            assert kit.served(engine) == kit.tokens_of(seed)


def test_with_a_quorum_the_others_get_everything_and_the_one_that_died_catches_up(
    three: list[ReferenceEngine],
) -> None:
    with make_sender(three, quorum=2, bucket_bytes=20_000) as sender:
        sender.update_weights(kit.llama(0))
        three[0].inject(Fault(OPEN, "die", when="after_receive", after=1, times=1))
        report = sender.update_weights(kit.llama(1))
        assert [kit.served(engine) for engine in three[1:]] == [kit.tokens_of(1)] * 2
        assert report.engines[three[0].url].state is EngineState.UNREACHABLE
        three[0].restart()
        sender.update_weights(kit.llama(2))
        assert [kit.served(engine) for engine in three] == [kit.tokens_of(2)] * 3


def test_a_slow_engine_that_a_quorum_left_behind_finds_the_memory_that_it_was_told_of(
    three: list[ReferenceEngine],
) -> None:
    """A real one ends when it does not."""
    slow = three[2]
    with make_sender(three, quorum=2, bucket_bytes=20_000) as sender:
        sender.update_weights(kit.llama(0))
        slow.inject(Fault(OPEN, "slow", when="after_receive", tensors=0, seconds=8.0, times=1))
        with kit.timeout_of(sender, 6.0):
            report = sender.update_weights(kit.llama(1))
        states = [report.engines[engine.url].state for engine in three]
        assert states[:2] == [NEW, NEW]
        assert states[2] is not NEW
        report = sender.update_weights(kit.llama(2))
        assert [kit.served(engine) for engine in three] == [kit.tokens_of(2)] * 3
        assert not report.warnings
