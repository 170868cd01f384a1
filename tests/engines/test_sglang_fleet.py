"""Two real servers in one call, and one that is restarted between two updates."""

from __future__ import annotations

from dataclasses import replace

import pytest

from weight_update import EngineState, SGLangWeightSender, SGLangWeightSyncScheme, WeightUpdateError

from .models import SEED_A, SEED_B
from .served import Served
from .sglang_server import SGLangServer

pytestmark = pytest.mark.parametrize("served", [("llama", "float32")], indirect=True, ids="-".join)


@pytest.fixture
def pair(at_a: Served, spare: SGLangServer) -> tuple[Served, Served]:
    """Both servers on model A; a test may restart the second."""
    return at_a, replace(at_a, server=spare)


def sender_to(pair: tuple[Served, Served]) -> SGLangWeightSender:
    urls = [served.server.url for served in pair]
    return SGLangWeightSyncScheme(urls, timeout=60).create_sender()


def test_two_servers_get_the_weights_in_one_call(pair: tuple[Served, Served]) -> None:
    assert all(served.serves(SEED_A) for served in pair)

    with sender_to(pair) as sender:
        report = sender.update_weights(pair[0].model(SEED_B))

    assert [report.engines[p.server.url].state for p in pair] == [EngineState.NEW] * 2
    assert [served.server.label() for served in pair] == [str(report.version)] * 2
    assert all(served.serves(SEED_B) for served in pair)
    assert report.verification == "checksum"


def test_a_server_restarted_on_its_port_is_healed_by_the_next_update(
    pair: tuple[Served, Served],
) -> None:
    stays, second = pair
    with sender_to(pair) as sender:
        first = sender.update_weights(stays.model(SEED_B))
        second.server.stop()
        with pytest.raises(WeightUpdateError) as caught:
            sender.update_weights(stays.model(SEED_A))
        assert caught.value.engine == second.server.url
        assert caught.value.report is not None
        lost = caught.value.report.engines[second.server.url]
        assert lost.state is EngineState.UNREACHABLE
        assert stays.serves(SEED_B)  # it was resumed, or never paused

        second.server.start()
        assert second.serves(SEED_A)  # what it was started on
        report = sender.update_weights(stays.model(SEED_B))

    assert [report.engines[p.server.url].state for p in pair] == [EngineState.NEW] * 2
    assert report.version == first.version + 1
    assert all(served.serves(SEED_B) for served in pair)
