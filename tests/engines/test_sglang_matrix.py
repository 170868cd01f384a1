"""Llama and Qwen2, fp32 and bf16: output equals transformers' in every pause mode.

How exactly it is compared depends on the dtype. In fp32 the server's tokens are transformers'
greedy tokens, one for one. In bf16 both sides round after every operation and in another order
(SGLang fuses q, k, v and gate, up), so where two logits almost tie they may choose differently,
and rightly so. There each token of the server is held against the logits that transformers gives
for the tokens before it: it must be within rounding of the best, which no other weights' tokens
are. The weights themselves are compared exactly, by the server's own checksums.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from weight_update import EngineState, SGLangWeightSender, SGLangWeightSyncScheme

from .long_request import LongRequest, wait_until
from .models import (
    SEED_A,
    SEED_B,
    Family,
    TinyModels,
    greedy,
    save_tiny_models,
    shortfall,
    tiny_model,
)
from .sglang_server import SGLangServer

# A server starts in 20 s on a quiet machine, and in minutes on a busy one.
pytestmark = pytest.mark.timeout(600)

PROMPT = [3, 14, 15, 92, 65]
LONG_PROMPT = [7, 21, 40]
COMBINATIONS = [(f, d) for f in ("llama", "qwen2") for d in ("float32", "bfloat16")]
# Logits are of the order of 1 to 10; bf16 keeps 8 bits of a number.
ROUNDING = {torch.float32: 1e-3, torch.bfloat16: 0.25}


@dataclass(frozen=True)
class Served:
    """A server, and what transformers makes of the checkpoints that it is given."""

    server: SGLangServer
    family: Family
    dtype: torch.dtype
    checkpoints: TinyModels

    def model(self, seed: int) -> Any:
        """The trainer's model, in the server's dtype."""
        return tiny_model(self.family, seed).to(self.dtype).eval()

    def made_by(self, seed: int, prompt: list[int], output: list[int]) -> bool:
        """Whether the output is a model's greedy choice, token by token, and not the other's."""
        model, other = self.model(seed), self.model(SEED_A + SEED_B - seed)
        near = shortfall(model, prompt, output) <= ROUNDING[self.dtype]
        return near and shortfall(other, prompt, output) > 1.0

    def serves(self, seed: int) -> bool:
        """Whether the output of the server is a model's."""
        output = self.server.generate(PROMPT, 24)
        exact = self.dtype is not torch.float32 or output == greedy(self.model(seed), PROMPT, 24)
        return exact and self.made_by(seed, PROMPT, output)

    def checksum(self) -> str:
        """The server's digest of all its weights."""
        answer = self.server.post("weights_checker", {"action": "checksum"})
        return str(answer["per_engine_checksum"])


@pytest.fixture(scope="module", params=COMBINATIONS, ids="-".join)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """A server a combination; Llama in fp32 is the session's own."""
    family, dtype = request.param
    session = request.getfixturevalue("sglang")  # skips, or fails, where there is no engine
    if (family, dtype) == ("llama", "float32"):
        models = request.getfixturevalue("tiny_models")
        yield Served(session, family, torch.float32, models)
        return
    home = tmp_path_factory.mktemp(f"{family}-{dtype}")
    models = save_tiny_models(home, family)
    arguments = ["--dtype", dtype]
    if family == "qwen2":
        # It would build a byte-level tokenizer around the word-level one and find no tokens
        # in its own warm-up prompt.
        arguments.append("--skip-tokenizer-init")
    with SGLangServer(models.a, home / "server.log", extra_args=arguments) as server:
        yield Served(server, family, getattr(torch, dtype), models)


@pytest.fixture
def at_a(served: Served) -> Served:
    """The server on model A."""
    served.server.load(served.checkpoints.a)
    return served


def sender_of(at_a: Served, **options: Any) -> SGLangWeightSender:
    return SGLangWeightSyncScheme(at_a.server.url, timeout=60, **options).create_sender()


