"""``LLMCollector``: driven by a scheme, and its samples under TorchRL's own buffer and loss."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torchrl.collectors.llm import RayLLMCollector
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.modules.llm import TransformersWrapper
from torchrl.objectives.llm import GRPOLoss, MCAdvantage

from tests.collectors import llm_kit
from tests.engines.models import tiny_llama, tiny_tokenizer
from tests.integration import kit
from tests.integration.kit import INIT, UPDATE
from weight_update import ConfigurationError, EngineRejected, SGLangWeightSyncScheme
from weight_update.collectors.sglang_wrapper import staleness
from weight_update.reference_engine import Fault, ReferenceEngine
from weight_update.waiting import spawn

PAGE = Path(__file__).parents[2] / "docs" / "rollouts.md"
MODEL = tiny_llama(2)
SECONDS = 240.0


@pytest.fixture
def scheme(talker: ReferenceEngine) -> Iterator[SGLangWeightSyncScheme]:
    """A scheme of the engine, with a model in training."""
    made = SGLangWeightSyncScheme(talker.url, timeout=60.0)
    made.register_model(MODEL)
    yield made
    made.shutdown()


def collector_of(talker: ReferenceEngine, **options: Any) -> Any:
    return llm_kit.collector(llm_kit.policy(talker.url), **options)


def version_of(collector: Any) -> int:
    return int(collector.policy_version)


# ---- a collector that a scheme drives


def test_an_attached_collectors_updates_reach_the_engine_and_count_once(
    talker: ReferenceEngine, scheme: SGLangWeightSyncScheme
) -> None:
    """C07: 0, 1, 2, and the samples bear the engine's label."""
    log = kit.Log(talker)
    collector = collector_of(talker)
    scheme.attach(collector)
    assert (log.count(talker, INIT), log.count(talker, UPDATE)) == (1, 0)
    assert version_of(collector) == 0
    for expected in (1, 2):
        collector.update_policy_weights_()
        assert version_of(collector) == expected
        assert kit.label(talker) == str(expected)
        batch = next(iter(collector))
        assert batch["weight_versions", "first"].unique().tolist() == [expected]
        assert batch["next", "policy_version"].unique().tolist() == [expected]


def test_an_attached_collectors_failed_update_is_raised_and_does_not_count(
    talker: ReferenceEngine, scheme: SGLangWeightSyncScheme
) -> None:
    """C07: and the next one heals."""
    collector = collector_of(talker)
    scheme.attach(collector)
    talker.inject(Fault(UPDATE, "refuse", times=1))
    with pytest.raises(EngineRejected):
        collector.update_policy_weights_()
    assert version_of(collector) == 0
    collector.update_policy_weights_()
    assert version_of(collector) == 1


def test_an_attached_collector_may_be_given_the_weights(
    talker: ReferenceEngine, scheme: SGLangWeightSyncScheme
) -> None:
    collector = collector_of(talker)
    scheme.attach(collector)
    log = kit.Log(talker)
    collector.update_policy_weights_(tiny_llama(3))
    assert log.count(talker, UPDATE) >= 1
    assert version_of(collector) == 1


def test_a_collector_is_attached_once(
    talker: ReferenceEngine, scheme: SGLangWeightSyncScheme
) -> None:
    collector = collector_of(talker)
    scheme.attach(collector)
    with pytest.raises(ConfigurationError, match="already"):
        scheme.attach(collector)
    with pytest.raises(ConfigurationError, match="already"):
        SGLangWeightSyncScheme(talker.url).attach(collector)


def test_a_scheme_drives_one_collector_at_a_time(
    talker: ReferenceEngine, scheme: SGLangWeightSyncScheme
) -> None:
    first, second = collector_of(talker), collector_of(talker)
    scheme.attach(first)
    with pytest.raises(ConfigurationError, match="another collector"):
        scheme.attach(second)
    first.shutdown()
    scheme.attach(second)
    second.update_policy_weights_()
    assert (version_of(first), version_of(second)) == (0, 1)


@pytest.mark.parametrize(
    ("kind", "advice"),
    [(object, "weight_sync_schemes"), (RayLLMCollector, "register_collector")],
)
def test_another_kind_of_collector_is_refused_with_advice(
    scheme: SGLangWeightSyncScheme, kind: type[Any], advice: str
) -> None:
    with pytest.raises(ConfigurationError, match=advice):
        scheme.attach(kind.__new__(kind))


def test_attaching_again_is_the_way_on_after_engines_were_out_of_reach(
    talker: ReferenceEngine, scheme: SGLangWeightSyncScheme
) -> None:
    collector = collector_of(talker)
    talker.inject(Fault(INIT, "refuse", times=1))
    with pytest.raises(EngineRejected):
        scheme.attach(collector)
    scheme.attach(collector)
    collector.update_policy_weights_()
    assert version_of(collector) == 1


