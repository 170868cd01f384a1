"""An update of the real server, against transformers' greedy output before and after."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from weight_update import EngineState, SGLangWeightSender, SGLangWeightSyncScheme

from .models import SEED_A, SEED_B, greedy, tiny_llama
from .sglang_server import SGLangServer

PROMPT = [3, 14, 15, 92, 65]


@pytest.fixture
def sender(sglang_at_a: SGLangServer) -> Iterator[SGLangWeightSender]:
    with SGLangWeightSyncScheme(sglang_at_a.url, timeout=60).create_sender() as sender:
        yield sender


def test_the_output_equals_transformers_before_and_after_an_update(
    sglang_at_a: SGLangServer, sender: SGLangWeightSender
) -> None:
    before, after = tiny_llama(SEED_A), tiny_llama(SEED_B)
    assert sglang_at_a.generate(PROMPT, 24) == greedy(before, PROMPT, 24)

    report = sender.update_weights(after)

    assert sglang_at_a.generate(PROMPT, 24) == greedy(after, PROMPT, 24)
    assert report.engines[sglang_at_a.url].state is EngineState.NEW
    assert report.tensors == 21


@pytest.mark.parametrize("load_format", ["flattened_bucket", "tensors"])
@pytest.mark.parametrize("bucket_bytes", [None, 20_000])
def test_every_wire_format_and_bucket_size_lands(
    sglang_at_a: SGLangServer, load_format: Any, bucket_bytes: int | None
) -> None:
    after = tiny_llama(SEED_B)
    scheme = SGLangWeightSyncScheme(
        sglang_at_a.url, load_format=load_format, bucket_bytes=bucket_bytes, timeout=60
    )

    with scheme.create_sender() as sender:
        report = sender.update_weights(after)

    assert sglang_at_a.generate(PROMPT, 24) == greedy(after, PROMPT, 24)
    assert (report.buckets > 1) is (bucket_bytes is not None)


def test_the_label_moves_with_the_report_and_no_prefix_of_old_weights_is_served(
    sglang_at_a: SGLangServer, sender: SGLangWeightSender
) -> None:
    sglang_at_a.generate(PROMPT, 24)

    first = sender.update_weights(tiny_llama(SEED_B))
    second = sender.update_weights(tiny_llama(SEED_A))

    assert second.version == first.version + 1
    assert sglang_at_a.label() == str(second.version)
    assert sglang_at_a.generate(PROMPT, 24) == greedy(tiny_llama(SEED_A), PROMPT, 24)
