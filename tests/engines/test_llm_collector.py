"""TorchRL's ``LLMCollector`` samples from a real SGLang while its weights change."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torchrl.collectors.llm import LLMCollector
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.modules.llm import TransformersWrapper
from torchrl.objectives.llm import GRPOLoss, MCAdvantage

from tests.collectors import llm_kit
from weight_update import SGLangWeightSyncScheme, get_model_metadata
from weight_update.collectors.sglang_wrapper import SGLangWrapper
from weight_update.errors import EngineRejected
from weight_update.waiting import spawn

from .conftest import require
from .long_request import wait_until
from .models import SEED_A, SEED_B, TinyModels, shortfall, tiny_llama, tiny_tokenizer
from .sglang_server import RELEASE, SGLangServer, engine_of

KEY = "a-key-that-nobody-may-read"
LONG = 1500  # tokens that take seconds
ATTEMPTS = 4  # on a busy machine a server may make them all before a starved trainer pauses it
NEAR_TIE = 1e-3
SECONDS = 240.0


def greedy_policy(server: SGLangServer, tokens: int = 6, **options: Any) -> SGLangWrapper:
    kwargs = {"max_new_tokens": tokens, "temperature": 0.0, "ignore_eos": True}
    return llm_kit.policy(server.url, generate_kwargs=kwargs, **options)


def scheme_of(server: SGLangServer, **options: Any) -> SGLangWeightSyncScheme:
    return SGLangWeightSyncScheme(server.url, timeout=60.0, **options)


@pytest.fixture
def collector(sglang_at_a: SGLangServer) -> Iterator[LLMCollector]:
    """A collector of greedy answers of the session's server."""
    made = llm_kit.collector(greedy_policy(sglang_at_a))
    yield made
    made.shutdown()


def is_made_by(sample: Any, seed: int) -> bool:
    """Whether a sample's response is what a model would say greedily."""
    tokens = sample["tokens"]
    made = shortfall(tiny_llama(seed), tokens.prompt.tolist(), tokens.response.tolist())
    return made < NEAR_TIE


def running(server: SGLangServer) -> int:
    return int(server.get("v1/loads")["loads"][0]["num_running_reqs"])


def test_an_attached_collector_updates_the_server_and_its_samples_say_so(
    sglang_at_a: SGLangServer, collector: LLMCollector
) -> None:
    """C07: one bump an update, and each sample was made by the weights that it names."""
    models = {SEED_A: tiny_llama(SEED_A), SEED_B: tiny_llama(SEED_B)}
    scheme = scheme_of(sglang_at_a)
    scheme.attach(collector)
    for update, (seed, model) in enumerate(models.items(), start=1):
        collector.update_policy_weights_(model)
        batch = next(iter(collector)).reshape(-1)
        label = int(sglang_at_a.label())
        assert batch["weight_versions", "first"].unique().tolist() == [label]
        assert batch["weight_versions", "exact"].all()
        assert batch["next", "policy_version"].unique().tolist() == [update]
        assert all(is_made_by(sample, seed) for sample in batch.unbind(0))


def test_the_order_of_the_grpo_program_works_on_a_real_server(
    sglang_at_a: SGLangServer, collector: LLMCollector
) -> None:
    """C07: ``vllm_engine=`` and all; sizes and addresses come from the policy's engine."""
    engine, model = collector.policy.model, tiny_llama(SEED_B)
    scheme = SGLangWeightSyncScheme(
        server_url=engine.server_url,
        master_address=engine.get_master_address(),
        master_port=engine.get_master_port(),
        num_gpus=engine.get_tp_size() * engine.get_dp_size(),
        strategy="state_dict",
        device="cpu",
    )
    sender = scheme.create_sender()
    sender.register_model(model)
    sender.init_all_workers_group(get_model_metadata(model), vllm_engine=engine)
    sender.register_collector(collector)
    sender.update_weights()
    assert collector.policy_version == 1
    batch = next(iter(collector)).reshape(-1)
    sender.shutdown()
    assert batch["weight_versions", "last"].unique().tolist() == [int(sglang_at_a.label())]
    assert all(is_made_by(sample, SEED_B) for sample in batch.unbind(0))


