"""Two real servers in one call, and one that is restarted between two updates."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from weight_update import EngineState, SGLangWeightSyncScheme, WeightUpdateError

from .models import SEED_A, SEED_B, TinyModels, greedy, tiny_llama
from .sglang_server import SGLangServer

# A server starts in 20 s on a quiet machine, and in minutes on a busy one.
pytestmark = pytest.mark.timeout(600)

PROMPT = [3, 14, 15, 92, 65]


@pytest.fixture(scope="module")
def second(
    sglang: SGLangServer, tiny_models: TinyModels, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SGLangServer]:
    """Another server on model A, which a test may restart."""
    log_path = tmp_path_factory.mktemp("second") / "server.log"
    # An idle scheduler takes a whole core otherwise.
    with SGLangServer(tiny_models.a, log_path) as server:
        yield server


def serves(server: SGLangServer, seed: int) -> bool:
    return server.generate(PROMPT, 24) == greedy(tiny_llama(seed), PROMPT, 24)


def test_two_servers_get_the_weights_in_one_call(
    sglang_at_a: SGLangServer, second: SGLangServer
) -> None:
    servers = (sglang_at_a, second)
    second.load(second.model_dir)
    assert all(serves(server, SEED_A) for server in servers)
    scheme = SGLangWeightSyncScheme([server.url for server in servers], timeout=60)

    with scheme.create_sender() as sender:
        report = sender.update_weights(tiny_llama(SEED_B))

    assert [report.engines[s.url].state for s in servers] == [EngineState.NEW] * 2
    assert [server.label() for server in servers] == [str(report.version)] * 2
    assert all(serves(server, SEED_B) for server in servers)


def test_a_server_restarted_on_its_port_is_healed_by_the_next_update(
    sglang_at_a: SGLangServer, second: SGLangServer
) -> None:
    servers = (sglang_at_a, second)
    scheme = SGLangWeightSyncScheme([server.url for server in servers], timeout=60)
    with scheme.create_sender() as sender:
        first = sender.update_weights(tiny_llama(SEED_B))
        second.stop()
        with pytest.raises(WeightUpdateError) as caught:
            sender.update_weights(tiny_llama(SEED_A))
        assert caught.value.engine == second.url
        assert caught.value.report is not None
        lost = caught.value.report.engines[second.url]
        assert lost.state is EngineState.UNREACHABLE
        assert serves(sglang_at_a, SEED_B)  # it was resumed, or never paused

        second.start()
        assert serves(second, SEED_A)  # what it was started on
        report = sender.update_weights(tiny_llama(SEED_B))

    assert [report.engines[s.url].state for s in servers] == [EngineState.NEW] * 2
    assert report.version == first.version + 1
    assert all(serves(server, SEED_B) for server in servers)
