"""Weights that are made while they are sent: streams, and functions that return a source."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from copy import deepcopy

import pytest
import torch
from transformers import LlamaForCausalLM

from tests.integration import kit
from weight_update import EngineState, UpdateTimeout, WeightUpdateError
from weight_update.errors import ConfigurationError, WeightMismatchError
from weight_update.reference_engine import ReferenceEngine
from weight_update.weights.stream import Stream

BUCKET = 20_000
UPDATE = "/update_weights_from_distributed"


def pairs(model: LlamaForCausalLM) -> Iterator[tuple[str, torch.Tensor]]:
    """The model's weights through one buffer that is used again and again."""
    scratch = torch.empty(max(value.numel() for value in model.parameters()))
    for name, value in model.state_dict().items():
        place = scratch[: value.numel()].view(value.shape)
        place.copy_(value)
        yield name, place


def test_a_stream_brings_the_whole_model_through_one_buffer(engine: ReferenceEngine) -> None:
    with kit.make_sender(engine, bucket_bytes=BUCKET) as sender:
        report = sender.update_weights(pairs(kit.llama(1)))
    assert report.buckets > 2
    assert report.tensors == 21
    assert report.engines[engine.url].state is EngineState.NEW
    assert kit.served(engine) == kit.tokens_of(1)


def test_a_stream_is_read_a_bucket_at_a_time(engine: ReferenceEngine) -> None:
    """C21: what a generator makes is not kept."""
    made, confirmed, ahead = [0], [0], []

    def watched() -> Iterator[tuple[str, torch.Tensor]]:
        for name, value in kit.llama(1).state_dict().items():
            made[0] += value.numel() * value.element_size()
            ahead.append(made[0] - confirmed[0])
            yield name, value

    def progress(now: object) -> None:
        confirmed[0] = now.bytes_done  # type: ignore[attr-defined]

    with kit.make_sender(engine, bucket_bytes=BUCKET) as sender:
        report = sender.update_weights(watched(), progress=progress)
    assert report.bytes == made[0]
    assert max(ahead) < report.bytes
    assert max(ahead) <= 4 * BUCKET


def test_a_generator_that_fails_half_way_leaves_a_held_engine_that_a_module_heals(
    engine: ReferenceEngine,
) -> None:
    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        for index, pair in enumerate(pairs(kit.llama(1))):
            if index == 12:
                raise RuntimeError("the disk is gone")
            yield pair

    with kit.make_sender(engine, bucket_bytes=BUCKET) as sender:
        with pytest.raises(WeightUpdateError, match="the disk is gone") as failure:
            sender.update_weights(broken())
        assert failure.value.report is not None
        assert failure.value.report.engines[engine.url].held
        sender.update_weights(kit.llama(2))
    assert kit.served(engine) == kit.tokens_of(2)


def test_a_generator_that_fails_at_once_touches_no_engine(engine: ReferenceEngine) -> None:
    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        raise RuntimeError("nothing there")
        yield

    log = kit.Log(engine)
    with kit.make_sender(engine) as sender, pytest.raises(WeightUpdateError, match="nothing there"):
        sender.update_weights(broken())
    assert log.count(engine, "/pause_generation") == 0


def test_a_generator_that_hangs_ends_at_the_deadline(engine: ReferenceEngine) -> None:
    let = threading.Event()

    def slow() -> Iterator[tuple[str, torch.Tensor]]:
        for index, pair in enumerate(pairs(kit.llama(1))):
            if index == 12:
                let.wait(60)
            yield pair

    with kit.make_sender(engine, bucket_bytes=BUCKET, timeout=8.0) as sender:
        with pytest.raises(UpdateTimeout, match="could not be read") as failure:
            sender.update_weights(slow())
        let.set()
        assert failure.value.phase == "transfer"
        sender.update_weights(kit.llama(2))
    assert kit.served(engine) == kit.tokens_of(2)


def test_a_generator_that_hangs_at_its_first_item_ends_at_the_deadline(
    engine: ReferenceEngine,
) -> None:
    let = threading.Event()

    def slow() -> Iterator[tuple[str, torch.Tensor]]:
        let.wait(60)
        yield from pairs(kit.llama(1))

    with kit.make_sender(engine, timeout=6.0) as sender:
        with pytest.raises(UpdateTimeout, match="the weights could not be read"):
            sender.update_weights(slow())
        let.set()
        sender.update_weights(kit.llama(2))
    assert kit.served(engine) == kit.tokens_of(2)


def test_what_a_generator_does_to_its_thread_stays_there(engine: ReferenceEngine) -> None:
    def without_gradients() -> Iterator[tuple[str, torch.Tensor]]:
        with torch.no_grad():
            yield from pairs(kit.llama(1))

    with kit.make_sender(engine, bucket_bytes=BUCKET) as sender:
        sender.update_weights(without_gradients())
    assert torch.is_grad_enabled()


