"""What a weight is: a spec that can be announced, and a way to read the value later."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod

import torch


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
class Weight:
    """A tensor that is announced now and read when its bucket is packed.

    Attributes:
        spec: What is announced to the engine.
        device: Where the value lives.
        read: Returns the detached value. It is called when the value is needed, so that merged
            or cast weights exist one at a time and never as a second model.
    """

    spec: TensorSpec
    device: torch.device
    read: Callable[[], torch.Tensor]