def test_the_output_equals_transformers_before_and_after_each_update(at_a: Served) -> None:
    assert at_a.serves(SEED_A)
    with sender_of(at_a) as sender:
        first = sender.update_weights(at_a.model(SEED_B))
        assert at_a.serves(SEED_B)
        second = sender.update_weights(at_a.model(SEED_A))
        assert at_a.serves(SEED_A)
    assert second.version == first.version + 1
    assert at_a.server.label() == str(second.version)


def test_every_weight_is_what_the_checkpoint_on_disk_would_have_brought(at_a: Served) -> None:
    a = at_a.checksum()
    at_a.server.load(at_a.checkpoints.b)
    b = at_a.checksum()
    at_a.server.load(at_a.checkpoints.a)

    for load_format in ("flattened_bucket", "tensors"):
        with sender_of(at_a, load_format=load_format, bucket_bytes=20_000) as sender:
            sender.update_weights(at_a.model(SEED_B))
            assert at_a.checksum() == b
            sender.update_weights(at_a.model(SEED_A))
            assert at_a.checksum() == a


def test_under_retract_the_tail_of_a_long_request_is_on_the_new_weights(at_a: Served) -> None:
    with sender_of(at_a, pause_mode="retract") as sender:
        sender.init_all_workers_group()
        request = LongRequest(at_a.server.url, LONG_PROMPT)
        request.wait_for(8)
        report = sender.update_weights(at_a.model(SEED_B))
    request.wait_for(32)
    answer = request.cut()

    tokens, (old, new) = answer["output_ids"], answer["meta_info"]["weight_versions"]
    assert new["version"] == str(report.version)
    assert report.warnings == ()
    assert at_a.made_by(SEED_A, LONG_PROMPT, tokens[: old["end"]])
    head = LONG_PROMPT + tokens[: new["start"]]
    assert at_a.made_by(SEED_B, head, tokens[new["start"] :][:32])
    assert at_a.serves(SEED_B)


def test_under_in_place_the_request_goes_on_and_the_caller_is_told_of_stale_prefixes(
    at_a: Served,
) -> None:
    with sender_of(at_a, pause_mode="in_place") as sender:
        sender.init_all_workers_group()
        request = LongRequest(at_a.server.url, LONG_PROMPT)
        request.wait_for(8)
        report = sender.update_weights(at_a.model(SEED_B))
        request.wait_for(32)
        answer = request.cut()
        tokens, (old, new) = answer["output_ids"], answer["meta_info"]["weight_versions"]
        assert new["version"] == str(report.version)
        assert at_a.made_by(SEED_A, LONG_PROMPT, tokens[: old["end"]])
        assert answer["meta_info"]["num_retractions"] == 0
        # What the warning is about: keys and values of the old weights under the new ones.
        (warning,) = report.warnings
        assert "prefixes cached under the old weights may still be served" in warning
        assert at_a.server.url in warning
        head = LONG_PROMPT + tokens[: new["start"]]
        assert not at_a.made_by(SEED_B, head, tokens[new["start"] :][:32])
        wait_until(sender.flush_cache)
    assert report.engines[at_a.server.url].state is EngineState.NEW
    assert at_a.serves(SEED_B)


def test_under_abort_the_request_ends_with_what_the_old_weights_made(at_a: Served) -> None:
    before = at_a.server.label()
    with sender_of(at_a, pause_mode="abort") as sender:
        sender.init_all_workers_group()
        request = LongRequest(at_a.server.url, LONG_PROMPT)
        request.wait_for(8)
        report = sender.update_weights(at_a.model(SEED_B))
    answer = request.end()

    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert at_a.made_by(SEED_A, LONG_PROMPT, answer["output_ids"][:64])
    assert [span["version"] for span in answer["meta_info"]["weight_versions"]] == [before]
    assert report.warnings == ()
    assert at_a.serves(SEED_B)
