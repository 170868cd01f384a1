"""The sender in the order of calls of TorchRL's GRPO programs, sync and async."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.modules.llm import AsyncSGLang

from tests.collectors import llm_kit
from tests.engines.models import greedy, tiny_llama
from tests.integration import kit
from tests.integration.kit import PAUSE, UPDATE
from weight_update import (
    EngineRejected,
    SGLangWeightSender,
    SGLangWeightSyncScheme,
    get_model_metadata,
)
from weight_update.reference_engine import Fault, ReferenceEngine

PROMPT, TOKENS = [11, 12, 13], 6
SECONDS = 240.0


def adapted(seed: int = 2) -> Any:
    """A model in training: a Llama with an adapter that changes its output."""
    model = tiny_llama(seed).requires_grad_(False)
    torch.manual_seed(seed)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return get_peft_model(model, config)


def merged(model: Any) -> Any:
    return copy.deepcopy(model).merge_and_unload()


def scheme_of(engine: AsyncSGLang) -> SGLangWeightSyncScheme:
    """As the programs make it: everything is asked of the policy's engine, and the device is that
    of the training model.
    """
    return SGLangWeightSyncScheme(
        server_url=engine.server_url,
        master_address=engine.get_master_address(),
        master_port=engine.get_master_port(),
        num_gpus=engine.get_tp_size() * engine.get_dp_size(),
        strategy="state_dict",
        device=torch.device("cpu"),
    )


@pytest.fixture
def collectors(talker: ReferenceEngine) -> Iterator[list[Any]]:
    """Two collectors of one policy."""
    policy = llm_kit.policy(talker.url)
    made = [llm_kit.collector(policy) for _ in range(2)]
    yield made
    for collector in made:
        collector.shutdown()


Program = Callable[[Any, Any, list[Any]], SGLangWeightSender]


def begin_sync(model: Any, engine: Any, collectors: list[Any]) -> SGLangWeightSender:
    """Collectors are registered before the first update."""
    sender = scheme_of(engine).create_sender()
    sender.register_model(model)
    metadata = get_model_metadata(model)
    sender.init_all_workers_group(metadata, vllm_engine=engine)
    for collector in collectors:
        sender.register_collector(collector)
    sender.update_weights()
    return sender


def begin_async(model: Any, engine: Any, collectors: list[Any]) -> SGLangWeightSender:
    """Collectors start after the first update, and are registered then."""
    sender = scheme_of(engine).create_sender()
    sender.register_model(model)
    metadata = get_model_metadata(model)
    sender.init_all_workers_group(metadata)
    sender.update_weights()
    for collector in collectors:
        sender.register_collector(collector)
    return sender


PROGRAMS = {"sync": begin_sync, "async": begin_async}
COUNTED_AT_START = {"sync": 1, "async": 0}


def trained(model: Any) -> None:
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.add_(0.5)


def versions_of(collectors: list[Any]) -> list[int]:
    return [int(collector.policy_version) for collector in collectors]


def sampled(collector: Any) -> Any:
    return next(iter(collector))


@pytest.mark.parametrize("order", PROGRAMS)
def test_a_program_runs_word_for_word(
    talker: ReferenceEngine, collectors: list[Any], order: str
) -> None:
    """C07: every update counts once for every collector, and samples bear the engine's label."""
    model = adapted()
    sender = PROGRAMS[order](model, collectors[0].policy.model, collectors)
    start = COUNTED_AT_START[order]
    assert versions_of(collectors) == [start] * 2
    for update in (1, 2):
        trained(model)
        sender.update_weights()
        gc.collect()
        assert versions_of(collectors) == [start + update] * 2
        assert kit.label(talker) == str(sender.version) == str(update + 1)
        batch = sampled(collectors[0])
        assert batch["weight_versions", "first"].unique().tolist() == [update + 1]
        assert batch["next", "policy_version"].unique().tolist() == [start + update]
    sender.shutdown()
    served = talker.generate(PROMPT, TOKENS)["output_ids"]
    assert served == greedy(merged(model), PROMPT, TOKENS)


def test_collectors_in_the_background_go_on_while_weights_change(talker: ReferenceEngine) -> None:
    """The async program: each sample in the buffer says which update made it."""
    buffer = ReplayBuffer(storage=LazyStackStorage(10_000), batch_size=1)
    collector = llm_kit.collector(llm_kit.policy(talker.url), replay_buffer=buffer)
    model = adapted()
    sender = begin_async(model, collector.policy.model, [collector])

    def has_samples() -> bool:
        made = buffer[:]["weight_versions", "last"] if len(buffer) else torch.empty(0)
        return bool((made == sender.version).any())

    collector.start()
    for update in (1, 2):
        kit.wait_for(has_samples, SECONDS)
        sender.update_weights()
        assert versions_of([collector]) == [update]
    kit.wait_for(has_samples, SECONDS)
    collector.async_shutdown(timeout=SECONDS)
    sender.shutdown()
    assert buffer[:]["weight_versions", "last"].unique().tolist() == [1, 2, 3]


def test_an_adapter_in_training_is_not_touched_by_updates(
    talker: ReferenceEngine, collectors: list[Any]
) -> None:
    model = adapted()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    with begin_sync(model, collectors[0].policy.model, collectors):
        pass
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], weight) for name, weight in before.items())


def test_a_failed_update_does_not_count_and_the_next_one_counts_once(
    talker: ReferenceEngine, collectors: list[Any]
) -> None:
    model = adapted()
    with begin_sync(model, collectors[0].policy.model, collectors) as sender:
        talker.inject(Fault(UPDATE, "refuse", times=1))
        with pytest.raises(EngineRejected):
            sender.update_weights()
        assert versions_of(collectors) == [1, 1]
        sender.update_weights()
        assert versions_of(collectors) == [2, 2]


def test_metadata_of_another_model_is_refused_before_a_pause(
    talker: ReferenceEngine, collectors: list[Any]
) -> None:
    """What the group was made for is what is sent."""
    model = adapted()
    log = kit.Log(talker)
    with scheme_of(collectors[0].policy.model).create_sender() as sender:
        sender.register_model(model)
        metadata = get_model_metadata(model)
        name = next(iter(metadata))
        metadata[name] = (metadata[name][0], torch.Size([1]))
        sender.init_all_workers_group(metadata, vllm_engine=None)
        with pytest.raises(ValueError, match=name):
            sender.update_weights()
    assert log.count(talker, PAUSE) == 0


def test_a_sender_that_was_shut_down_may_be_shut_down_again(
    talker: ReferenceEngine, collectors: list[Any]
) -> None:
    """The programs shut it down at the end, and gc comes after."""
    model = adapted()
    sender = begin_async(model, collectors[0].policy.model, collectors)
    sender.shutdown()
    del model
    gc.collect()
    sender.shutdown()
    assert talker.generate(PROMPT, TOKENS)["output_ids"]
