"""Who brings the weights: a delivery that reads them here, or two sides that hand them over."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol, TypeGuard

import torch
from torch import nn

from weight_update.delivery.delivery import Delivery
from weight_update.delivery.ranks import leads
from weight_update.errors import ConfigurationError
from weight_update.report import UpdateReport
from weight_update.synchronizers.buffer_size import explicit_bytes, share_of
from weight_update.synchronizers.exchange import Exchange, Refit
from weight_update.synchronizers.hand_over import hand_over
from weight_update.synchronizers.membership import present_shards
from weight_update.synchronizers.protocols import (
    Generation,
    Policy,
    ReachableGeneration,
    ReadablePolicy,
)
from weight_update.synchronizers.resolve import asked
from weight_update.weights.extract import device_of

Free = Callable[[], int]
Scales = Mapping[str, float]


class Carrier(Protocol):
    """Brings a policy's weights to a generation.

    Attributes:
        delivery: Runs the updates.
    """

    delivery: Delivery

    def announce(self) -> None:
        """Tells the generation what will come."""

    def connect(self) -> None:
        """Makes the group; one that exists is given up."""

    def check(self) -> None:
        """Raises what speaks against a refit; called before any phase starts."""

    def together(self, step: Callable[[], object]) -> None:
        """Runs a step on every rank of the trainer, and ends when all have ended, alike on all."""

    def recover(self) -> None:
        """Has the generation replace what died, if it does such."""

    def choose(self, absent_shards: Iterable[int], *, force: bool) -> bool:
        """Says which engines the group is to span; whether it has to be made anew."""

    def push(self, gigabytes: float | None, free: Free, scales: Scales | None) -> UpdateReport:
        """Runs one update.

        Args:
            gigabytes: Size of a buffer; None takes a share of what is free.
            free: Asks what the policy has free for a buffer.
            scales: Scales of an fp8 KV cache.
        """


class Reading:
    """Facades of ours: the policy's weights are read here, and a delivery brings them.

    Args:
        policy: The trainer.
        generation: The engines.
        colocated: Whether they share their devices.
        timeout_s: Seconds for one update; None leaves it to the generation.
    """

    def __init__(
        self,
        policy: ReadablePolicy,
        generation: ReachableGeneration,
        *,
        colocated: bool,
        timeout_s: float | None,
    ) -> None:
        self._policy, self._generation = policy, generation
        self.delivery = generation.delivery(colocated=colocated, timeout_s=timeout_s, policy=policy)
        self._urls = tuple(generation.urls)
        # Where engines share the device, the size is that of all it costs there: two buckets,
        # one of which is filled while the other is read.
        self._buckets = 2 if colocated else 1
        self._due = False

    def announce(self) -> None:
        """Tells the generation what will come."""
        self._generation.prepare_refit_info(self._policy.prepare_refit_info())

    def connect(self) -> None:
        """Makes the group of all engines that take part, on the rank that talks to them."""
        self.together(self._connect)
        self._due = False

    def _connect(self) -> None:
        source = self._policy.source()
        if leads(lambda: source):
            # A trainer on the CPU of a host with GPUs is met on the CPU.
            self.delivery.connect(device_of(source) if isinstance(source, nn.Module) else None)

    def check(self) -> None:
        """Nothing: the update objects before it pauses anything."""

    def together(self, step: Callable[[], object]) -> None:
        """Runs a step on every rank that takes part in updates.

        Memory of a GPU is free when all of its ranks have made room, and a rank that fails does
        so on all: nobody waits for one that does not come any more.
        """
        self.delivery.together(lambda: asked("policy.source()", self._policy.source), step)

    def recover(self) -> None:
        """Nothing: the update takes restarted engines back by itself."""

    def choose(self, absent_shards: Iterable[int], *, force: bool) -> bool:
        """Takes engines out that are absent, and those back that are not any more."""
        urls = self._urls
        wanted = [urls[shard] for shard in present_shards(absent_shards, len(urls))]
        known = set(self.delivery.engines)
        for url in (url for url in wanted if url not in known):
            self.delivery.add_engine(url)
        for url in known - set(wanted):
            self.delivery.remove_engine(url)
        self._due |= force or known != set(wanted)
        return self._due

    def push(self, gigabytes: float | None, free: Free, scales: Scales | None) -> UpdateReport:
        """Runs one update; a share of what is free only limits the buckets that are chosen."""
        return self.delivery.update(
            self._policy.source,
            whole=True,
            bucket_bytes=self._part(explicit_bytes(gigabytes)) if gigabytes is not None else None,
            bucket_limit=self._part(share_of(free())) if gigabytes is None else None,
            extra={name: torch.tensor([scale]) for name, scale in (scales or {}).items()},
        )

    def _part(self, buffer_bytes: int) -> int:
        return max(1, buffer_bytes // self._buckets)


class HandingOver:
    """NeMo-RL's own objects, which send and receive by themselves.

    Args:
        exchange: What they do.

    Raises:
        ConfigurationError: They cannot do it.
    """

    def __init__(self, exchange: Exchange) -> None:
        _refuse_misfits(exchange)
        self._exchange = exchange
        self.delivery = hand_over(exchange)

    def announce(self) -> None:
        """Tells the generation what will come."""
        self._exchange.announce()

    def connect(self) -> None:
        """Has both sides connect."""
        self.delivery.connect()

    def check(self) -> None:
        """Raises what speaks against a refit."""
        self._exchange.check()

    def together(self, step: Callable[[], object]) -> None:
        """Runs a step: this is the driver of all workers."""
        step()

    def recover(self) -> None:
        """Has the generation replace what died."""
        asked("recover_updatable_engines()", self._exchange.recover)

    def choose(self, absent_shards: Iterable[int], *, force: bool) -> bool:
        """Says which engines the group is to span."""
        return self._exchange.choose(absent_shards, force=force)

    def push(self, gigabytes: float | None, free: Free, scales: Scales | None) -> UpdateReport:
        """Runs one refit."""
        size = 0
        if self._exchange.takes_buffer:
            size = share_of(free()) if gigabytes is None else explicit_bytes(gigabytes)
        return self.delivery.update(lambda: Refit(size, scales), whole=True)


def is_readable(policy: Policy) -> TypeGuard[ReadablePolicy]:
    """Whether a policy's weights can be read here."""
    return _has(policy, "source")


def is_reachable(generation: Generation) -> TypeGuard[ReachableGeneration]:
    """Whether a generation's engines can be spoken to from here."""
    return _has(generation, "delivery")


def _has(side: object, method: str) -> bool:
    # A class tells, and not an object: a mock has whatever it is asked for.
    return callable(getattr(type(side), method, None))


def _refuse_misfits(exchange: Exchange) -> None:
    for side, method in (
        (exchange.policy, exchange.sends),
        (exchange.generation, exchange.receives),
    ):
        if method and not callable(getattr(side, method, None)):
            raise ConfigurationError(
                f"{type(exchange.policy).__name__} and {type(exchange.generation).__name__} do "
                f"not fit together: a {type(side).__name__} has no {method}()",
                remedy="use TorchPolicy(model) with SGLangGeneration or VLLMGeneration, or "
                "NeMo-RL's policy with its own generation",
            )
