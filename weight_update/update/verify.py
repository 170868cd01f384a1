"""Verification: before generation continues, an engine proves that it holds what was sent.

Names are compared before the first pause; values after the flush: digests with those of the
weights that were sent where an engine says what its digests are of, else with those of another
engine of the same layout, and some weights by reading them back. Where there is nothing to
compare with, the engine counts as unverified.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field

import torch

from weight_update.errors import (
    ConfigurationError,
    EngineRejected,
    WeightMismatchError,
    some_of,
)
from weight_update.facts import Digests, Part
from weight_update.options import Verify
from weight_update.report import Verification
from weight_update.update.fleet import Attempt, Fleet, Member
from weight_update.waiting import Deadline
from weight_update.weights.buckets import Plan
from weight_update.weights.fitting import is_of_vocabulary
from weight_update.weights.growing_plan import GrowingPlan
from weight_update.weights.name_map import rule_against_mark
from weight_update.weights.reading import read_in_turn
from weight_update.weights.shapes import misshapen
from weight_update.weights.specs import Weight

_SPREAD = 6
_PEFT = "base_model.model."
_SHAPES_SHOWN = 3
# Engines are asked in threads, and reading a merged weight changes what is kept for its layer.
_reading = threading.Lock()
# Computed by the engine itself, and parts that some engines cannot cut out of a fused weight.
_NOT_READ_BACK = re.compile(r"rotary_emb\.|\.[kv]_proj\.")
# What an engine may keep a sent value as; read back, it is one of these, exactly.
_KEPT_AS = (torch.float32, torch.bfloat16, torch.float16)

_Place = tuple[str, Part, str | None]
"""A part of a weight, and the dtype that it is kept in."""


@dataclass(frozen=True)
class Sent:
    """What was sent, each weight read once however many engines are compared with it.

    Attributes:
        weights: By name, in the order in which they were sent.
    """

    weights: Mapping[str, Weight]
    _digests: dict[_Place, str] = field(default_factory=dict)
    _rows: dict[str, torch.Tensor] = field(default_factory=dict)

    def digests(self, asked: Collection[_Place]) -> Mapping[_Place, str]:
        """Digests of parts of weights, each in a dtype that an engine keeps."""
        with _reading:
            lacking: dict[str, list[_Place]] = {}
            for place in asked:
                if place not in self._digests:
                    lacking.setdefault(place[0], []).append(place)
            with closing(read_in_turn([self.weights[name] for name in lacking])) as values:
                for value, places in zip(values, lacking.values(), strict=True):
                    self._digests.update({each: digest_of(value, *each[1:]) for each in places})
            return self._digests

    def first_row(self, name: str) -> torch.Tensor:
        """The first row of a weight."""
        with _reading:
            if name not in self._rows:
                (value,) = read_in_turn([self.weights[name]])
                self._rows[name] = _first_row(value).clone()
            return self._rows[name]


def weights_of(plan: Plan | GrowingPlan) -> dict[str, Weight]:
    """All weights of a plan by name, in the order in which they are sent."""
    return {weight.spec.name: weight for bucket in plan.buckets for weight in bucket.weights}


def sample_of(names: Sequence[str]) -> list[str]:
    """Names whose weights are read back: the first, the last, a bias, a norm, and some between.

    Example:
        >>> sample_of(["embed.weight", "layers.0.q_proj.bias", "norm.weight", "lm_head.weight"])
        ['embed.weight', 'layers.0.q_proj.bias', 'norm.weight', 'lm_head.weight']
    """
    readable = [name for name in names if not _NOT_READ_BACK.search(name)]
    step = max(1, len(readable) // _SPREAD)
    kinds = (".bias", "norm.weight", "embed_tokens.weight")
    first = (next((name for name in readable if name.endswith(kind)), None) for kind in kinds)
    chosen = {*readable[::step], *readable[-1:], *(name for name in first if name)}
    return [name for name in readable if name in chosen]


# -- before the pause -------------------------------------------------------------------


def check_names(member: Member, names: Sequence[str], *, whole: bool, deadline: Deadline) -> None:
    """Raises if the engine would ignore a name, or keep a weight that a whole push must bring.

    Raises:
        WeightMismatchError: With the names.
    """
    if frozenset(names) == member.names:
        return
    check = member.engine.check_names(names, deadline)
    unknown = check.unknown if check.known else _not_readable(member, names, deadline)
    lacking = check.lacking if check.known and whole else ()
    if unknown or lacking:
        raise WeightMismatchError(
            "; ".join(filter(None, (*_name_trouble(unknown, lacking), check.remark))),
            engine=member.url,
            phase="plan",
            remedy="push the model that the engine serves, with the names of its checkpoint (of a "
            f"wrapper, the inner model{_marked(unknown, check.lacking)}); verify='off' skips this "
            "check",
        )
    if not check.lacking:  # else the same names are too few for a whole model
        member.names = frozenset(names)


def check_shapes(member: Member, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises if weights are of other shapes than in the model's folder, where that is readable.

    Rows of the vocabulary are not looked at: how many an engine takes is known otherwise.

    Raises:
        WeightMismatchError: With the first few.
    """
    wrong = [
        f"{name!r} is {ours} here and {theirs} there"
        for name, ours, theirs in misshapen(shapes, member.engine.intake.shapes)
        if not is_of_vocabulary(name)
    ]
    if wrong:
        raise WeightMismatchError(
            f"{len(wrong)} weight(s) have another shape than in the folder of the engine's "
            f"model: {first_few(wrong)}",
            engine=member.url,
            phase="plan",
            remedy="push the model that the engine serves; verify='off' skips this check",
        )