@pytest.fixture
def keyed(tiny_models: TinyModels, tmp_path: Path) -> Iterator[SGLangServer]:
    """A server that answers nobody without a key."""
    require(engine_of(RELEASE))
    with SGLangServer(tiny_models.a, tmp_path / "server.log", ("--api-key", KEY)) as server:
        yield server


def test_a_server_that_wants_a_key_is_updated_and_sampled_from(keyed: SGLangServer) -> None:
    with scheme_of(keyed, api_key=KEY).create_sender() as sender:
        report = sender.update_weights(tiny_llama(SEED_B))

    samples = greedy_policy(keyed, api_key=KEY)(llm_kit.asked())

    assert all(is_made_by(sample, SEED_B) for sample in samples.unbind(0))
    assert samples["weight_versions", "last"].unique().tolist() == [report.version]
    with pytest.raises(EngineRejected, match="401") as caught:
        greedy_policy(keyed, api_key="another")
    assert "another" not in str(caught.value)


@pytest.mark.parametrize(("pause_mode", "on_abort"), [("retract", "retry"), ("abort", "continue")])
def test_each_token_is_the_choice_of_the_version_that_its_sample_names(
    sglang_at_a: SGLangServer, pause_mode: Any, on_abort: Any
) -> None:
    """C17: of responses that an update came into, cut short or not."""
    seeds = {}

    with scheme_of(sglang_at_a, pause_mode=pause_mode).create_sender() as sender:

        def attempt() -> Any:
            seeds[sender.update_weights(tiny_llama(SEED_A)).version] = SEED_A
            wait_until(lambda: running(sglang_at_a) == 0)
            policy = greedy_policy(sglang_at_a, LONG, on_abort=on_abort)
            call = spawn(policy, llm_kit.asked())
            wait_until(lambda: running(sglang_at_a) == llm_kit.ENVS or call.done())
            seeds[sender.update_weights(tiny_llama(SEED_B)).version] = SEED_B
            return call.result(SECONDS)

        def ended_before(batch: Any) -> bool:
            return bool((batch["weight_versions", "last"] != sender.version).any())

        for _ in range(ATTEMPTS):
            batch = attempt()
            if not ended_before(batch):
                break

    assert not ended_before(batch)
    assert batch["weight_versions", "mixed"].all()
    for sample in batch.unbind(0):
        prompt, response = sample["tokens"].prompt.tolist(), sample["tokens"].response.tolist()
        versions = sample["weight_versions"].response.tolist()
        assert len(response) == len(versions) == LONG
        for version in set(versions):
            start, end = versions.index(version), LONG - versions[::-1].index(version)
            made = shortfall(
                tiny_llama(seeds[version]), prompt + response[:start], response[start:end]
            )
            assert made < NEAR_TIE


def test_the_loss_of_the_weights_that_sampled_has_a_ratio_of_one(
    sglang_at_a: SGLangServer,
) -> None:
    """The server's log-probabilities, token by token, are those of the trainer's model."""
    model = tiny_llama(SEED_B)
    buffer = ReplayBuffer(
        storage=LazyStackStorage(64), transform=MCAdvantage(grpo_size=2), batch_size=llm_kit.ENVS
    )
    policy = llm_kit.policy(sglang_at_a.url)
    collector = llm_kit.collector(policy, env=llm_kit.dialogues(repeats=2), replay_buffer=buffer)
    with scheme_of(sglang_at_a).create_sender() as sender:
        sender.update_weights(model)
        next(iter(collector))
    collector.shutdown()
    actor = TransformersWrapper(
        model, tokenizer=tiny_tokenizer(), input_mode="tokens", generate=False
    )
    loss = GRPOLoss(actor, masking_strategy="rlhf")(buffer.sample())
    assert float(loss.ESS) == pytest.approx(1.0, abs=1e-3)
    assert torch.isfinite(loss.loss_objective).all()
    assert abs(float(loss.kl_approx)) < 1e-4
