"""Two senders to the same servers: a vLLM server has one group, that of who came last."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from tests.vllm_fake import FakeVLLM
from weight_update import EngineState, SGLangWeightSender, WeightUpdateError
from weight_update.reference_engine import ReferenceEngine

from .mixed import Server, fleet_of, is_paused, llama, serves

OLD, NEW = EngineState.OLD, EngineState.NEW


@pytest.fixture(scope="module")
def pair() -> Iterator[list[Server]]:
    """An SGLang and a vLLM."""
    with ReferenceEngine(llama(0)) as sglang, FakeVLLM() as vllm:
        yield [sglang, vllm]


@pytest.fixture
def senders(pair: list[Server]) -> Iterator[list[SGLangWeightSender]]:
    scheme = fleet_of(pair, timeout=30.0)
    with scheme.create_sender() as one, scheme.create_sender() as other:
        yield [one, other]


def test_each_updates_after_the_other(
    senders: list[SGLangWeightSender], pair: list[Server]
) -> None:
    first = senders[0].update_weights(llama(1)).version
    for turn in range(1, 5):
        report = senders[turn % 2].update_weights(llama(1 - turn % 2))
        assert report.version == first + turn
        assert all(serves(server, OLD if turn % 2 else NEW) for server in pair)


def test_one_that_is_shut_down_leaves_the_others_group_alone(
    senders: list[SGLangWeightSender], pair: list[Server]
) -> None:
    one, other = senders
    one.update_weights(llama(1))
    other.update_weights(llama(0))
    one.shutdown()

    other.update_weights(llama(1))

    assert all(serves(server, NEW) for server in pair)


def test_both_at_once_wait_for_each_other(
    senders: list[SGLangWeightSender], pair: list[Server]
) -> None:
    versions: list[int] = []

    def push(sender: SGLangWeightSender) -> None:
        versions.extend(sender.update_weights(llama(1)).version for _ in range(3))

    threads = [threading.Thread(target=push, args=(sender,)) for sender in senders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    assert sorted(versions) == list(range(min(versions), min(versions) + 6))
    assert all(serves(server, NEW) for server in pair)


def test_a_server_that_waits_in_the_group_of_another_is_freed_by_its_push(
    senders: list[SGLangWeightSender], pair: list[Server]
) -> None:
    one, other = senders
    one.update_weights(llama(0))
    other.init_all_workers_group()  # no label tells of it
    with pytest.raises(WeightUpdateError):
        one.update_weights(llama(1))

    with pytest.raises(WeightUpdateError, match="blocks its workers"):
        other.update_weights(llama(1))
    one.update_weights(llama(1))

    assert all(serves(server, NEW) for server in pair)
    assert not any(is_paused(server) for server in pair)