def first_few(shapes: Sequence[str]) -> str:
    """The first of what is said of each weight; a model has thousands."""
    return "; ".join(shapes[:_SHAPES_SHOWN]) + ("; ..." if len(shapes) > _SHAPES_SHOWN else "")


def learn(member: Member, deadline: Deadline) -> None:
    """Finds out, once a start of the engine, whether it makes digests and what they are of."""
    if not member.asked:
        digests = member.engine.digests(deadline)
        member.digests = digests is not None
        member.describes = digests is not None and digests.parts is not None
        member.asked = True


def _marked(unknown: Sequence[str], lacking: Sequence[str]) -> str:
    """How to take away what a wrapper put before all names, if that is what is wrong."""
    if unknown and all(name.startswith(_PEFT) for name in unknown):
        return "; of a PEFT model, the module itself and not its state_dict"
    rule = rule_against_mark(unknown, lacking)
    return f'; or name_map={{r"{rule}": ""}}' if rule else ""


def _name_trouble(unknown: Sequence[str], lacking: Sequence[str]) -> Iterator[str]:
    if unknown:
        yield f"it does not know {len(unknown)} of the weights and would ignore {some_of(unknown)}"
    if lacking:
        yield f"{len(lacking)} of its own weights would stay old: {some_of(lacking)}"
        if list(lacking) == ["lm_head.weight"]:
            yield "the trainer may tie it to its embedding (tie_word_embeddings), and it does not"


def _not_readable(member: Member, names: Sequence[str], deadline: Deadline) -> list[str]:
    """Names that the engine cannot read back although it can others; none tells nothing."""
    sample = sample_of(names)
    unread = [name for name in sample if member.engine.first_values(name, deadline) is None]
    return unread if len(unread) < len(sample) else []


def demand(fleet: Fleet, names: Sequence[str], verify: Verify, deadline: Deadline) -> None:
    """Raises if the engines cannot give the proof that was asked for.

    Raises:
        ConfigurationError: The text says which engine, and what would do.
    """
    if verify not in ("checksum", "sample"):
        return
    for member in fleet.members:
        able = (
            _can_digest(member, fleet)
            if verify == "checksum"
            else _can_sample(member, names, deadline)
        )
        if not able:
            raise ConfigurationError(
                f"verify={verify!r} is asked for, and it cannot give that proof",
                engine=member.url,
                phase="plan",
                remedy="verify='auto' takes what there is; a checksum needs engines that tell "
                "digests, two of equal layout, a sample one that returns weights by name",
            )


