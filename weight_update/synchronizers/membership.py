"""Which engines a collective spans, and at which ranks: plain arithmetic."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from weight_update.errors import ConfigurationError, WeightUpdateError


class NoSurvivingShards(WeightUpdateError):
    """Every engine is gone: there is nobody to bring weights to."""


@dataclass(frozen=True)
class RefitMembership:
    """Where each engine that is left sits in the group.

    Trainers keep the first ranks, so that rank 0, which sends, never changes.

    Attributes:
        world_size: All ranks, the trainer's and those of the engines that are left.
        train_world_size: The trainer's ranks.
        shard_prefixes: By number of an engine, its first rank after the trainer's. There are no
            gaps: an engine takes what is sent to the rank that it sits at.
        workers_per_shard: Ranks of one engine.
    """

    world_size: int
    train_world_size: int
    shard_prefixes: dict[int, int]
    workers_per_shard: int

    @property
    def surviving_shards(self) -> list[int]:
        """Numbers of the engines that are left, in order."""
        return list(self.shard_prefixes)


def plan_refit_membership(
    *,
    surviving_shards: Iterable[int],
    dp_size: int,
    total_gen_workers: int,
    train_world_size: int,
) -> RefitMembership:
    """Gives the engines that are left contiguous ranks, in the order of their numbers.

    Args:
        surviving_shards: Numbers of the engines that take part.
        dp_size: How many engines the fleet has.
        total_gen_workers: Ranks of the whole fleet.
        train_world_size: Ranks of the trainer.

    Raises:
        NoSurvivingShards: None is left.
        ConfigurationError: Engines are of different sizes, or one is not of the fleet.

    Example:
        >>> plan = plan_refit_membership(
        ...     surviving_shards=[2, 0], dp_size=3, total_gen_workers=6, train_world_size=4)
        >>> plan.world_size, plan.shard_prefixes
        (8, {0: 0, 2: 2})
    """
    workers = _workers_of_each(dp_size, total_gen_workers)
    if train_world_size < 1:
        raise ConfigurationError(f"train_world_size={train_world_size} must be above zero")
    surviving = _of_fleet(surviving_shards, dp_size)
    _refuse_none(surviving, dp_size)
    return RefitMembership(
        world_size=train_world_size + len(surviving) * workers,
        train_world_size=train_world_size,
        shard_prefixes={shard: place * workers for place, shard in enumerate(surviving)},
        workers_per_shard=workers,
    )


def present_shards(absent_shards: Iterable[int], dp_size: int) -> list[int]:
    """Numbers of the engines of a fleet that are not absent.

    Raises:
        ConfigurationError: An absent one is not of the fleet.
        NoSurvivingShards: None is left.

    Example:
        >>> present_shards([1], dp_size=3)
        [0, 2]
    """
    absent = _of_fleet(absent_shards, dp_size)
    left = [shard for shard in range(dp_size) if shard not in absent]
    _refuse_none(left, dp_size)
    return left


def _of_fleet(shards: Iterable[int], dp_size: int) -> list[int]:
    """Each shard once, in order; raises if one is not of the fleet."""
    known = sorted(set(shards))
    unknown = [shard for shard in known if not 0 <= shard < dp_size]
    if unknown:
        raise ConfigurationError(f"the fleet has shards 0 to {dp_size - 1}, and not {unknown}")
    return known


def _refuse_none(left: Sequence[int], dp_size: int) -> None:
    if not left:
        raise NoSurvivingShards(
            f"none of {dp_size} shard(s) is left to bring weights to",
            phase="connect",
            remedy="restart an engine, and name it as present",
        )


def _workers_of_each(dp_size: int, total_gen_workers: int) -> int:
    if dp_size < 1:
        raise ConfigurationError(f"dp_size={dp_size} must be above zero")
    workers, odd = divmod(total_gen_workers, dp_size)
    if odd or workers < 1:
        raise ConfigurationError(
            f"{total_gen_workers} workers do not divide evenly among {dp_size} shard(s)"
        )
    return workers