def test_updates_that_reached_no_engine_are_warned_of(
    talker: ReferenceEngine, scheme: SGLangWeightSyncScheme, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a scheme TorchRL's collector counts updates that it sends nowhere."""
    log = kit.Log(talker)
    collector = collector_of(talker)
    collector.update_policy_weights_()
    assert log.count(talker, UPDATE) == 0
    with caplog.at_level(logging.WARNING, logger="torchrl"):
        scheme.attach(collector)
    assert "counts from 1" in caplog.text


# ---- whose number a sample bears


def test_the_first_sample_after_an_update_bears_the_engines_new_number(
    talker: ReferenceEngine,
) -> None:
    """TorchRL's stamp of the root is that of the reset, which came before the update."""
    collector = collector_of(talker)
    with kit.make_sender(talker) as sender:
        sender.register_collector(collector)
        sender.update_weights(MODEL)
        samples = iter(collector)
        next(samples)
        sender.update_weights(MODEL)
        batch = next(samples)
    assert batch["policy_version"].unique().tolist() == [1]
    assert batch["weight_versions", "first"].unique().tolist() == [2]


def test_a_response_that_an_update_came_into_bears_both_numbers(talker: ReferenceEngine) -> None:
    """TorchRL's stamp is that of the step, after the response."""
    collector = llm_kit.collector(llm_kit.policy(talker.url, max_new_tokens=400))
    with kit.make_sender(talker) as sender:
        sender.register_collector(collector)
        sender.update_weights(MODEL)
        rollout = spawn(next, iter(collector))
        kit.wait_for(lambda: kit.running(talker) == llm_kit.ENVS, SECONDS)
        sender.update_weights(MODEL)
        batch = rollout.result(SECONDS)
    assert batch["next", "policy_version"].unique().tolist() == [2]
    assert batch["weight_versions", "first"].unique().tolist() == [1]
    assert batch["weight_versions", "last"].unique().tolist() == [2]
    assert batch["weight_versions", "mixed"].all()


def test_each_turn_of_a_dialogue_has_versions_of_its_own(talker: ReferenceEngine) -> None:
    collector = collector_of(talker, turns=2, dialog_turns_per_batch=2 * llm_kit.ENVS)
    with kit.make_sender(talker) as sender:
        sender.update_weights(MODEL)
        batch = next(iter(collector))
    assert batch.batch_size == torch.Size([llm_kit.ENVS, 2])
    for turn in batch.reshape(-1).unbind(0):
        versions, tokens = turn["weight_versions"], turn["tokens"]
        assert versions.full.shape == tokens.full.shape
        assert versions.full[len(tokens.prompt) :].tolist() == [1] * len(tokens.response)


# ---- TorchRL's buffer and loss


def grouped(talker: ReferenceEngine) -> tuple[Any, ReplayBuffer]:
    """A collector that writes groups of two samples into a buffer."""
    buffer = ReplayBuffer(
        storage=LazyStackStorage(64), transform=MCAdvantage(grpo_size=2), batch_size=llm_kit.ENVS
    )
    env = llm_kit.dialogues(repeats=2)
    return collector_of(talker, env=env, replay_buffer=buffer), buffer


def test_a_buffers_samples_can_be_chosen_by_staleness(talker: ReferenceEngine) -> None:
    collector, buffer = grouped(talker)
    with kit.make_sender(talker) as sender:
        for _ in range(2):
            sender.update_weights(MODEL)
            next(iter(collector))
        stale = staleness(buffer[:], sender.version)
    assert sorted(stale.tolist()) == [0] * llm_kit.ENVS + [1] * llm_kit.ENVS
    assert (buffer[:][stale == 0]["weight_versions", "first"] == 2).all()


def test_old_tokens_can_be_cleared_from_the_mask_of_a_buffers_samples(
    talker: ReferenceEngine,
) -> None:
    collector, buffer = grouped(talker)
    with kit.make_sender(talker) as sender:
        sender.update_weights(MODEL)
        next(iter(collector))
    batch = buffer.sample()
    for sample in batch.unbind(0):
        age = sender.version + 2 - sample["weight_versions"].full
        sample["masks"].all_assistant_mask &= age <= 1
    assert not any(sample["masks"].all_assistant_mask.any() for sample in batch.unbind(0))


def test_the_loss_of_the_weights_that_sampled_has_a_ratio_of_one(talker: ReferenceEngine) -> None:
    """Tokens, masks and log-probabilities belong together, ragged as they are."""
    collector, buffer = grouped(talker)
    with kit.make_sender(talker) as sender:
        sender.update_weights(MODEL)
        next(iter(collector))
    actor = TransformersWrapper(
        MODEL, tokenizer=tiny_tokenizer(), input_mode="tokens", generate=False
    )
    loss = GRPOLoss(actor, masking_strategy="rlhf")(buffer.sample())
    assert float(loss.ESS) == pytest.approx(1.0, abs=1e-4)
    assert abs(float(loss.kl_approx)) < 1e-4


def test_the_pages_code_runs(talker: ReferenceEngine) -> None:
    page = PAGE.read_text().split("\n## TorchRL")[1]
    sizes = {"512": "5", "6400": "4", "=64,": "=4,", "http://a:30000": talker.url}
    for shown, small in sizes.items():
        page = page.replace(shown, small)
    with kit.make_sender(talker) as sender:
        sender.register_model(MODEL)
        names: dict[str, Any] = {"tokenizer": tiny_tokenizer(), "env": llm_kit.dialogues()}
        names |= {"sender": sender, "model": MODEL}
        for code in re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL):
            exec(compile(code, str(PAGE), "exec"), names)
    assert names["fresh"].batch_size == torch.Size([llm_kit.ENVS])
    for sample in names["batch"].unbind(0):
        assert sample["masks"].all_assistant_mask.sum() == len(sample["tokens"].response)
    assert names["collector"].policy_version == 2
    names["scheme"].shutdown()