def _can_digest(member: Member, fleet: Fleet) -> bool:
    return member.digests and (member.describes or bool(_twins(member, fleet)))


def _can_sample(member: Member, names: Sequence[str], deadline: Deadline) -> bool:
    first, *_ = sample_of(names)
    return member.engine.first_values(first, deadline) is not None


def _twins(member: Member, fleet: Fleet) -> list[Member]:
    layout = member.engine.layout
    return [m for m in fleet.members if m is not member and layout and m.engine.layout == layout]


# -- after the flush --------------------------------------------------------------------


def verify_fleet(
    fleet: Fleet, plan: Plan | GrowingPlan, verify: Verify, *, whole: bool, deadline: Deadline
) -> None:
    """Has every engine prove what it holds; ``attempt.verified`` says how it did.

    Raises:
        WeightMismatchError: Engines hold something else; the suspicion of each is noted.
    """
    sent = Sent(weights_of(plan))
    digests: dict[str, Digests] = {}

    def look(member: Member, attempt: Attempt) -> None:
        wanted = _wanted(member, fleet, verify, whole=whole)
        answer = _digests(member, verify, deadline) if wanted else None
        if answer is not None:
            digests[member.url] = answer
        attempt.verified = _proof(member, answer, sent, verify, deadline)

    fleet.each("verify", look, deadline)
    odd = _odd_twins(fleet, digests)
    if odd:
        raise _mismatch(odd)


def prove(member: Member, plan: Plan | GrowingPlan, verify: Verify, deadline: Deadline) -> None:
    """Has one engine prove what it holds, after a failure in which its word is not enough.

    Raises:
        WeightMismatchError: It holds something else.
    """
    sent = Sent(weights_of(plan))
    answer = _digests(member, "auto", deadline) if member.describes else None
    member.attempt.verified = _proof(member, answer, sent, verify, deadline)


def _proof(
    member: Member,
    digests: Digests | None,
    sent: Sent,
    verify: Verify,
    deadline: Deadline,
) -> Verification:
    """How one engine proves by itself what it holds."""
    places = _places(digests, sent) if digests is not None else {}
    differing = _differing(places, sent)
    # A sample of what was compared whole would show nothing more.
    told = verify == "auto" and places.keys() >= sent.weights.keys()
    sampled = verify in ("auto", "sample") and not differing and not told
    sample = _sample(member, sent, deadline, wanted=verify == "sample") if sampled else None
    wrong = differing or (sample or [])
    if wrong:
        raise _mismatch({member: wrong})
    if sent.weights and digests is not None and digests.parts is not None:
        return "checksum"
    return "unverified" if sample is None else "sample"


def _wanted(member: Member, fleet: Fleet, verify: Verify, *, whole: bool) -> bool:
    comparable = member.describes or (whole and bool(_twins(member, fleet)))
    return verify in ("auto", "checksum") and member.digests and comparable


def _digests(member: Member, verify: Verify, deadline: Deadline) -> Digests | None:
    try:
        return member.engine.digests(deadline)
    except EngineRejected:
        if verify == "checksum":
            raise
        return None


def _sample(member: Member, sent: Sent, deadline: Deadline, *, wanted: bool) -> list[str] | None:
    """Reads some weights back: those that differ, or None where none can be read.

    One after the other: older SGLang fails when two requests of one kind wait in it.
    """
    read = {}
    for name in sample_of(list(sent.weights)):
        try:
            read[name] = member.engine.first_values(name, deadline)
        except EngineRejected:
            if wanted:
                raise
    told = {name: values for name, values in read.items() if values is not None}
    if not told:
        return None
    return [name for name, values in told.items() if not holds(sent.first_row(name), values)]


