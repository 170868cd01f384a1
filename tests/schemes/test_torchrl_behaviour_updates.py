"""What TorchRL's users may rely on when a server is updated: what it is sent, and what is raised.

TorchRL's own tests of its SGLang updater describe this behaviour. Where ours differs, the test
says so, and why.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from typing import Any

import pytest
import requests
import torch
from tensordict import TensorDict

from tests.integration import kit
from tests.integration.kit import CONTINUE, FLUSH, INIT, LEAVE, PAUSE, UPDATE
from weight_update import (
    SGLangCollectiveTransport,
    SGLangWeightSender,
    SGLangWeightSyncScheme,
    get_model_metadata,
)
from weight_update.options import FLUSH_VARIABLE, PAUSE_MODE_VARIABLE
from weight_update.reference_engine import Fault, ReferenceEngine

SKIPPED = "Skipping the SGLang radix-cache flush"
META = get_model_metadata(kit.llama(1))


def weights() -> dict[str, torch.Tensor]:
    return {name: value.detach() for name, value in kit.llama(1).state_dict().items()}


@pytest.fixture
def sender(engine: ReferenceEngine) -> Iterator[SGLangWeightSender]:
    """As TorchRL's GRPO makes it: model, metadata, group."""
    with SGLangWeightSyncScheme(engine.url, timeout=60.0).create_sender() as made:
        made.register_model(kit.llama(1))
        made.init_all_workers_group(META)
        yield made


@pytest.fixture
def transport(engine: ReferenceEngine) -> Iterator[SGLangCollectiveTransport]:
    made = SGLangWeightSyncScheme(engine.url, timeout=60.0).create_transport()
    made.init_all_workers_group(META)
    yield made
    made.shutdown()


# -- the group -----------------------------------------------------------------------------


def test_servers_are_told_where_to_join_and_as_which_rank(
    engine: ReferenceEngine,
) -> None:
    log = kit.Log(engine)
    with kit.make_sender(engine) as sender:
        sender.init_all_workers_group(META)
        transport = sender._transport
        assert transport.check_connection() is True
        (body,) = log.bodies(engine, INIT)
        assert body["master_address"] == transport.master_address
        assert body["master_port"] == transport.master_port
        assert (body["rank_offset"], body["world_size"]) == (1, 2)
        assert body["backend"] == "gloo"  # ours: TorchRL always means NCCL
    assert transport.check_connection() is False


def test_every_attempt_has_a_group_name_of_its_own(engine: ReferenceEngine) -> None:
    """A server keeps the names of groups that were given up, and refuses one that it has."""
    log = kit.Log(engine)
    for _ in range(2):
        with kit.make_sender(engine) as sender:
            sender.init_all_workers_group(META)
            sender.init_all_workers_group(META)
    names = [body["group_name"] for body in log.bodies(engine, INIT)]
    assert len(set(names)) == 4


def test_making_a_group_sends_no_weights(engine: ReferenceEngine) -> None:
    log = kit.Log(engine)
    with kit.make_sender(engine) as sender:
        sender.init_all_workers_group(META, vllm_engine=object(), anything=1)
    assert log.steps(engine) == []


@pytest.mark.parametrize("kind", ["refuse", "success_false"])
def test_a_server_that_does_not_join_is_a_runtime_error_with_its_words(
    kind: Any, engine: ReferenceEngine
) -> None:
    """Ours: at once. TorchRL waits for its own side first, and says "timed out" after 300 s."""
    engine.inject(Fault(INIT, kind, message="no such group", times=1))
    with kit.make_sender(engine) as sender:
        with pytest.raises(RuntimeError, match="no such group"):
            sender.init_all_workers_group(META)
        assert sender._transport.check_connection() is False


def test_a_process_that_makes_a_group_keeps_its_environment(engine: ReferenceEngine) -> None:
    """Ours: TorchRL disables NCCL's P2P and SHM for the whole process, for good."""
    before = dict(os.environ)
    with kit.make_sender(engine) as sender:
        sender.init_all_workers_group(META)
    assert dict(os.environ) == before


