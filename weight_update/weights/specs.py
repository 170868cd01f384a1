"""What a weight is: a spec that can be announced, and a way to read the value later."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod

import torch

from weight_update.weights.owned import Owned


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, dtype and full (unsharded) shape of one tensor.

    Attributes:
        nbytes: Bytes of the contiguous tensor.

    Example:
        >>> spec = TensorSpec("lm_head.weight", torch.bfloat16, (32, 4))
        >>> spec.nbytes, spec.dtype_name
        (256, 'bfloat16')
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "nbytes", prod(self.shape) * self.dtype.itemsize)

    @property
    def dtype_name(self) -> str:
        """The bare torch name, such as ``bfloat16``, which engines expect."""
        return str(self.dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True)
class Turn:
    """A weight's place in the order in which the ranks of a sharded trainer read together.

    Attributes:
        index: Place among the weights that were extracted; the same on every rank.
        announce: Tells the other ranks the indices of the weights that are read next, in order.
            Each of them must then be read exactly once: the others do, and a read that is left
            out is waited for.
    """

    index: int
    announce: Callable[[Sequence[int]], None]


@dataclass(frozen=True, slots=True)
class Slice:
    """Where a value lies in a larger one that is there already, contiguous.

    Attributes:
        whole: The larger weight.
        first: The element of it that the value begins with; the others follow without gaps.
        read: How the value is read by itself: whoever reads it in another way makes something else.
    """

    whole: Weight
    first: int
    read: Callable[[], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor that is announced now and read when its bucket is packed.

    Attributes:
        spec: What is announced to the engine.
        device: Where the value lives.
        read: Returns the detached value. It is called when the value is needed, so that merged
            or cast weights exist one at a time and never as a second model.
        rows: Returns some rows of the first dimension (first, last + 1), where that costs less
            than to read them all; None elsewhere.
        into: Reads it into a contiguous place of its dtype and shape, and returns that, where this
            costs less than to read it and copy; None elsewhere. It returns the value in another
            place if that one does not fit.
        collective: All ranks of the trainer must read it together.
        turn: How they are told to, on the rank that leads; None on all others.
        ranks: Which ranks those are, of the trainer's default group; empty for all.
        slice: Where its value lies in a larger one, so that neighbours are copied at once; None for
            one that lies in none.
    """

    spec: TensorSpec
    device: torch.device
    read: Callable[[], torch.Tensor]
    rows: Callable[[int, int], torch.Tensor] | None = None
    collective: bool = False
    turn: Turn | None = None
    ranks: tuple[int, ...] = ()
    into: Callable[[torch.Tensor], torch.Tensor] | None = None
    slice: Slice | None = None

    @property
    def at_hand(self) -> bool:
        """Whether the value is there already, contiguous, so that reading it makes nothing.

        Example:
            >>> tensor = torch.zeros(2, 3)
            >>> spec = TensorSpec("w", tensor.dtype, (2, 3))
            >>> Weight(spec, tensor.device, tensor.detach).at_hand
            True
            >>> Weight(spec, tensor.device, lambda: tensor + 1).at_hand
            False
        """
        value = getattr(self.read, "__self__", None)
        if isinstance(value, Owned):  # of a model that was extracted before
            return value.is_contiguous
        return isinstance(value, torch.Tensor) and value.is_contiguous()

    def derived(self, spec: TensorSpec, read: Callable[[], torch.Tensor]) -> Weight:
        """Another weight whose value is made from this one's; it is read in the same turn."""
        return Weight(spec, self.device, read, None, self.collective, self.turn, self.ranks)


class Lasting(tuple[Weight, ...]):
    """Weights of which none holds a tensor: they, and what is made of them, may be remembered."""
