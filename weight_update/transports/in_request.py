"""Weights that travel inside the requests: a group that carries nothing, and its packer."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing

import torch

from weight_update.transports.packing import read_as_announced
from weight_update.weights.buckets import Bucket, Plan
from weight_update.weights.cargo import Cargo, Format, Terms
from weight_update.weights.growing_plan import GrowingPlan
from weight_update.weights.specs import TensorSpec

Put = Callable[[Mapping[str, torch.Tensor]], None]


class NoGroup:
    """Stands where a group would: nobody joins it, and nothing moves in it.

    Args:
        backend: What the report calls it.
        device: Where the weights are packed.
    """

    name = ""
    address = ""
    port = 0

    def __init__(
        self,
        backend: str = "none",
        device: torch.device = torch.device("cpu"),  # noqa: B008 - it is immutable
    ) -> None:
        self.backend = backend
        self.device = device
        self.given_up = False

    def join(self) -> None:
        """Nothing."""

    def arrived(self, rank: int) -> bool:
        """Whoever was invited is there."""
        return True

    def decoy(self) -> None:
        """There is no rendezvous."""

    def missing_rank(self) -> int | None:
        """Nobody is waited for."""
        return None

    def broadcast(self, tensors: list[torch.Tensor]) -> None:
        """Nothing: the engines' sessions send what was packed."""

    def moving(self) -> bool:
        """Nothing is."""
        return False

    def give_up(self) -> None:
        """The next update makes another."""
        self.given_up = True


class RequestPacker:
    """Reads a bucket's values, once for all engines, and puts them where sessions find them.

    Args:
        put: Takes the values by name, on the CPU; training does not change them.
    """

    def __init__(self, put: Put) -> None:
        self._put = put

    def format(self, specs: Sequence[TensorSpec] | None, terms: Terms) -> Format:
        """All tensors share one request."""
        return Format(sys.maxsize, lambda _: True)

    def reserve(self, plan: Plan | GrowingPlan) -> None:
        """Nothing: values are kept as they are read."""

    def objections(self, plan: Plan | GrowingPlan) -> list[str]:
        """A request holds a whole adapter, or an engine would take a part for one."""
        buckets = len(plan.buckets)
        return [] if buckets == 1 else [f"{buckets} buckets, and one request takes one"]

    @torch.no_grad()
    def pack(self, bucket: Bucket) -> Cargo:
        """Puts the values; returns nothing that would travel in a group.

        Raises:
            WeightMismatchError: A value has another dtype or shape than was announced.
        """
        with closing(read_as_announced(bucket.weights)) as values:
            pairs = zip(bucket.specs, values, strict=True)
            self._put({spec.name: _copied(value) for spec, value in pairs})
        return Cargo()

    def abandon(self) -> None:
        """Nothing: no buffer is used twice."""


def _copied(value: torch.Tensor) -> torch.Tensor:
    # A view would bring all of its storage along.
    return value.detach().to("cpu", copy=True).contiguous()
