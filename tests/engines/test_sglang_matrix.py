"""Llama and Qwen2, fp32 and bf16: output equals transformers' in every pause mode.

How exactly it is compared depends on the dtype. In fp32 the server's tokens are transformers'
greedy tokens, one for one. In bf16 both sides round after every operation and in another order
(SGLang fuses q, k, v and gate, up), so where two logits almost tie they may choose differently,
and rightly so. There each token of the server is held against the logits that transformers gives
for the tokens before it: it must be within rounding of the best, which no other weights' tokens
are. The weights themselves are compared exactly, by the server's own checksums.
"""

from __future__ import annotations

from weight_update import EngineState

from .long_request import LongRequest, wait_until
from .models import SEED_A, SEED_B
from .served import Served, sender_of

LONG_PROMPT = [7, 21, 40]


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
    assert at_a.made_by(SEED_A, LONG_PROMPT, answer["output_ids"])
    assert [span["version"] for span in answer["meta_info"]["weight_versions"]] == [before]
    assert report.warnings == ()
    assert at_a.serves(SEED_B)
