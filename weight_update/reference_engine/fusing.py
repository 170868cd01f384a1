"""A loader that fuses weights within one request, as those of some model families do."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from weight_update.reference_engine.faults import Fault
from weight_update.reference_engine.weights import Arrival, Weights

_log = logging.getLogger("reference_engine.fusing")
_FUSED = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj"),
    **dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj"),
}


class FusingWeights(Weights):
    """Weights of which the members of a fused module are taken together or not at all.

    It says yes to what it loses, as the real loaders do, and logs it.
    """

    def load(self, arrivals: Sequence[Arrival], faults: Sequence[Fault] = ()) -> None:
        """Copy what arrived, without those whose partners came with another request."""
        super().load(self._complete(arrivals), faults)

    def take(self, arrivals: Sequence[Arrival]) -> None:
        """Copy what arrived by one call, without those likewise."""
        super().take(self._complete(arrivals))

    def _complete(self, arrivals: Sequence[Arrival]) -> list[Arrival]:
        lost = incomplete((name for name, _, _ in arrivals), self._slots)
        for name in lost:
            _log.warning("lost %s: it came without its partners", name)
        return [arrival for arrival in arrivals if arrival[0] not in lost]


def incomplete(names: Iterable[str], known: Iterable[str]) -> set[str]:
    """Return the names whose fused module is not complete.

    Example:
        >>> sorted(incomplete(["a.q_proj.weight", "b"], ["a.q_proj.weight", "a.k_proj.weight"]))
        ['a.q_proj.weight']
    """
    partners: dict[str, set[str]] = {}
    for name in known:
        partners.setdefault(_module(name), set()).add(name)
    given = set(names)
    return {name for name in given if not partners.get(_module(name), set()) <= given}


def _module(name: str) -> str:
    parts = name.split(".")
    fused = _FUSED.get(parts[-2]) if len(parts) > 1 else None
    return ".".join([*parts[:-2], fused]) if fused else name
