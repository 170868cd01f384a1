"""What engines prove, and what is made of it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weight_update.errors import ConfigurationError, EngineRejected, WeightMismatchError
from weight_update.facts import Digests, NameCheck, Part
from weight_update.update.fleet import Fleet, Member
from weight_update.update.verify import (
    check_names,
    demand,
    digest_of,
    holds,
    learn,
    sample_of,
    verify_fleet,
)
from weight_update.waiting import Deadline
from weight_update.weights.buckets import Plan, plan_buckets
from weight_update.weights.extract import extract_weights

SENT = {
    "embed.weight": torch.arange(6.0).reshape(2, 3),
    "q_proj.bias": torch.tensor([0.1, 0.2]),
    "norm.weight": torch.ones(3),
    "lm_head.weight": torch.arange(6.0).reshape(2, 3) + 1,
}
PLAN = plan_buckets(extract_weights(SENT), 1 << 20)


def deadline() -> Deadline:
    return Deadline(20.0)


@dataclass
class Prover:
    """An engine as far as verification asks it."""

    url: str
    layout: str | None = "one"
    check: NameCheck = field(default_factory=NameCheck)
    held: dict[str, torch.Tensor] | None = None
    answer: Digests | Exception | None = None
    asked: list[str] = field(default_factory=list)

    def check_names(self, names: Any, deadline: Deadline) -> NameCheck:
        self.asked.append("names")
        return self.check

    def digests(self, deadline: Deadline) -> Digests | None:
        self.asked.append("digests")
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def first_values(self, name: str, deadline: Deadline) -> tuple[float, ...] | None:
        if self.held is None or name not in self.held:
            return None
        row = self.held[name] if self.held[name].dim() < 2 else self.held[name][0]
        return tuple(row.float().tolist())


def fleet_of(*provers: Prover) -> Fleet:
    fleet = Fleet(Member(prover) for prover in provers)  # type: ignore[arg-type]
    for member in fleet.members:
        learn(member, deadline())
    return fleet


def verify(fleet: Fleet, mode: Any = "auto", *, whole: bool = True) -> list[str]:
    verify_fleet(fleet, PLAN, mode, whole=whole, deadline=deadline())
    return [member.attempt.verified for member in fleet.members]


def mute(**digests: str) -> Digests:
    return Digests(ranks=(digests,))


def described(tensors: dict[str, torch.Tensor], dtype: torch.dtype = torch.float32) -> Digests:
    sums = {
        name: hashlib.sha256(value.to(dtype).view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, value in tensors.items()
    }
    parts = {name: Part() for name in tensors}
    return Digests((sums,), (parts,), str(dtype).removeprefix("torch."))


def test_an_engine_with_nothing_to_compare_is_unverified() -> None:
    assert verify(fleet_of(Prover("http://a:1"))) == ["unverified"]


def test_digests_that_say_what_they_are_of_are_compared_with_what_was_sent() -> None:
    assert verify(fleet_of(Prover("http://a:1", answer=described(SENT)))) == ["checksum"]


def test_digests_are_of_the_dtype_that_the_engine_keeps() -> None:
    answer = described(SENT, torch.bfloat16)

    assert verify(fleet_of(Prover("http://a:1", answer=answer))) == ["checksum"]


def test_a_weight_that_is_not_what_was_sent_is_named() -> None:
    wrong = described(SENT | {"norm.weight": torch.zeros(3)})
    fleet = fleet_of(
        Prover("http://a:1", answer=described(SENT)), Prover("http://b:1", answer=wrong)
    )

    with pytest.raises(WeightMismatchError, match=r"'norm\.weight'") as failure:
        verify(fleet)

    assert failure.value.engines == ("http://b:1",)
    assert [bool(m.attempt.suspicion) for m in fleet.members] == [False, True]


def test_a_rank_that_kept_its_old_part_is_caught() -> None:
    halves = [Part(0, 0, 1), Part(0, 1, 1)]
    weight = PLAN.buckets[0].weights
    embed = next(w for w in weight if w.spec.name == "embed.weight")
    good = [digest_of(embed.read(), part, "float32") for part in halves]
    parts = tuple({"embed.weight": part} for part in halves)
    right = Digests(tuple({"embed.weight": d} for d in good), parts, "float32")
    stale = Digests(({"embed.weight": good[0]}, {"embed.weight": "old"}), parts, "float32")

    assert verify(fleet_of(Prover("http://a:1", answer=right))) == ["checksum"]
    with pytest.raises(WeightMismatchError, match=r"embed\.weight"):
        verify(fleet_of(Prover("http://a:1", answer=stale)))


def test_replicas_that_agree_are_verified() -> None:
    provers = [Prover(f"http://{name}:1", answer=mute(w="1")) for name in "ab"]

    assert verify(fleet_of(*provers)) == ["checksum", "checksum"]


@pytest.mark.parametrize(
    ("sums", "odd"),
    [("11", ""), ("12", "ab"), ("112", "c"), ("211", "a"), ("123", "abc")],
)
def test_the_majority_of_replicas_is_believed(sums: str, odd: str) -> None:
    provers = [Prover(f"http://{n}:1", answer=mute(w=d)) for n, d in zip("abc", sums, strict=False)]
    fleet = fleet_of(*provers)
    if not odd:
        assert verify(fleet) == ["checksum"] * len(sums)
        return

    with pytest.raises(WeightMismatchError) as failure:
        verify(fleet)

    assert failure.value.engines == tuple(f"http://{name}:1" for name in odd)


@pytest.mark.parametrize("layouts", [("one", "two"), (None, None)])
def test_engines_of_other_layouts_are_not_compared(layouts: tuple[str | None, ...]) -> None:
    provers = [
        Prover(f"http://{index}:1", layout=layout, answer=mute(w=str(index)))
        for index, layout in enumerate(layouts)
    ]

    assert verify(fleet_of(*provers)) == ["unverified", "unverified"]


def test_replicas_are_not_compared_after_a_push_of_some_weights() -> None:
    provers = [Prover(f"http://{name}:1", answer=mute(w=name)) for name in "ab"]

    assert verify(fleet_of(*provers), whole=False) == ["unverified", "unverified"]


def test_an_engine_that_can_make_no_digests_now_is_unverified_unless_they_were_demanded() -> None:
    provers = [Prover(f"http://{name}:1", answer=mute(w="1")) for name in "ab"]
    fleet = fleet_of(*provers)
    for prover in provers:
        prover.answer = EngineRejected("busy")

    assert verify(fleet) == ["unverified", "unverified"]
    with pytest.raises(EngineRejected):
        verify(fleet, "checksum")


def test_weights_that_are_read_back_prove_something() -> None:
    assert verify(fleet_of(Prover("http://a:1", held=SENT))) == ["sample"]
    old = {name: value + 1 for name, value in SENT.items()}
    with pytest.raises(WeightMismatchError, match="4 weight"):
        verify(fleet_of(Prover("http://a:1", held=old)))


def test_names_that_the_engine_does_not_know_are_refused() -> None:
    check = NameCheck(known=True, unknown=("norm.weight",))

    with pytest.raises(WeightMismatchError, match=r"would ignore 'norm\.weight'") as failure:
        look_at_names(Prover("http://a:1", check=check))

    assert failure.value.phase == "plan"


def test_weights_of_the_engine_that_a_whole_push_lacks_are_refused() -> None:
    check = NameCheck(known=True, lacking=("up_proj.weight",))

    with pytest.raises(WeightMismatchError, match="would stay old"):
        look_at_names(Prover("http://a:1", check=check))
    look_at_names(Prover("http://a:1", check=check), whole=False)


def test_names_are_sampled_where_they_cannot_be_known() -> None:
    some = {name: value for name, value in SENT.items() if name != "norm.weight"}

    with pytest.raises(WeightMismatchError, match=r"norm\.weight"):
        look_at_names(Prover("http://a:1", held=some))
    look_at_names(Prover("http://a:1", held={}))
    look_at_names(Prover("http://a:1", held=SENT))


def test_the_same_names_are_checked_once() -> None:
    prover = Prover("http://a:1", check=NameCheck(known=True))
    member = Member(prover)  # type: ignore[arg-type]

    for _ in range(3):
        check_names(member, list(PLAN.names), whole=True, deadline=deadline())

    assert prover.asked == ["names"]


def look_at_names(prover: Prover, *, whole: bool = True) -> None:
    check_names(Member(prover), list(PLAN.names), whole=whole, deadline=deadline())  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["checksum", "sample"])
def test_a_proof_that_an_engine_cannot_give_is_refused_beforehand(mode: Any) -> None:
    with pytest.raises(ConfigurationError, match="cannot give that proof"):
        demand(fleet_of(Prover("http://a:1")), list(PLAN.names), mode, deadline())


@pytest.mark.parametrize(
    ("mode", "fleet"),
    [
        ("checksum", [Prover("http://a:1", answer=described(SENT))]),
        ("checksum", [Prover(f"http://{name}:1", answer=mute(w="1")) for name in "ab"]),
        ("sample", [Prover("http://a:1", held=SENT)]),
        ("auto", [Prover("http://a:1")]),
    ],
)
def test_a_proof_that_can_be_given_is_asked_for(mode: Any, fleet: list[Prover]) -> None:
    demand(fleet_of(*fleet), list(PLAN.names), mode, deadline())


names = st.lists(
    st.sampled_from([f"layers.{i}.{part}" for i in range(40) for part in ("w", "bias")]),
    unique=True,
    min_size=1,
)


@given(names)
def test_a_sample_has_the_first_and_the_last_and_a_bias_in_order(given_names: list[str]) -> None:
    sample = sample_of(given_names)

    assert sample[0] == given_names[0]
    assert sample[-1] == given_names[-1]
    assert sample == [name for name in given_names if name in sample]
    if any(name.endswith(".bias") for name in given_names):
        assert any(name.endswith(".bias") for name in sample)


@given(st.lists(st.floats(-8, 8, width=32), min_size=1, max_size=8))
def test_a_row_is_held_in_any_dtype_that_an_engine_may_keep(row: list[float]) -> None:
    sent = torch.tensor([row, [0.0] * len(row)])
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert holds(sent, sent[0].to(dtype).float().tolist())
    other = [value + 1.0 for value in row]
    assert not holds(sent, other)


def test_a_plan_without_weights_is_no_plan() -> None:
    assert sample_of(list(Plan(()).names)) == []
