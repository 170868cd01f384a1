"""The row "SGLang, not colocated" on two real servers, one of which is killed and started anew."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from weight_update import EngineState, WeightUpdateError
from weight_update.synchronizers import SGLangGeneration, TorchPolicy, create_weight_synchronizer

from .long_request import LongRequest
from .models import SEED_A, SEED_B, greedy, tiny_llama
from .sglang_server import SGLangServer

PROMPT = [3, 14, 15, 92, 65]
Pair = tuple[SGLangServer, SGLangServer]


@pytest.fixture
def pair(sglang_at_a: SGLangServer, spare: SGLangServer) -> Pair:
    """Both servers on model A; the second one may be killed."""
    return sglang_at_a, spare


@contextmanager
def synchronizer(servers: Any, seed: int = SEED_B, **options: Any) -> Iterator[Any]:
    """What the factory makes of a trainer and servers that share nothing."""
    made = create_weight_synchronizer(
        TorchPolicy(tiny_llama(seed).eval()),
        SGLangGeneration([server.url for server in servers], **options),
        "sglang",
        colocated=False,
        refit_timeout_s=120.0,
    )
    made.init_communicator()
    yield made
    made.shutdown()


def serves(server: SGLangServer, seed: int) -> bool:
    return server.generate(PROMPT, 24) == greedy(tiny_llama(seed).eval(), PROMPT, 24)


def test_both_servers_get_the_policys_weights_and_count_them(pair: Pair) -> None:
    assert all(serves(server, SEED_A) for server in pair)

    with synchronizer(pair) as sync:
        assert sync.is_stale
        sync.sync_weights()
        assert not sync.is_stale
        first = sync.report
        sync.sync_weights()

    assert all(serves(server, SEED_B) for server in pair)
    assert sync.report.version == first.version + 1
    assert [server.label() for server in pair] == [str(sync.report.version)] * 2
    assert first.verification == "checksum"
    assert first.route.way == "broadcast"


def test_memory_is_freed_after_a_rollout_and_taken_back_around_a_sync(pair: Pair) -> None:
    """These servers have no memory saver: they count, free nothing, and end over a mistake."""
    with synchronizer(pair, needs_offload=True) as sync:
        request = LongRequest(pair[0].url, PROMPT, tokens=200)
        request.wait_for(1)
        for _ in range(2):  # the server would end if it was told while the request runs
            sync.generation.finish_generation()
        assert len(request.end()["output_ids"]) == 200
        sync.sync_weights()
        sync.generation.prepare_for_generation()
        assert all(serves(server, SEED_B) for server in pair)

        sync.generation.finish_generation()
        sync.sync_weights()

    assert all(serves(server, SEED_B) for server in pair)


def cached_tokens(server: SGLangServer) -> int:
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
    return int(server.post("generate", body)["meta_info"]["cached_tokens"])


@pytest.mark.parametrize(("kv_policy", "kept"), [("flush", False), ("keep", True)])
def test_prefixes_of_older_weights_go_or_stay(
    sglang_at_a: SGLangServer, kv_policy: Any, kept: bool
) -> None:
    cached_tokens(sglang_at_a)
    assert cached_tokens(sglang_at_a) > 0

    with synchronizer([sglang_at_a], kv_policy=kv_policy) as sync:
        sync.sync_weights()

    assert (cached_tokens(sglang_at_a) > 0) == kept


def test_a_server_that_is_killed_leaves_known_states_and_is_healed_once_it_is_back(
    pair: Pair,
) -> None:
    stays, dies = pair
    with synchronizer(pair, needs_offload=True) as sync:
        sync.sync_weights()
        dies.kill()
        with pytest.raises(WeightUpdateError) as caught:
            sync.sync_weights()

        assert sync.is_stale
        assert caught.value.report is not None
        assert caught.value.report.engines[dies.url].state is EngineState.UNREACHABLE
        assert caught.value.report.engines[stays.url].state is not EngineState.UNREACHABLE

        dies.restart()
        assert serves(dies, SEED_A)
        sync.generation.finish_generation()
        sync.sync_weights()
        assert not sync.is_stale

    assert all(serves(server, SEED_B) for server in pair)
