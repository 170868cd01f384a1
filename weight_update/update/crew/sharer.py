"""A follower that packs too: what the leader packs, in memory of its own GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from weight_update.errors import ConfigurationError, WeightMismatchError
from weight_update.options import UpdateOptions
from weight_update.update.crew.recipes import digest_of, plan_by
from weight_update.update.protocols import Packer
from weight_update.weights.buckets import Plan
from weight_update.weights.cargo import SharedTensor
from weight_update.weights.specs import Weight


class Sharer:
    """This rank's packer, whose memory engines open that share its GPU.

    The memory is kept between updates, and so long as an engine may read it: the leader lets a
    bucket be packed over another only once that one was taken.

    Args:
        options: The same as the leader's.
        open_packer: Makes the packer for a device, or returns the one that there is.
    """

    def __init__(
        self, options: UpdateOptions, open_packer: Callable[[torch.device], Packer]
    ) -> None:
        self._options = options
        self._open_packer = open_packer
        self._packer: Packer | None = None
        self._make: Callable[[Packer], Plan] = lambda _: Plan(())
        self._plan: Plan | None = None

    def begin(
        self, recipe: Mapping[str, Any], weights: Sequence[Weight], device: torch.device | None
    ) -> None:
        """Learns what will be packed, and by which plan; the first bucket makes it.

        Args:
            recipe: How the leader has planned.
            weights: What this rank extracted.
            device: Where this rank packs; None where there is no GPU for it.
        """
        self._plan = None
        self._packer = None if device is None else self._open_packer(device)
        self._make = lambda packer: plan_by(recipe, weights, self._options, packer)

    def pack(self, index: int, digest: str) -> tuple[SharedTensor, ...]:
        """Packs a bucket of the plan.

        Args:
            index: Which.
            digest: Of what the leader packs; nothing is read if it is something else.

        Raises:
            ConfigurationError: There is no room for it.
            WeightMismatchError: This rank would pack other weights.
        """
        if self._packer is None:
            raise ConfigurationError("torch sees no GPU on this rank", phase="plan")
        bucket = self._planned(self._packer).take(index)
        if bucket is None or digest_of(bucket) != digest:
            raise WeightMismatchError(
                f"bucket {index} has other weights here than on the rank that leads",
                phase="transfer",
                remedy="give the senders of all ranks the same options, and the same model",
            )
        return self._packer.pack(bucket).shared

    def _planned(self, packer: Packer) -> Plan:
        if self._plan is None:
            plan = self._make(packer)
            packer.reserve(plan)
            objections = packer.objections(plan)
            if objections:
                raise ConfigurationError("; ".join(objections), phase="plan")
            self._plan = plan
        return self._plan

    def let_go(self) -> None:
        """Leaves the memory to a pack that has not ended."""
        if self._packer is not None:
            self._packer.abandon()
