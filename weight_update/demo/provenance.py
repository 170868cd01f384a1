"""Which weights made which token: what a sample claims, and what its probabilities prove."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from weight_update.demo.policy import all_logprobs, of_tokens
from weight_update.demo.sampler import Sample

TOLERANCE = 1e-3
"""Between log-probabilities of equal weights, computed by two programs in float32."""
KEPT = 32


@dataclass(frozen=True)
class Verdict:
    """What checking samples found.

    Attributes:
        checked: How many samples were looked at.
        faults: What was wrong with some of them.
        worst: The largest difference between the engine's log-probability of a token and that
            of the weights which the token is said to come from.
    """

    checked: int = 0
    faults: tuple[str, ...] = ()
    worst: float = 0.0

    def __add__(self, other: Verdict) -> Verdict:
        return Verdict(
            self.checked + other.checked,
            self.faults + other.faults,
            max(self.worst, other.worst),
        )


def span_fault(sample: Sample, versions: Sequence[str]) -> str:
    """Why a sample's versions cannot be true; empty if they can.

    Args:
        sample: The sample.
        versions: All that the engine has served so far, oldest first.

    Example:
        >>> from weight_update.rollouts import Span
        >>> sample = Sample((10, 1), (2, 3), (0.0, 0.0), (Span("2", 0, 2),), asked_under="1")
        >>> span_fault(sample, ["default", "1", "2"]), span_fault(sample, ["default", "1"])
        ('', "version '2' was never pushed")
    """
    ends = [0, *(span.end for span in sample.spans)]
    if [span.start for span in sample.spans] != ends[:-1] or ends[-1] != len(sample.output):
        return f"spans {sample.spans} do not cover {len(sample.output)} tokens"
    if sorted(set(ends)) != ends:
        return f"spans {sample.spans} overlap or are empty"
    named = [sample.asked_under, *(span.version for span in sample.spans)]
    unknown = [version for version in named if version not in versions]
    if unknown:
        return f"version {unknown[0]!r} was never pushed"
    places = [versions.index(version) for version in named]
    if places != sorted(places) or len(set(places[1:])) != len(places[1:]):
        return f"versions {named} go back"
    return ""


class Provenance:
    """Remembers the weights of each version, and checks samples against them.

    Args:
        version: The engine's first version.
        model: A model with the weights of that version.
    """

    def __init__(self, version: str, model: Any) -> None:
        self.versions: list[str] = []
        self._model = copy.deepcopy(model)
        self._weights: dict[str, dict[str, torch.Tensor]] = {}
        self.pushed(version, model)

    def pushed(self, version: str, model: Any) -> None:
        """Remember that the engine serves the weights of ``model`` as ``version`` from now on."""
        self.versions.append(version)
        state = model.state_dict().items()
        self._weights[version] = {name: tensor.detach().clone() for name, tensor in state}
        for old in list(self._weights)[:-KEPT]:
            del self._weights[old]

    def check(self, samples: Sequence[Sample]) -> Verdict:
        """Check that each token of each sample was made by the version it is said to be."""
        verdict = Verdict(checked=len(samples))
        found = ((sample, span_fault(sample, self.versions)) for sample in samples)
        faulty = {id(sample): fault for sample, fault in found if fault}
        sound = [sample for sample in samples if id(sample) not in faulty]
        verdict += Verdict(faults=tuple(faulty.values()))
        for version in sorted({span.version for sample in sound for span in sample.spans}):
            verdict += self._compare(version, sound)
        return verdict

    def _compare(self, version: str, samples: Sequence[Sample]) -> Verdict:
        if version not in self._weights:
            return Verdict(faults=(f"version {version!r} is {KEPT} updates old",))
        used = [s for s in samples if any(span.version == version for span in s.spans)]
        self._model.load_state_dict(self._weights[version])
        with torch.no_grad():
            own = of_tokens(all_logprobs(self._model, used), used)
        differences = (own - torch.tensor([sample.logprobs for sample in used])).abs()
        worst = float(differences[_made_by(version, used)].max())
        faults = (f"tokens of version {version!r} are not its own: off by {worst:.2g}",)
        return Verdict(faults=faults if not worst < TOLERANCE else (), worst=worst)


def _made_by(version: str, samples: Sequence[Sample]) -> torch.Tensor:
    """Mark the tokens that are said to come from ``version``."""
    mask = torch.zeros(len(samples), len(samples[0].output), dtype=torch.bool)
    for row, sample in enumerate(samples):
        for span in sample.spans:
            mask[row, span.start : span.end] |= span.version == version
    return mask
