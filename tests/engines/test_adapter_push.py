"""One adapter is replaced on a real SGLang, and what it generates is what PEFT computes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from weight_update import EngineState, SGLangWeightSender, SGLangWeightSyncScheme
from weight_update.errors import ConfigurationError, EngineRejected

from .conftest import require
from .lora_server import LoRAServer, policy
from .models import SEED_A, TinyModels, greedy, tiny_llama
from .sglang_server import RELEASE, engine_of, save_models_for

PROMPT = [3, 14, 15, 92, 65]
TOKENS = 24
LONG = 1500


@pytest.fixture(scope="module")
def server(
    tiny_models: TinyModels, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LoRAServer]:
    require(engine_of(RELEASE))
    home = tmp_path_factory.mktemp("sglang-lora")
    with LoRAServer(tiny_models.a, home / "server.log") as started:
        yield started


@pytest.fixture
def sender(server: LoRAServer) -> Iterator[SGLangWeightSender]:
    scheme = SGLangWeightSyncScheme(server.url, lora="adapter", timeout=60)
    with scheme.create_sender() as made:
        yield made


def serves(server: LoRAServer, model: Any, adapter: str | None = "policy") -> bool:
    output = server.asked(PROMPT, TOKENS, adapter)["output_ids"]
    return bool(output == greedy(model, PROMPT, TOKENS))


def wait_until(happens: Callable[[], bool]) -> None:
    limit = time.monotonic() + 60
    while not happens():
        assert time.monotonic() < limit
        time.sleep(0.02)


def test_each_push_is_what_requests_for_the_adapter_get(
    server: LoRAServer, sender: SGLangWeightSender
) -> None:
    for seed in (1, 2, 3):
        model = policy(seed)

        report = sender.update_weights(model)

        assert report.verification == "checksum"
        assert serves(server, model)
        assert serves(server, tiny_llama(SEED_A), adapter=None)
        assert server.label() == str(report.version)
    assert server.asked(PROMPT, 4, "policy")["meta_info"]["weight_version"] == server.label()


def test_prefixes_of_the_adapter_before_are_not_used(
    server: LoRAServer, sender: SGLangWeightSender
) -> None:
    sender.update_weights(policy(1))
    server.asked(PROMPT, TOKENS, "policy")
    again = server.asked(PROMPT, TOKENS, "policy")["meta_info"]["cached_tokens"]

    sender.update_weights(policy(2))

    assert again > 0
    assert server.asked(PROMPT, TOKENS, "policy")["meta_info"]["cached_tokens"] == 0


def test_a_request_in_flight_ends_and_one_that_comes_meanwhile_gets_the_new_adapter(
    server: LoRAServer, sender: SGLangWeightSender
) -> None:
    old, new = policy(1), policy(2)
    sender.update_weights(old)
    with ThreadPoolExecutor() as pool:
        running = pool.submit(server.asked, PROMPT, LONG, "policy")
        wait_until(lambda: server.get("v1/loads")["loads"][0]["num_running_reqs"] > 0)
        sender.update_weights(new)
        ended = running.result(60)

    assert ended["meta_info"]["finish_reason"]["type"] == "abort"
    assert ended["output_ids"][:8] == greedy(old, PROMPT, 8)[: len(ended["output_ids"])]
    assert serves(server, new)


def test_the_scale_of_rslora_is_served(server: LoRAServer, sender: SGLangWeightSender) -> None:
    model = policy(4, use_rslora=True)

    sender.update_weights(model)

    assert serves(server, model)


def test_an_adapter_that_the_server_refuses_leaves_the_one_before(
    server: LoRAServer, sender: SGLangWeightSender
) -> None:
    kept = policy(1)
    version = sender.update_weights(kept).version

    with pytest.raises(EngineRejected, match="v_proj") as caught:
        sender.update_weights(policy(2, target_modules=["q_proj"]))

    assert caught.value.report.engines[server.url].state is EngineState.OLD
    assert serves(server, kept)
    assert server.label() == str(version)
    assert sender.update_weights(policy(2)).version == version + 1


@pytest.mark.parametrize(
    ("more", "words"),
    [({"r": 16}, "--max-lora-rank is 8"), ({"use_dora": True}, "DoRA")],
    ids=["rank", "DoRA"],
)
def test_what_the_server_cannot_serve_is_refused_before_a_pause(
    server: LoRAServer, sender: SGLangWeightSender, more: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigurationError, match=words):
        sender.update_weights(policy(1, **more))


@pytest.mark.parametrize("release", ["0.5.15.post1", "0.5.9"])
def test_older_releases_take_it_in_their_own_form(
    release: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    require(engine_of(release))
    home = tmp_path_factory.mktemp(release)
    models = save_models_for(release, home)
    with LoRAServer(models.a, home / "server.log", release) as older:
        scheme = SGLangWeightSyncScheme(older.url, lora="adapter", timeout=60)
        with scheme.create_sender() as sender:
            for seed in (1, 2):
                model = policy(seed)
                report = sender.update_weights(model)

                assert report.verification == "unverified"
                assert serves(older, model)
                assert older.label() == str(report.version)
        assert serves(older, tiny_llama(SEED_A), adapter=None)
