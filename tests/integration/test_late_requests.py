"""An update request that a server gets late still finds the group that it names."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.integration import kit
from tests.integration.kit import LEAVE, UPDATE
from weight_update import EngineRejected
from weight_update.reference_engine import Fault, ReferenceEngine

LATE_SECONDS = 1.2


@pytest.fixture(params=["0.5.15", "0.5.20"])
def two(request: pytest.FixtureRequest) -> Iterator[list[ReferenceEngine]]:
    """Engines that end at a request of a group that they have dropped."""
    engines = [ReferenceEngine(kit.llama(0), release=request.param, wait=False) for _ in range(2)]
    try:
        for engine in engines:
            engine.wait_until_ready()
        yield engines
    finally:
        for engine in engines:
            engine.stop()


def refuse_one_and_delay_the_other(refusing: ReferenceEngine, late: ReferenceEngine) -> None:
    refusing.inject(Fault(UPDATE, "refuse", times=1))
    # Before its scheduler sees it.
    late.inject(Fault(UPDATE, "slow", seconds=LATE_SECONDS, times=1))


def test_a_server_is_not_told_to_drop_a_group_before_it_answered(
    two: list[ReferenceEngine],
) -> None:
    (refusing, late), log = two, kit.Log(*two)
    with kit.make_sender(two) as sender:
        sender.update_weights(kit.llama(0))
        refuse_one_and_delay_the_other(refusing, late)

        with pytest.raises(EngineRejected):
            sender.update_weights(kit.llama(1))
        time.sleep(LATE_SECONDS)

        assert log.count(refusing, LEAVE) == 1
        assert late.process.poll() is None


def test_a_push_right_after_a_failed_one_does_not_end_a_server_that_is_late(
    two: list[ReferenceEngine],
) -> None:
    refusing, late = two
    with kit.make_sender(two) as sender:
        sender.update_weights(kit.llama(0))
        refuse_one_and_delay_the_other(refusing, late)
        with pytest.raises(EngineRejected):
            sender.update_weights(kit.llama(1))

        sender.update_weights(kit.llama(1))
        time.sleep(LATE_SECONDS)
        sender.update_weights(kit.llama(1))

        assert [kit.served(engine) for engine in two] == [kit.tokens_of(1)] * 2