# -- the requests --------------------------------------------------------------------------


def test_an_update_is_pause_update_continue_in_this_order(
    engine: ReferenceEngine, sender: SGLangWeightSender
) -> None:
    log = kit.Log(engine)
    sender.update_weights()
    order = [step for step in log.steps(engine) if step in (PAUSE, UPDATE, CONTINUE)]
    assert order == [PAUSE, UPDATE, CONTINUE]
    assert log.bodies(engine, CONTINUE) == [{"torch_empty_cache": True}]
    assert kit.served(engine) == kit.tokens_of(1)


def test_update_requests_name_every_weight_once_with_bare_dtypes_and_plain_shapes(
    engine: ReferenceEngine, sender: SGLangWeightSender
) -> None:
    log = kit.Log(engine)
    sender.update_weights()
    bodies = log.bodies(engine, UPDATE)
    announced = {
        name: (dtype, shape)
        for body in bodies
        for name, dtype, shape in zip(body["names"], body["dtypes"], body["shapes"], strict=True)
    }
    assert announced == {
        name: (str(dtype).removeprefix("torch."), list(shape))
        for name, (dtype, shape) in META.items()
    }
    assert sum(len(body["names"]) for body in bodies) == len(META)


def test_no_update_request_aborts_requests_and_all_name_the_group(
    engine: ReferenceEngine, sender: SGLangWeightSender
) -> None:
    """The pause is the barrier; an endpoint's own abort would end what retract keeps."""
    log = kit.Log(engine)
    sender.update_weights()
    for body in log.bodies(engine, UPDATE):
        assert body["abort_all_requests"] is False
        assert body["group_name"] == sender._transport._updater.group.name
        assert isinstance(body["flush_cache"], bool)
        assert json.dumps(body)


def test_names_that_the_metadata_does_not_have_are_not_sent(
    engine: ReferenceEngine, transport: SGLangCollectiveTransport
) -> None:
    log = kit.Log(engine)
    transport.send_weights("model", {**weights(), "value_head.weight": torch.ones(3)})
    names = [name for body in log.bodies(engine, UPDATE) for name in body["names"]]
    assert sorted(names) == sorted(META)


def nested() -> TensorDict:
    return TensorDict(weights()).unflatten_keys(".")


@pytest.mark.parametrize(
    "source", [weights, lambda: TensorDict(weights()), nested, lambda: kit.llama(1)]
)
def test_weights_may_be_given_in_any_of_torchrls_forms(
    source: Any, engine: ReferenceEngine, sender: SGLangWeightSender
) -> None:
    """Ours: a nested TensorDict (TorchRL's default strategy never matches), and a module."""
    kit.push(engine, kit.llama(0))
    sender.update_weights(source())
    assert kit.served(engine) == kit.tokens_of(1)


@pytest.mark.parametrize("strategy", ["tensordict", "state_dict"])
def test_both_strategies_send_the_same_names(strategy: Any, engine: ReferenceEngine) -> None:
    """Ours: TorchRL's default one fails on every real model."""
    log = kit.Log(engine)
    with kit.make_sender(engine, strategy=strategy) as sender:
        sender.init_all_workers_group(META)
        sender.update_weights(kit.llama(1))
    names = [name for body in log.bodies(engine, UPDATE) for name in body["names"]]
    assert sorted(names) == sorted(META)


# -- pause and flush -----------------------------------------------------------------------

