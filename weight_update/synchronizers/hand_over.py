"""Two sides that hand weights over by themselves, as the one update procedure sees them.

NeMo-RL's policy sends and its generation receives; nothing of it can be read here. So both
together stand for one engine: its session's only bucket carries nothing, and to apply it is to
have the policy send and the generation receive. Everything else - order, deadlines, what follows
a failure - is the procedure's.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, get_args

import torch

from weight_update.delivery.delivery import Delivery
from weight_update.errors import ConfigurationError, WeightUpdateError
from weight_update.options import PauseMode, UpdateOptions
from weight_update.synchronizers.exchange import Exchange
from weight_update.synchronizers.pair import Meeting, NothingToPack, Pair
from weight_update.update.updater import Updater
from weight_update.update.ways import Ends
from weight_update.weights.specs import TensorSpec, Weight

# The transfer gets most of an update's time, and all of this must fit into it.
_TRANSFER_SHARE = 0.8

_numbers = itertools.count(1)


def hand_over(exchange: Exchange) -> Delivery:
    """A delivery whose updates are refits of two sides.

    Args:
        exchange: What they do.
    """
    name = f"{type(exchange.generation).__name__}-{os.getpid()}-{next(_numbers)}"
    known = exchange.mode in get_args(PauseMode)
    keeps = getattr(exchange.generation, "kv_policy", None) == "keep"
    options = UpdateOptions(
        pause_mode=exchange.mode if known else "retract",
        backend="gloo",
        device="cpu",
        timeout=exchange.patience / _TRANSFER_SHARE,
        on_failure="hold" if exchange.holds else "resume",
        flush_cache_on_update=False if keeps else None,
        verify="off",
    )
    return Delivery([name], options, lambda chosen, _: _PairDeployment(exchange, chosen))


class _PairDeployment:
    """The deployment of two sides: one engine, and one way that carries nothing."""

    merges = False

    def __init__(self, exchange: Exchange, options: UpdateOptions) -> None:
        self._exchange, self._options = exchange, options
        self._pairs: list[Pair] = []
        self._meetings = itertools.count()

    def updater(self, urls: Sequence[str]) -> Updater:
        """The one updater."""
        ends = Ends(self._meet, lambda _: NothingToPack())
        return Updater(urls, self._open, {"request": ends}, self._options)

    def _meet(self, *_: Any) -> Meeting:
        return Meeting(self._exchange, next(self._meetings))

    def _open(self, name: str) -> Pair:
        self._pairs.append(Pair(name, self._exchange))
        return self._pairs[-1]

    def extract(self, source: Any) -> tuple[Weight, ...]:
        """One weight that stands for all that the policy sends; nobody reads it here."""
        for pair in self._pairs:
            pair.start(source)
        spec = TensorSpec("weights", torch.uint8, (_bytes_of(self._exchange.info),))
        return (Weight(spec, torch.device("cpu"), _unread),)

    def snapshot(self, source: Any) -> Any:
        """Not possible: the policy's weights are elsewhere."""
        raise ConfigurationError("the weights of a policy's workers are not here", phase="plan")

    def counted(self, urls: Sequence[str]) -> None:
        """Nothing was kept."""

    def close(self) -> None:
        """Nothing was written."""


def _unread() -> torch.Tensor:
    raise WeightUpdateError("the weights of a policy's workers are not here")


def _bytes_of(info: Any) -> int:
    """Bytes of what will be sent, as far as NeMo-RL's refit info tells: by name, shape and dtype.

    Example:
        >>> _bytes_of({"a": ((2, 3), torch.bfloat16)}), _bytes_of(None)
        (12, 0)
    """
    return sum(map(_size, info.values())) if isinstance(info, Mapping) else 0


def _size(entry: Any) -> int:
    try:
        shape, dtype = entry
        return int(prod(shape)) * int(dtype.itemsize)
    except (TypeError, ValueError, AttributeError):
        return 0
