"""Joining: the trainer and every engine meet in a fresh group, or an error says who did not."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future, wait

from weight_update.errors import ConfigurationError, UpdateTimeout, WeightUpdateError
from weight_update.update.fleet import Attempt, Fleet, Member, raise_first
from weight_update.update.protocols import Group
from weight_update.waiting import Deadline, spawn

_WATCH_SECONDS = 0.05
# A hung engine may come late; past this, a listener that nobody wants is not kept any longer.
_LINGER_SECONDS = 300.0
# How long an engine's own words are waited for once the trainer's join failed.
_CULPRIT_SECONDS = 0.5


def assign_ranks(fleet: Fleet, num_gpus: int | None, first: int = 1) -> int:
    """Gives every engine its rank offset; the trainer has the ranks before.

    Args:
        fleet: Inspected engines.
        num_gpus: Ranks of all engines together, if the caller knows; checked against theirs.
        first: The first engine's first rank.

    Returns:
        The world size.

    Raises:
        ConfigurationError: The number is wrong, or neither side knows it.
    """
    known = [member.engine.ranks for member in fleet.members]
    unknown = known.count(None)
    told = sum(ranks for ranks in known if ranks is not None)
    if num_gpus is not None and not unknown and num_gpus != told:
        layout = ", ".join(f"{m.url}: {m.engine.ranks}" for m in fleet.members)
        raise ConfigurationError(
            f"num_gpus={num_gpus}, but the servers run {told} rank(s) ({layout})",
            phase="connect",
            remedy="leave num_gpus=None to ask the servers",
        )
    share = _share(unknown, num_gpus, told) if unknown else 0
    offset = first
    for member, ranks in zip(fleet.members, known, strict=True):
        member.rank_offset, member.ranks = offset, share if ranks is None else ranks
        offset += member.ranks
    return offset


def _share(unknown: int, num_gpus: int | None, told: int) -> int:
    """Ranks of each engine that does not say how many it runs."""
    if num_gpus is None:
        raise ConfigurationError(
            f"{unknown} server(s) do not say how many ranks they run",
            phase="connect",
            remedy="set num_gpus=",
        )
    share, odd = divmod(num_gpus - told, unknown)
    if share < 1 or odd:
        raise ConfigurationError(
            f"num_gpus={num_gpus} less {told} known rank(s) does not divide among {unknown} "
            "server(s) that do not say how many they run",
            phase="connect",
        )
    return share


def join(
    fleet: Fleet, open_group: Callable[[], Group], world_size: int, deadline: Deadline
) -> Group:
    """Opens a group and has every engine join it.

    The engines' answers are watched while the trainer waits in the rendezvous, so a server
    that refuses costs no more than its answer takes.

    Raises:
        EngineRejected: An engine refused; the group was given up.
        UpdateTimeout: Somebody did not come; the text says where and who.
    """
    group = open_group()

    def invite(member: Member, _: Attempt) -> None:
        if not group.name:
            return
        member.engine.join(
            address=group.address,
            port=group.port,
            rank_offset=member.rank_offset,
            world_size=world_size,
            group_name=group.name,
            backend=group.backend,
            deadline=deadline,
        )

    fleet.start(invite)
    try:
        _watch(fleet, group, spawn(group.join), deadline)
    except BaseException:
        _dissolve(fleet, group)
        raise
    return group


def _dissolve(fleet: Fleet, group: Group) -> None:
    """Gives a half-made group up, in the background.

    An engine that was told of the rendezvous and finds nobody there tries for half an hour,
    and answers nothing meanwhile. So it stays up until every invited engine has come, or
    answered, or is given up; then closing it sends those away that wait in it. For those that
    may come later still, a decoy takes its place.
    """
    invited = [(m.call, _ranks_of(m)) for m in fleet.members if m.call is not None]

    def wait_then_close() -> None:
        _until(
            lambda: all(call.done() or all(map(group.arrived, ranks)) for call, ranks in invited)
        )
        late = [ranks for call, ranks in invited if _may_yet_come(call)]
        late = [ranks for ranks in late if not all(map(group.arrived, ranks))]
        group.give_up()
        leave(fleet, group)
        _turn_away(group, late)

    spawn(wait_then_close)


def _turn_away(group: Group, late: list[range]) -> None:
    """Meets engines that come when the rendezvous is over, so that they fail at once."""
    decoy = group.decoy() if late else None
    if decoy is None:
        return
    came = _until(lambda: any(all(map(decoy.arrived, ranks)) for ranks in late))
    later = [ranks for ranks in late if not all(map(decoy.arrived, ranks))]
    decoy.give_up()
    if came:
        _turn_away(decoy, later)


def _until(condition: Callable[[], bool]) -> bool:
    limit = Deadline(_LINGER_SECONDS)
    while not condition():
        if limit.expired():
            return False
        time.sleep(_WATCH_SECONDS)
    return True


def _may_yet_come(call: Future[None]) -> bool:
    """Whether the engine was only waited for in vain, and did not answer itself."""
    return not call.done() or _late(call)


def leave(fleet: Fleet, group: Group, seconds: float = 1.0) -> None:
    """Has every engine drop the group, all at once; what fails is of no consequence.

    Not those that may yet obey a request of it: SGLang up to 0.5.20 ends at one of a group that it
    has dropped.
    """
    if not group.name:
        return
    deadline = Deadline(seconds)
    settled = [member for member in fleet.members if group.name not in member.owing]
    calls = [spawn(member.engine.leave, group.name, deadline) for member in settled]
    wait(calls, timeout=deadline.remaining())


def _watch(fleet: Fleet, group: Group, joining: Future[None], deadline: Deadline) -> None:
    calls = fleet.calls()
    pending: set[Future[None]] = {joining, *calls}
    while pending:
        seconds = min(_WATCH_SECONDS, deadline.remaining())
        done, pending = wait(pending, timeout=seconds, return_when=FIRST_EXCEPTION)
        if joining.done() and joining.exception():
            done |= wait(calls, _CULPRIT_SECONDS, FIRST_EXCEPTION).done
        raise_first(call for call in calls if call in done and not _late(call))
        if any(map(_late, done - {joining})) or (pending and deadline.expired()):
            text = _who_is_missing(fleet, group, deadline)
            raise UpdateTimeout(text, phase="connect", engines=_missing(fleet, group))
        if joining.done():
            _joined(joining)


def _joined(joining: Future[None]) -> None:
    try:
        joining.result()
    except WeightUpdateError:
        raise
    except Exception as error:
        raise WeightUpdateError(
            f"Trainer process group init failed: {error}", phase="connect"
        ) from error


def _missing(fleet: Fleet, group: Group) -> list[str]:
    """Engines that did not come to the rendezvous, or else those that did and never said so."""
    late = [m for m in fleet.members if m.call is not None and _may_yet_come(m.call)]
    absent = [m for m in late if not all(map(group.arrived, _ranks_of(m)))]
    return [m.url for m in absent or late]


def _late(call: Future[None]) -> bool:
    return call.done() and isinstance(call.exception(), UpdateTimeout)


def _ranks_of(member: Member) -> range:
    return range(member.rank_offset, member.rank_offset + member.ranks)


def _who_is_missing(fleet: Fleet, group: Group, deadline: Deadline) -> str:
    late = [m.url for m in fleet.members if m.call is not None and _may_yet_come(m.call)]
    rank = group.missing_rank()
    waiting = f"; waiting for rank {rank}" if rank is not None else ""
    return (
        f"Trainer process group init timed out after {deadline.seconds:.0f} s: group "
        f"{group.name} at {group.address}:{group.port}; no answer from "
        f"{', '.join(late) or 'the trainer itself'}{waiting}"
    )