POLICY = [
    # mode, argument, variable, is a flush sent?, is one skipped with a warning?
    ("abort", None, None, True, False),
    ("abort", True, None, True, False),
    ("abort", False, None, False, False),
    ("abort", None, "1", True, False),
    ("abort", False, "yes", True, False),
    ("abort", None, "off", False, False),
    ("abort", True, "0", False, False),
    ("in_place", None, "true", False, True),
    ("in_place", False, "on", False, True),
    ("in_place", False, None, False, False),
    ("in_place", None, "no", False, False),
    ("retract", False, None, False, False),
    ("retract", None, "False", False, False),
    # Ours: this release can flush under retract, so no stale prefix is left; TorchRL never does.
    ("retract", None, None, True, False),
    ("retract", False, "TRUE", True, False),
    # Ours: the cache stays stale in this mode, which is said although nobody asked for a flush.
    ("in_place", None, None, False, True),
]


@pytest.mark.parametrize(("mode", "argument", "variable", "sent", "skipped"), POLICY)
def test_a_flush_is_sent_when_it_is_wanted_and_the_mode_can_have_it(
    engine: ReferenceEngine,
    monkeypatch: pytest.MonkeyPatch,
    mode: Any,
    argument: bool | None,
    variable: str | None,
    sent: bool,
    skipped: bool,
) -> None:
    if variable is not None:
        monkeypatch.setenv(FLUSH_VARIABLE, variable)
    log = kit.Log(engine)
    with kit.make_sender(engine, pause_mode=mode, flush_cache_on_update=argument) as sender:
        report = sender.update_weights(kit.llama(1))
    assert log.bodies(engine, PAUSE) == [{"mode": mode}]
    assert log.flushes(engine) == int(sent)
    assert any(SKIPPED in warning for warning in report.warnings) == skipped


