"""Two ranks: each holds shards that the output depends on, and only rank 0 is heard."""

from __future__ import annotations

import hashlib
import os
import signal
from pathlib import Path

import pytest
import torch

from weight_update import SGLangWeightSyncScheme
from weight_update.reference_engine import Fault, ReferenceEngine
from weight_update.reference_engine.shards import Shard

UPDATE = "/update_weights_from_distributed"


@pytest.fixture(scope="module")
def wide(model_a):
    with ReferenceEngine(model_a, tp=2) as engine:
        yield engine


@pytest.fixture
def sender(wide, model_a):
    """A sender of the library that believes what it is told; leaves model A behind."""
    with SGLangWeightSyncScheme(wide.url, verify="off").create_sender() as sender:
        yield sender
        wide.clear_faults()
        sender.update_weights(model_a)


def other_rank(engine):
    """The process id of rank 1."""
    children = Path(f"/proc/{engine.pid}/task").glob("*/children")
    return next(int(pid) for file in children for pid in file.read_text().split())


def output(engine, kit):
    return engine.generate(kit.PROMPT, max_new_tokens=24)["output_ids"]


def test_it_says_that_it_has_two_ranks(wide, kit):
    info = kit.get(wide, "/server_info").json
    assert info["tp_size"] == 2
    assert info["internal_states"][0]["world_size"] == 2


def test_the_output_equals_transformers_before_and_after_an_update(
    wide, kit, sender, model_a, model_b
):
    assert output(wide, kit) == kit.greedy(model_a, kit.PROMPT, 24)
    sender.update_weights(model_b)
    assert output(wide, kit) == kit.greedy(model_b, kit.PROMPT, 24)


def test_tensors_may_also_come_one_by_one(wide, kit, model_a, model_b):
    scheme = SGLangWeightSyncScheme(wide.url, load_format="tensors")
    with scheme.create_sender() as sender:
        sender.update_weights(model_b)
        assert output(wide, kit) == kit.greedy(model_b, kit.PROMPT, 24)
        sender.update_weights(model_a)


def test_ranks_draw_the_same_samples(wide, kit):
    answers = wide.generate([kit.PROMPT, [1, 2, 3]], max_new_tokens=24, temperature=1.0)
    assert [len(answer["output_ids"]) for answer in answers] == [24, 24]


def test_a_rank_that_fails_alone_is_silent_and_spoils_the_output(
    wide, kit, sender, model_a, model_b
):
    wide.inject(Fault(UPDATE, "refuse", when="after_receive", rank=1, times=1))
    assert sender.update_weights(model_b).engines[wide.url].state == "new"
    mixed = output(wide, kit)
    assert mixed != kit.greedy(model_a, kit.PROMPT, 24)
    assert mixed != kit.greedy(model_b, kit.PROMPT, 24)


def test_the_checker_lists_both_ranks_with_their_own_digests(wide, kit, sender, model_b):
    def ranks():
        return kit.get(wide, "/weights_checker").json["ranks"]

    before = ranks()
    assert [rank["parallelism_info"][0]["tp_rank"] for rank in before] == [0, 1]
    shard, whole = "model.layers.0.self_attn.q_proj.weight", "model.norm.weight"
    assert before[0]["checksums"][shard] != before[1]["checksums"][shard]
    assert before[0]["checksums"][whole] == before[1]["checksums"][whole]
    wide.inject(Fault(UPDATE, "refuse", when="after_receive", rank=1, times=1))
    sender.update_weights(model_b)
    changed = [old != new for old, new in zip(before, ranks(), strict=True)]
    assert changed == [True, False]


def sha256_of(part):
    return hashlib.sha256(part.contiguous().numpy().tobytes()).hexdigest()


@torch.no_grad()
def test_the_checker_says_which_part_of_what_it_digested(wide, kit, sender, model_b):
    sender.update_weights(model_b)
    for rank in kit.get(wide, "/weights_checker").json["ranks"]:
        assert (rank["digest"], rank["dtype"]) == ("sha256", "float32")
        assert set(rank["parts"]) == set(rank["checksums"]) == set(dict(model_b.named_parameters()))
        for name, part in rank["parts"].items():
            value = model_b.get_parameter(name)
            if part["dim"] is not None:
                value = value.narrow(part["dim"], part["start"], part["length"])
            assert rank["checksums"][name] == sha256_of(value), name


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_drops_a_weight_shows_in_its_digests_alone(
    wide, kit, sender, model_a, model_b, rank
):
    def held():
        return [rank["checksums"] for rank in kit.get(wide, "/weights_checker").json["ranks"]]

    shard = "model.layers.0.self_attn.q_proj.weight"
    sender.update_weights(model_b)
    right = held()
    sender.update_weights(model_a)
    drop = Fault(UPDATE, "drop", when="after_receive", rank=rank, names=(shard,), times=1)
    wide.inject(drop)
    sender.update_weights(model_b)
    wrong = [
        {name for name, digest in own.items() if digest != there[name]}
        for own, there in zip(held(), right, strict=True)
    ]
    assert wrong == [{shard} if number == rank else set() for number in (0, 1)]


def test_tied_embeddings_are_divided_too(kit):
    first, second = (kit.qwen2(seed) for seed in (0, 1))
    with ReferenceEngine(first, tp=2) as engine:
        assert output(engine, kit) == kit.greedy(first, kit.PROMPT, 24)
        with SGLangWeightSyncScheme(engine.url).create_sender() as sender:
            sender.update_weights(second)
        assert output(engine, kit) == kit.greedy(second, kit.PROMPT, 24)


@pytest.mark.parametrize("rank", [0, 1])
def test_the_death_of_one_rank_ends_the_server(wide, kit, rank):
    ranks = [wide.pid, other_rank(wide)]
    os.kill(ranks[rank], signal.SIGKILL)
    wide.process.wait(30)
    kit.wait_for(lambda: not any(kit.alive(pid) for pid in ranks), 30)
    wide.restart()
    assert kit.get(wide, "/server_info").json["tp_size"] == 2


def test_a_frozen_rank_hangs_the_server_which_still_goes_when_told(wide, kit):
    frozen = other_rank(wide)
    os.kill(frozen, signal.SIGSTOP)
    with pytest.raises(TimeoutError):
        wide.generate(kit.PROMPT, timeout=1)
    assert kit.get(wide, "/model_info").status == 200
    wide.restart()
    kit.wait_for(lambda: not kit.alive(frozen))
    assert wide.generate(kit.PROMPT)["output_ids"]


def test_a_model_that_cannot_be_divided_is_refused_at_the_start(model_a):
    with pytest.raises(RuntimeError, match=r"key-value heads .* 3 ranks"):
        ReferenceEngine(model_a, tp=3)


@pytest.mark.parametrize(
    ("name", "shape", "cut"),
    [
        ("model.layers.0.mlp.gate_proj.weight", [8, 4], (0, 4, 4)),
        ("model.layers.0.self_attn.k_proj.bias", [8], (0, 4, 4)),
        ("model.layers.0.mlp.down_proj.weight", [4, 8], (1, 4, 4)),
        ("model.embed_tokens.weight", [64, 4], (0, 32, 32)),
        ("model.norm.weight", [4], None),
    ],
)
def test_layers_are_divided_as_megatron_does(name, shape, cut):
    assert Shard(rank=1, size=2).cut(name, shape) == cut


def test_a_bias_after_a_sum_is_not_divided():
    with pytest.raises(ValueError, match="cannot be divided"):
        Shard(rank=1, size=2).cut("model.layers.0.self_attn.o_proj.bias", [8])
