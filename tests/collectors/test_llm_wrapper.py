"""The policy's samples say which weights made them, in the engine's own words."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from tokenizers.processors import TemplateProcessing
from torchrl.modules.llm import AsyncSGLang

from tests.collectors import llm_kit
from tests.engines.models import tiny_llama, tiny_tokenizer
from tests.integration import kit
from weight_update import (
    ConfigurationError,
    EngineRejected,
    SGLangWeightSender,
    WeightUpdateError,
)
from weight_update.collectors.sglang_wrapper import SGLangWrapper, WeightVersions, staleness
from weight_update.reference_engine import ReferenceEngine
from weight_update.waiting import spawn

LONG = 400
SECONDS = 240.0
MODES = ["history", "text", "tokens"]


def told(engine: ReferenceEngine) -> llm_kit.Told:
    return llm_kit.Told(AsyncSGLang.connect(engine.url))


class Scripted:
    """An engine that gives prepared answers, one a prompt."""

    def __init__(self, *answers: Mapping[str, Any]) -> None:
        self._answers = iter(answers)

    def generate(self, **_: Any) -> Mapping[str, Any]:
        return next(self._answers)


def answer(reason: str = "length", count: int = 4, **labels: Any) -> dict[str, Any]:
    meta = {"finish_reason": {"type": reason}, "completion_tokens": count, **labels}
    logprobs = [[-1.0, token, None] for token in range(count)]
    return {
        "text": "",
        "output_ids": list(range(count)),
        "meta_info": {**meta, "output_token_logprobs": logprobs},
    }


def spans(*ends: tuple[str, int]) -> list[dict[str, Any]]:
    starts = [0, *(end for _, end in ends)]
    return [
        {"version": version, "start": start, "end": end}
        for start, (version, end) in zip(starts, ends, strict=False)
    ]


def one(*answers: Mapping[str, Any], **options: Any) -> WeightVersions:
    """What is known of a sample that an engine answered so."""
    policy = llm_kit.policy(Scripted(*answers), **options)
    return policy(llm_kit.asked(["w3"]))[0]["weight_versions"]


# ---- the shape of what is told


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_each_token_of_a_response_has_the_engines_version(
    talker: ReferenceEngine, mode: str, padded: bool
) -> None:
    kit.relabel(talker, "7")
    policy = llm_kit.policy(talker.url, input_mode=mode, pad_output=padded)
    for sample in policy(llm_kit.asked(mode=mode)).unbind(0):
        versions, mask = sample["weight_versions"], sample["masks"].all_assistant_mask
        assert versions.full.shape == sample["tokens"].full.shape
        assert versions.full[mask].tolist() == versions.response.tolist() == [7] * 5
        assert (versions.full[~mask] == -1).all()
        assert (versions.first, versions.last) == (7, 7)
        assert versions.exact
        assert not versions.mixed
        assert not versions.aborted


@pytest.mark.parametrize(("label", "number"), [("default", 0), ("12", 12), ("step-3", -1)])
def test_a_label_becomes_a_number(label: str, number: int) -> None:
    """The start of an engine is 0; what is no number is unknown."""
    versions = one(answer(weight_versions=spans((label, 4))))
    assert versions.response.tolist() == [number] * 4
    assert (versions.first, versions.last) == (number, number)


def test_a_sample_of_two_versions_is_marked() -> None:
    versions = one(answer(weight_versions=spans(("3", 1), ("4", 4))))
    assert versions.response.tolist() == [3, 4, 4, 4]
    assert versions.full.tolist() == [-1, 3, 4, 4, 4]
    assert (versions.first, versions.last) == (3, 4)
    assert versions.mixed
    assert versions.exact


def test_one_label_for_a_whole_response_is_not_exact() -> None:
    """Releases before 0.5.19 know the version at the end only."""
    versions = one(answer(weight_version="4"))
    assert versions.response.tolist() == [4] * 4
    assert not versions.exact


def test_a_response_without_a_label_is_unknown() -> None:
    versions = one(answer())
    assert versions.response.tolist() == [-1] * 4
    assert (versions.first, versions.last) == (-1, -1)


@pytest.mark.parametrize("padded", [False, True])
def test_versions_lie_where_the_tokens_of_responses_lie(padded: bool) -> None:
    """Of prompts and responses of different lengths."""
    answers = [answer(count=count, weight_versions=spans(("3", count))) for count in (2, 4, 1)]
    policy = llm_kit.policy(Scripted(*answers), pad_output=padded)
    batch = policy(llm_kit.asked(["w3", "w4 w4 w4", "w5 w5"]))
    lengths = [len(sample["log_probs"].response.nonzero()) for sample in batch.unbind(0)]
    for sample, length in zip(batch.unbind(0), lengths, strict=True):
        known = sample["weight_versions"].full != -1
        assert torch.equal(known, sample["masks"].all_assistant_mask)
        assert (sample["weight_versions"].response != -1).sum() == known.sum() == length


def test_staleness_of_samples_of_another_wrapper_is_an_error_and_says_which_to_take() -> None:
    with pytest.raises(ConfigurationError, match=r"weight_update\.SGLangWrapper"):
        staleness(TensorDict({"query": torch.zeros(2, 1)}, batch_size=[2]), 1)


def test_staleness_counts_from_the_oldest_token() -> None:
    known = [answer(weight_versions=spans(*ends)) for ends in ([("5", 4)], [("3", 1), ("5", 4)])]
    policy = llm_kit.policy(Scripted(*known, answer(weight_version="5")))
    batch = policy(llm_kit.asked(["w3", "w3", "w3"]))
    assert sorted(staleness(batch, 5).tolist()) == [0, 2, torch.iinfo(torch.int64).max]
    assert batch[staleness(batch, 5) <= 2].batch_size == torch.Size([2])


# ---- what is asked


@pytest.mark.parametrize("mode", MODES)
def test_an_engine_gets_the_very_tokens_that_a_sample_shows(
    talker: ReferenceEngine, mode: str
) -> None:
    """Also of a tokenizer that starts each text with a token of its own, as Llama's does."""
    tokenizer = tiny_tokenizer()
    start = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.backend_tokenizer.post_processor = start
    engine = told(talker)
    policy = llm_kit.policy(engine, input_mode=mode, tokenizer=tokenizer)
    samples = policy(llm_kit.asked(mode=mode)).unbind(0)
    answers = sorted(engine.answers, key=lambda answer: list(answer["prompt"]))
    for sample, known in zip(sorted(samples, key=prompt_of), answers, strict=True):
        assert prompt_of(sample) == known["prompt"]
        assert sample["tokens"].full.tolist() == known["prompt"] + known["output_ids"]
        assert sample["log_probs"].full.shape == sample["tokens"].full.shape
        assert (known["prompt"][0] == 1) == (mode == "text")