def test_a_skipped_flush_is_logged_once_for_a_sender(
    engine: ReferenceEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(FLUSH_VARIABLE, "1")
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            with kit.make_sender(engine, pause_mode="in_place") as sender:
                sender.update_weights(kit.llama(1))
                sender.update_weights(kit.llama(1))
    assert caplog.text.count(SKIPPED) == 2


def test_variables_are_read_at_each_send(
    engine: ReferenceEngine, monkeypatch: pytest.MonkeyPatch, sender: SGLangWeightSender
) -> None:
    log = kit.Log(engine)
    for mode, flush in (("abort", "0"), ("abort", "1"), ("in_place", "0"), ("retract", "0")):
        monkeypatch.setenv(PAUSE_MODE_VARIABLE, mode)
        monkeypatch.setenv(FLUSH_VARIABLE, flush)
        sender.update_weights()
    modes = [body["mode"] for body in log.bodies(engine, PAUSE)]
    assert modes == ["abort", "abort", "in_place", "retract"]
    assert log.flushes(engine) == 1


@pytest.mark.parametrize(("status", "answer"), [(None, True), (400, False), (500, False)])
def test_a_flush_on_demand_says_whether_the_server_did_it(
    status: int | None, answer: bool, engine: ReferenceEngine, sender: SGLangWeightSender
) -> None:
    if status is not None:
        engine.inject(Fault(FLUSH, "refuse", status=status, times=1))
    assert sender.flush_cache() is answer


# -- failures ------------------------------------------------------------------------------


def test_a_pause_that_is_refused_is_raised_and_nothing_is_sent(
    engine: ReferenceEngine, sender: SGLangWeightSender
) -> None:
    engine.inject(Fault(PAUSE, "refuse", status=500, message="not now", times=1))
    log = kit.Log(engine)
    with pytest.raises(RuntimeError, match="not now"):
        sender.update_weights()
    assert log.count(engine, UPDATE) == 0


@pytest.mark.parametrize(
    ("kind", "status"), [("refuse", 400), ("refuse", 500), ("success_false", 200)]
)
def test_an_update_that_is_refused_is_raised_with_the_servers_words_and_the_server_resumed(
    kind: Any, status: int, engine: ReferenceEngine, sender: SGLangWeightSender
) -> None:
    """Ours: one error that is a RuntimeError and an HTTPError, and has the words in both cases."""
    engine.inject(Fault(UPDATE, kind, status=status, message="wrong shape", times=1))
    log = kit.Log(engine)
    with pytest.raises(RuntimeError, match="wrong shape") as caught:
        sender.update_weights()
    assert isinstance(caught.value, requests.HTTPError)
    assert log.count(engine, CONTINUE) == 1
    assert not kit.is_paused(engine)
    sender.update_weights()
    assert kit.served(engine) == kit.tokens_of(1)


def test_of_two_failures_the_update_is_raised_and_not_the_resume(
    engine: ReferenceEngine, sender: SGLangWeightSender
) -> None:
    engine.inject(Fault(UPDATE, "refuse", message="wrong shape", times=1))
    engine.inject(Fault(CONTINUE, "refuse", message="cannot continue", times=1))
    with pytest.raises(RuntimeError, match="wrong shape") as caught:
        sender.update_weights()
    assert "cannot continue" not in caught.value.message
    assert "cannot continue" in str(caught.value)  # ours: the state of the engine tells of it


def test_a_resume_that_fails_after_a_good_update_is_raised(
    engine: ReferenceEngine, sender: SGLangWeightSender
) -> None:
    engine.inject(Fault(CONTINUE, "refuse", message="cannot continue", times=2))
    with pytest.raises(RuntimeError, match="cannot continue") as caught:
        sender.update_weights()
    assert caught.value.phase == "continue"


@pytest.mark.parametrize(
    "change",
    [
        {"lm_head.weight": None},
        {"lm_head.weight": torch.ones(2, 2)},
        {"lm_head.weight": torch.ones(64, 32).half()},
    ],
    ids=["missing", "shape", "dtype"],
)
def test_weights_that_are_not_as_announced_are_a_value_error_before_any_pause(
    change: dict[str, Any], engine: ReferenceEngine, transport: SGLangCollectiveTransport
) -> None:
    given = {name: value for name, value in (weights() | change).items() if value is not None}
    log = kit.Log(engine)
    with pytest.raises(ValueError, match=r"lm_head\.weight"):
        transport.send_weights("model", given)
    assert log.count(engine, PAUSE) == 0


# -- collectors and the end ----------------------------------------------------------------


def test_collectors_count_successes_alone_and_one_that_cannot_is_only_warned_of(
    engine: ReferenceEngine, sender: SGLangWeightSender, caplog: pytest.LogCaptureFixture
) -> None:
    class Gone:
        def increment_version(self) -> None:
            raise RuntimeError("worker is gone")

    collector = kit.Collector()
    sender.register_collector(Gone())
    sender.register_collector(collector)
    with caplog.at_level(logging.WARNING):
        sender.update_weights()
        engine.inject(Fault(UPDATE, "refuse", times=1))
        with pytest.raises(RuntimeError):
            sender.update_weights()
    assert collector.version == 1
    assert "worker is gone" in caplog.text


def test_hooks_hear_of_successes_alone_and_after_the_server_goes_on(
    engine: ReferenceEngine, sender: SGLangWeightSender
) -> None:
    heard: list[tuple[bool, list[int]]] = []
    sender.register_post_hook(lambda: heard.append((kit.is_paused(engine), kit.served(engine))))
    engine.inject(Fault(UPDATE, "refuse", times=1))
    with pytest.raises(RuntimeError):
        sender.update_weights()
    assert heard == []
    sender.update_weights()
    assert heard == [(False, kit.tokens_of(1))]


def test_shutdown_ends_the_group_and_forgets_who_counted(engine: ReferenceEngine) -> None:
    """Ours: on the server's side too, so that it may join another one."""
    log, collector, hooks = kit.Log(engine), kit.Collector(), []
    sender = kit.make_sender(engine)
    sender.register_collector(collector)
    sender.register_post_hook(lambda: hooks.append(1))
    sender.update_weights(kit.llama(1))
    for _ in range(2):
        sender.shutdown()
    assert log.count(engine, LEAVE) == 1
    sender.update_weights(kit.llama(1))
    sender.shutdown()
    assert (collector.version, len(hooks)) == (1, 1)
