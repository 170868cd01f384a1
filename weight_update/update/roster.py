"""The roster: which engines belong to the fleet, and what is seen of them between updates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait

from weight_update.errors import ConfigurationError, WeightUpdateError
from weight_update.facts import Sighting
from weight_update.report import EngineOutcome, EngineState
from weight_update.update.fleet import SILENT, Attempt, Fleet, Member, answers
from weight_update.update.protocols import Engine
from weight_update.update.versions import counts_on
from weight_update.waiting import Deadline, spawn

# How long an engine that failed is given to show that it is back.
_RETURN_SECONDS = 2.0
_PROBE_SECONDS = 0.3


class Roster:
    """The engines by URL; a router's place is taken by its workers.

    Args:
        urls: Engines, or routers in front of some.
        open_engine: Makes the engine at a URL; asks nothing yet.
    """

    def __init__(self, urls: Iterable[str], open_engine: Callable[[str], Engine]) -> None:
        self._open_engine = open_engine
        self._routers: dict[str, Engine] = {}
        self._behind: dict[str, str] = {}
        self.members = [Member(open_engine(url)) for url in urls]

    @property
    def urls(self) -> list[str]:
        """URLs of all engines."""
        return [member.url for member in self.members]

    def outcomes(self) -> dict[str, EngineOutcome]:
        """What is known of each engine, by URL."""
        return {member.url: member.outcome() for member in self.members}

    def add(self, url: str) -> None:
        """Adds an engine, or the router in front of some.

        Raises:
            ConfigurationError: It is in the fleet already.
        """
        if url in self.urls or url in self._routers:
            raise ConfigurationError("this engine is in the fleet already", engine=url)
        self.members.append(Member(self._open_engine(url)))

    def remove(self, url: str) -> list[Member]:
        """Takes an engine out, or a router with its workers; returns those taken out.

        Raises:
            ConfigurationError: It is not in the fleet, or is the last of it.
        """
        gone = [m for m in self.members if url in (m.url, self._behind.get(m.url))]
        if not gone:
            raise ConfigurationError(
                "no such engine in the fleet", engine=url, remedy=f"there are {self.urls}"
            )
        if url in self._behind:
            raise ConfigurationError(
                f"it is there because the router {self._behind[url]} names it",
                engine=url,
                remedy="take it out of the router, or remove the router and add its workers",
            )
        if len(gone) == len(self.members):
            raise ConfigurationError("the last engine of a fleet cannot be removed", engine=url)
        self._routers.pop(url, None)
        self._drop(gone)
        return gone

    def _drop(self, gone: Sequence[Member]) -> None:
        self.members = [member for member in self.members if member not in gone]
        for member in gone:
            self._behind.pop(member.url, None)

    # -- routers --------------------------------------------------------------------------

    @property
    def complete(self) -> bool:
        """Whether nobody needs to be asked who belongs to the fleet."""
        return not self._routers and all(m.known and not m.left_out for m in self.members)

    def discover(self, deadline: Deadline) -> None:
        """Asks engines never met whether they are routers, and known routers for workers.

        Raises:
            ConfigurationError: A router does not say which workers it has.
        """
        strangers = {m.url: m.engine for m in self.members if not m.known}
        asked = {**strangers, **self._routers}
        calls = {url: spawn(engine.workers, deadline) for url, engine in asked.items()}
        wait(calls.values(), timeout=deadline.remaining())
        for url, call in calls.items():
            workers = _answer_of(call) if call.done() else ()
            if workers:
                self._stand_for(url, asked[url], workers)

    def _stand_for(self, url: str, router: Engine, workers: Sequence[str]) -> None:
        self._routers[url] = router
        gone = [m for m in self.members if m.url == url or self._behind.get(m.url) == url]
        kept = [m for m in gone if m.url in workers]
        known = self.urls
        self._drop([m for m in gone if m not in kept])
        for worker in workers:
            if worker not in known:
                self.members.append(Member(self._open_engine(worker)))
            self._behind[worker] = url

    # -- looking --------------------------------------------------------------------------

    def look_for_the_lost(self, deadline: Deadline) -> None:
        """Takes engines that were left out back in, if they answer."""
        lost = [member for member in self.members if member.left_out]
        soon = deadline.at_most(_RETURN_SECONDS)
        calls = [(member, spawn(member.engine.label, soon)) for member in lost]
        wait([call for _, call in calls], timeout=soon.remaining() + _PROBE_SECONDS)
        for member, call in calls:
            member.left_out = not (call.done() and not isinstance(call.exception(), SILENT))
            if member.left_out:
                member.state, member.detail = EngineState.UNREACHABLE, "did not come back"

    def look(self, fleet: Fleet, deadline: Deadline) -> None:
        """Observes every engine: one that started anew lost all that it was given.

        Raises:
            WeightUpdateError: One did not answer.
        """
        sightings: dict[str, Sighting] = {}

        def observe(member: Member, _: Attempt) -> None:
            sightings[member.url] = member.engine.observe(deadline)

        try:
            fleet.each("plan", observe, deadline)
        finally:
            # One that fails ends the step for all; what others are just about to show counts too.
            wait(fleet.calls(), timeout=_PROBE_SECONDS)
            for member in fleet.members:
                if member.url in sightings:
                    _take_note(member, sightings[member.url])

    def meet(self, fleet: Fleet, deadline: Deadline) -> None:
        """Inspects the engines that were not inspected since they started.

        Raises:
            WeightUpdateError: One cannot take updates, or did not answer.
        """
        strangers = Fleet(member for member in fleet.members if not member.met)

        def inspect(member: Member, _: Attempt) -> None:
            member.engine.inspect(deadline)
            member.met = member.known = True

        strangers.each("connect", inspect, deadline)

    def note_the_dead(self) -> None:
        """After a failure before the pause: tells which engines are lost, or started anew."""
        failed = [m for m in self.members if m.call is not None and not m.answered_well]
        looks = [(member, spawn(_presence, member.engine)) for member in failed]
        wait([look for _, look in looks], timeout=2 * _PROBE_SECONDS)
        for member, look in looks:
            seen = look.result() if look.done() else None
            if isinstance(seen, Sighting):
                _take_note(member, seen)
            elif seen is None:
                member.state = EngineState.UNREACHABLE
                member.detail = member.detail or _words_of(member)


def _words_of(member: Member) -> str:
    call = member.call
    error = call.exception() if call is not None and call.done() else None
    return str(getattr(error, "message", "")) or "no answer"


def _presence(engine: Engine) -> Sighting | bool | None:
    """What an engine shows; True if it is only slow or says no; None if it is lost."""
    try:
        return engine.observe(Deadline(_PROBE_SECONDS))
    except WeightUpdateError:
        return answers(engine, Deadline(_PROBE_SECONDS)) or None


def _answer_of(call: Future[tuple[str, ...]]) -> tuple[str, ...]:
    """A router's workers; whoever does not answer is asked again when it is inspected."""
    try:
        return call.result()
    except ConfigurationError:
        raise
    except WeightUpdateError:
        return ()


def _take_note(member: Member, seen: Sighting) -> None:
    if _started_anew(member, seen):
        member.forget()
    elif member.label not in (None, seen.label) and seen.ready is not False:
        member.healed_by_another()
    if seen.ungrouped:
        member.incarnation += 1
    member.label, member.instance = seen.label, seen.instance or member.instance
    somebodys = member.found_paused or not member.maybe_paused
    member.found_paused = seen.ready is False and somebodys


def _started_anew(member: Member, seen: Sighting) -> bool:
    """Another instance, or a label that went back; one that went on is another trainer's."""
    if member.is_another(seen):
        return True
    known = None not in (seen.instance, member.instance)
    went_on = known and counts_on(member.label, seen.label)
    return member.label not in (None, seen.label) and not went_on