def prompt_of(sample: TensorDictBase) -> list[int]:
    return list(sample["tokens"].prompt.tolist())


def test_what_torchrl_drops_reaches_the_engine(talker: ReferenceEngine) -> None:
    log = kit.Log(talker)
    kwargs = {"max_new_tokens": 3, "ignore_eos": True, "stop_token_ids": [9], "sampling_seed": 4}
    llm_kit.policy(talker.url, generate_kwargs=kwargs)(llm_kit.asked(["w3"]))
    (body,) = log.bodies(talker, "/generate")
    assert body["sampling_params"].items() >= kwargs.items()


def test_a_policy_shows_the_engine_that_it_asks(talker: ReferenceEngine) -> None:
    """TorchRL's programs make the scheme from ``policy.model``."""
    engine = llm_kit.policy(talker.url).model
    assert engine.server_url == talker.url
    assert engine.get_tp_size() * engine.get_dp_size() == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"on_abort": "ignore"}, "on_abort"),
        ({"tokenizer": None}, "tokenizer"),
        ({"num_samples": 3}, "num_samples=3 asks for several"),
        ({"generate_kwargs": {"n": 2}}, "n=2 asks for several"),
    ],
)
def test_what_cannot_work_is_refused_at_construction(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        llm_kit.policy(Scripted(), **options)


def test_another_version_of_a_policy_keeps_what_is_ours() -> None:
    policy = llm_kit.policy(Scripted(), on_abort="mark", attempts=3)
    twin = policy.get_new_version(input_mode="tokens")
    assert (twin.model.on_abort, twin.model.attempts) == ("mark", 3)
    assert twin.model.engine is policy.model.engine
    assert twin.generate_kwargs == policy.generate_kwargs
    assert policy.get_new_version(on_abort="continue").model.on_abort == "continue"


def test_a_policy_goes_to_another_process(talker: ReferenceEngine) -> None:
    policy: SGLangWrapper = pickle.loads(pickle.dumps(llm_kit.policy(talker.url)))
    assert policy(llm_kit.asked())["weight_versions", "first"].tolist() == [0] * llm_kit.ENVS


def test_threads_that_share_a_batch_get_their_own_samples(talker: ReferenceEngine) -> None:
    """TorchRL stacks what several threads ask for (``batching=True``)."""
    engine = told(talker)
    policy = llm_kit.policy(engine, input_mode="tokens", batching=True, min_batch_size=3)
    texts = ["w3", "w4 w4", "w5 w5 w5"]
    calls = [spawn(policy, llm_kit.asked([text], "tokens")) for text in texts]
    for text, call in zip(texts, calls, strict=True):
        sample = call.result(SECONDS)[0]
        assert prompt_of(sample) == tiny_tokenizer().encode(text)
        assert sample["weight_versions"].full.shape == sample["tokens"].full.shape


def test_all_prompts_of_a_batch_are_asked_for_together() -> None:
    """TorchRL's client waits for each response before it asks for the next."""
    together = threading.Barrier(llm_kit.ENVS, timeout=SECONDS)

    class Meeting:
        def generate(self, **_: Any) -> Mapping[str, Any]:
            together.wait()
            return answer()

    assert llm_kit.policy(Meeting())(llm_kit.asked()).batch_size == torch.Size([llm_kit.ENVS])


# ---- updates while responses are made


@contextmanager
def responding(
    talker: ReferenceEngine, pause_mode: Any, engine: Any = None, **options: Any
) -> Iterator[tuple[SGLangWeightSender, Any]]:
    """A sender that has pushed once, and a policy that is in the middle of its responses."""
    with kit.make_sender(talker, pause_mode=pause_mode) as sender:
        sender.update_weights(tiny_llama(1))
        policy = llm_kit.policy(engine or talker.url, LONG, **options)
        call = spawn(policy, llm_kit.asked())
        kit.wait_for(lambda: kit.running(talker) == llm_kit.ENVS, SECONDS)
        yield sender, call


def test_a_response_that_goes_on_under_new_weights_is_marked(talker: ReferenceEngine) -> None:
    """C17: version by version as the engine told it."""
    engine = told(talker)
    with responding(talker, "retract", engine=engine) as (sender, call):
        before = sender.version
        after = sender.update_weights(tiny_llama(2)).version
        batch = call.result(SECONDS)
    assert batch["weight_versions", "mixed"].all()
    assert batch["weight_versions", "exact"].all()
    assert batch["weight_versions", "first"].unique().tolist() == [before]
    assert batch["weight_versions", "last"].unique().tolist() == [after]
    switches = {tuple(known["prompt"]): known["meta_info"] for known in engine.answers}
    for sample in batch.unbind(0):
        old, new = switches[tuple(prompt_of(sample))]["weight_versions"]
        lengths = (old["end"], new["end"] - new["start"])
        expected = [before] * lengths[0] + [after] * lengths[1]
        assert sample["weight_versions"].response.tolist() == expected
    assert (staleness(batch, after) == after - before).all()


@pytest.mark.parametrize(("on_abort", "mixed"), [("retry", False), ("continue", True)])
def test_an_aborted_response_is_asked_for_until_it_is_whole(
    talker: ReferenceEngine, on_abort: str, mixed: bool
) -> None:
    """C17: upstream returns what there was at the abort as if it were a sample."""
    with responding(talker, "abort", on_abort=on_abort) as (sender, call):
        before = sender.version
        after = sender.update_weights(tiny_llama(2)).version
        batch = call.result(SECONDS)
    assert not batch["weight_versions", "aborted"].any()
    assert (batch["weight_versions", "mixed"] == mixed).all()
    assert batch["weight_versions", "first"].unique().tolist() == [before if mixed else after]
    assert batch["weight_versions", "last"].unique().tolist() == [after]
    decode = tiny_tokenizer().decode
    for sample in batch.unbind(0):
        response = sample["tokens"].response
        assert len(response) == len(sample["log_probs"].response) == LONG
        assert sample["text"].response.strip() == decode(response, skip_special_tokens=True)


def test_an_aborted_response_may_be_taken_as_it_is(talker: ReferenceEngine) -> None:
    with responding(talker, "abort", on_abort="mark") as (sender, call):
        before = sender.version
        sender.update_weights(tiny_llama(2))
        batch = call.result(SECONDS)
    assert batch["weight_versions", "aborted"].all()
    assert batch["weight_versions", "last"].unique().tolist() == [before]
    assert all(len(sample["tokens"].response) < LONG for sample in batch.unbind(0))


def test_an_aborted_response_without_a_token_is_a_sample_without_a_version() -> None:
    empty = answer("abort", 0)
    del empty["meta_info"]["output_token_logprobs"]
    versions = one(empty, on_abort="mark")
    assert versions.aborted
    assert versions.response.tolist() == []
    assert (versions.first, versions.last) == (-1, -1)


def test_a_response_that_is_aborted_every_time_is_an_error() -> None:
    with pytest.raises(WeightUpdateError, match="2 attempts"):
        one(*[answer("abort")] * 2, attempts=2)


@pytest.mark.parametrize("mode", ["text", "history", "tokens"])
def test_a_prompt_without_tokens_is_refused_before_anything_is_asked(
    mode: str, talker: ReferenceEngine
) -> None:
    log = kit.Log(talker)
    policy = llm_kit.policy(talker.url, input_mode=mode)
    with pytest.raises(ConfigurationError, match="prompt 1 of the batch has no tokens"):
        policy(llm_kit.asked(["w11", ""], mode))
    assert log.count(talker, "/generate") == 0


def test_a_refused_request_is_an_error_in_the_servers_words(talker: ReferenceEngine) -> None:
    kwargs = {"max_new_tokens": 3, "min_p": 0.1}
    with pytest.raises(EngineRejected, match="min_p"):
        llm_kit.policy(talker.url, generate_kwargs=kwargs)(llm_kit.asked())