def holds(sent: torch.Tensor, values: Sequence[float]) -> bool:
    """Whether values that were read back are the start of a tensor's first row.

    Example:
        >>> holds(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), (1.0, 2.0))
        True
        >>> holds(torch.tensor([0.1]), (0.2,))
        False
    """
    if sent.numel() == 0:
        return True
    row = _first_row(sent)[: len(values)].cpu()
    got = torch.tensor(values, dtype=torch.float32)
    kept = (row.to(dtype).float() for dtype in _KEPT_AS)
    return any(each.shape == got.shape and _equal(each, got) for each in kept)


def _first_row(value: torch.Tensor) -> torch.Tensor:
    whole = value.dim() < 2 or value.numel() == 0
    return value.reshape(-1) if whole else value[0].reshape(-1)


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


def _places(digests: Digests, sent: Sent) -> dict[str, list[tuple[_Place, str | None]]]:
    """By name of a weight that was sent, its parts on all ranks and their digests."""
    places: dict[str, list[tuple[_Place, str | None]]] = {}
    for held, parts in zip(digests.ranks, digests.parts or (), strict=False):
        for name, part in parts.items():
            if name in sent.weights:
                place = (name, part, digests.dtype)
                places.setdefault(name, []).append((place, held.get(name)))
    return places


def _differing(places: Mapping[str, Sequence[tuple[_Place, str | None]]], sent: Sent) -> list[str]:
    """Weights whose digests are not those of what was sent."""
    told = [name for name in sent.weights if name in places]
    expected = sent.digests([place for name in told for place, _ in places[name]])
    return sorted(n for n in told if any(held != expected[place] for place, held in places[n]))


def digest_of(value: torch.Tensor, part: Part, dtype: str | None) -> str:
    """SHA-256 of the bytes of a rank's part of a weight, in the dtype that the engine keeps."""
    if part.dim is not None:
        value = value.narrow(part.dim, part.start, part.length)
    if dtype is not None and value.is_floating_point():
        value = value.to(getattr(torch, dtype))
    raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(raw.numpy().tobytes()).hexdigest()


def _odd_twins(fleet: Fleet, digests: Mapping[str, Digests]) -> dict[Member, list[str]]:
    """Where digests do not say what they are of, engines of one layout must agree."""
    mute = [m for m in fleet.members if m.url in digests and digests[m.url].parts is None]
    odd: dict[Member, list[str]] = {}
    for layout in {m.engine.layout for m in mute} - {None}:
        twins = [m for m in mute if m.engine.layout == layout]
        if len(twins) > 1:
            odd |= _odd_among(twins, digests)
    return odd


def _odd_among(twins: Sequence[Member], digests: Mapping[str, Digests]) -> dict[Member, list[str]]:
    """Those that differ from the majority; without one, all of them."""
    held = {m.url: tuple(tuple(sorted(r.items())) for r in digests[m.url].ranks) for m in twins}
    (most, count), *_ = Counter(held.values()).most_common(1)
    trusted = most if 2 * count > len(twins) else None
    odd = [m for m in twins if held[m.url] != trusted]
    for member in twins if not odd else ():
        member.attempt.verified = "checksum"
    if not odd:
        return {}
    other = trusted or held[odd[-1].url]
    one = held[odd[0].url]
    names = sorted({n for a, b in zip(one, other, strict=False) for n, _ in set(a) ^ set(b)})
    return dict.fromkeys(odd, names)


def _mismatch(odd: Mapping[Member, Sequence[str]]) -> WeightMismatchError:
    """Notes which engines hold something else than was sent, and says so."""
    for member, names in odd.items():
        member.attempt.suspicion = (
            f"it does not hold what was sent: {len(names)} weight(s) differ, {some_of(names)}"
        )
    first = next(iter(odd))
    return WeightMismatchError(
        first.attempt.suspicion,
        engine=first.url,
        engines=[member.url for member in odd],
        phase="verify",
        remedy="look at the engine's log for weights that it could not load",
    )