def test_a_name_that_the_engine_does_not_know_is_refused_before_its_bucket_leaves(
    engine: ReferenceEngine,
) -> None:
    def strange() -> Iterator[tuple[str, torch.Tensor]]:
        yield from pairs(kit.llama(1))
        yield "model.unknown.weight", torch.zeros(3)

    with kit.make_sender(engine, bucket_bytes=BUCKET) as sender:
        with pytest.raises(WeightMismatchError, match=r"model\.unknown\.weight"):
            sender.update_weights(strange())
        sender.update_weights(kit.llama(2))
    assert kit.served(engine) == kit.tokens_of(2)


def test_a_whole_stream_that_lacks_a_weight_is_no_success(engine: ReferenceEngine) -> None:
    short = list(kit.llama(1).state_dict().items())[:-1]
    with kit.make_sender(engine) as sender:
        with pytest.raises(WeightMismatchError, match="would stay old"):
            sender.update_weights(Stream(short, whole=True))
        assert sender.engines[engine.url].state is EngineState.MIXED
        sender.update_weights(kit.llama(2))
    assert kit.served(engine) == kit.tokens_of(2)


def test_a_mixed_engine_is_healed_by_a_whole_stream_and_not_by_any_other(
    engine: ReferenceEngine,
) -> None:
    short = list(kit.llama(1).state_dict().items())[:-1]
    with kit.make_sender(engine, bucket_bytes=BUCKET) as sender:
        with pytest.raises(WeightMismatchError):
            sender.update_weights(Stream(short, whole=True))
        with pytest.raises(ConfigurationError, match="a stream may hold some weights only"):
            sender.update_weights(pairs(kit.llama(3)))
        sender.update_weights(Stream(pairs(kit.llama(3)), whole=True))
    assert kit.served(engine) == kit.tokens_of(3)


def test_a_stream_is_read_once(engine: ReferenceEngine) -> None:
    stream = Stream(pairs(kit.llama(1)))
    with kit.make_sender(engine) as sender:
        sender.update_weights(stream)
        with pytest.raises(ConfigurationError, match=r"read already|no weights to send"):
            sender.update_weights(stream)


def test_a_function_is_asked_at_every_update(engine: ReferenceEngine) -> None:
    """C54: a trainer that goes on with a copy of its model registers how to find it."""
    holder = {"model": kit.llama(1)}
    with kit.make_sender(engine) as sender:
        sender.register_model(lambda: holder["model"])
        sender.update_weights()
        holder["model"] = deepcopy(kit.llama(2))
        sender.update_weights()
    assert kit.served(engine) == kit.tokens_of(2)


def test_a_function_may_return_a_new_generator_each_time(engine: ReferenceEngine) -> None:
    with kit.make_sender(engine, bucket_bytes=BUCKET) as sender:
        for seed in (1, 2):
            sender.update_weights(lambda seed=seed: pairs(kit.llama(seed)))  # type: ignore[misc]
            assert kit.served(engine) == kit.tokens_of(seed)


def test_a_stream_is_flushed_under_abort_too(engine: ReferenceEngine) -> None:
    """The last request carries the flush elsewhere; of a stream, nobody knows which is the last."""
    log = kit.Log(engine)
    with kit.make_sender(engine, pause_mode="abort", bucket_bytes=BUCKET) as sender:
        report = sender.update_weights(pairs(kit.llama(1)))
    assert report.engines[engine.url].state is EngineState.NEW
    assert log.count(engine, "/flush_cache") == 1
    assert not any(body.get("flush_cache") for body in log.bodies(engine, UPDATE))


def test_names_and_dtypes_of_a_stream_are_made_as_those_of_a_module(
    engine: ReferenceEngine,
) -> None:
    def wrapped() -> Iterator[tuple[str, torch.Tensor]]:
        for name, value in pairs(kit.llama(1)):
            yield f"trainer.{name}", value.double()

    options = {"name_map": {r"^trainer\.": ""}, "dtype": torch.float32}
    log = kit.Log(engine)
    with kit.make_sender(engine, bucket_bytes=BUCKET, **options) as sender:
        sender.update_weights(wrapped())
    assert {d for body in log.bodies(engine, UPDATE) for d in body["dtypes"]} == {"float32"}
    assert kit.served(engine) == kit.tokens_of(1)


def test_a_stream_cannot_be_copied_for_the_background(engine: ReferenceEngine) -> None:
    with kit.make_sender(engine) as sender:
        with pytest.raises(ConfigurationError, match="snapshot=False"):
            sender.update_weights_async(pairs(kit.llama(1)))
        sender.update_weights_async(pairs(kit.llama(1)), snapshot=False).result(60)
    assert kit.served(engine) == kit.tokens_of(1)


def test_an_endless_generator_is_asked_for_nothing_more_after_the_deadline(
    engine: ReferenceEngine,
) -> None:
    asked = [0]

    def endless() -> Iterator[tuple[str, torch.Tensor]]:
        while True:
            asked[0] += 1
            yield f"w{asked[0]}", torch.zeros(1)

    def stands_still() -> bool:
        before = asked[0]
        return not threading.Event().wait(0.2) and asked[0] == before

    with kit.make_sender(engine, timeout=2.0) as sender, pytest.raises(UpdateTimeout):
        sender.update_weights(endless())
    kit.wait_for(stands_still)
