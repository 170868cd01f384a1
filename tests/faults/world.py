"""A world inside the process: engines that hold weights and a cache, and a clock of its own.

An engine here is a model of a real one, not a recorder of calls: what it generates follows from
what was done to it. So a test asks the engine what it serves and compares that with the report.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

import torch

from weight_update.errors import Applied, EngineRejected, EngineUnreachable, UpdateTimeout
from weight_update.facts import Digests, Intake, NameCheck, Part, Sighting
from weight_update.options import UpdateOptions
from weight_update.report import ProgressHook, UpdateReport
from weight_update.update.planning import Payload
from weight_update.update.push import Push
from weight_update.update.updater import Updater
from weight_update.update.ways import Ends
from weight_update.waiting import Clock, Deadline
from weight_update.weights.buckets import Bucket
from weight_update.weights.cargo import Cargo, Format
from weight_update.weights.extract import extract_weights

NAMES = tuple("abcdefgh")
BUCKETS = 4
BASE = 0.0  # the value of every weight of an engine that has just started
TIMEOUT = 100.0

Proof = Literal["none", "described", "twins", "sample"]
Kind = Literal[
    "refuse",
    "refuse_late",
    "refuse_partly",
    "refuse_all",
    "refuse_unknown",
    "reset",
    "reset_late",
    "hang",
    "hang_late",
    "slow",
    "killed",
    "stopped",
    "restarted",
    "restarted_reset",
    "lie",
]

_instances = itertools.count()


@dataclass(frozen=True)
class Strike:
    """One misbehaviour of one engine.

    Attributes:
        call: The call that it strikes.
        kind: ``*_late`` strikes after the call took effect; ``refuse_partly``, ``refuse_all``
            and ``refuse_unknown`` say how much of a bucket was loaded; ``killed`` and
            ``stopped`` last until somebody restarts or wakes the engine; ``restarted`` has a
            fresh process handle the call, ``restarted_reset`` lose it; ``lie`` says yes and does
            nothing.
        after: Calls that pass unharmed first.
    """

    call: str
    kind: Kind
    after: int = 0


class VirtualTime:
    """Seconds that pass when somebody says so."""

    def __init__(self, *, threads: bool = False) -> None:
        self._now = 0.0
        self._threads = threads
        self.clock = Clock(now=lambda: self._now, sleep=self.advance)

    @property
    def now(self) -> float:
        """Seconds since the world began."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Lets time pass; other threads get a moment first, as they would in real time."""
        if self._threads:
            time.sleep(0.002)
        self._now += seconds

    def run_out(self, deadline: Deadline) -> None:
        """Lets the time until a deadline pass."""
        self.advance(deadline.remaining())


@cache
def value_of(tag: float) -> torch.Tensor:
    """The value that every weight of one version has."""
    return torch.full((2,), tag)


@cache
def _digest(tag: float) -> str:
    return hashlib.sha256(value_of(tag).numpy().tobytes()).hexdigest()


class ModelEngine:
    """An engine with weights, a prefix cache, a session, a pause flag and a label.

    Args:
        url: Its name.
        time_: The world's time.
        groups: The groups of the world by name.
        proof: What it can prove: nothing, digests that say what they are of, digests that
            compare with those of others only, or the values of single weights.
        tag: The version whose weights it starts with.
    """

    harmless_name = "none"
    flush_skipped = "Skipping the SGLang radix-cache flush"
    salts_prefixes = True
    ends_without_group = False

    def __init__(
        self, url: str, time_: VirtualTime, groups: dict[str, WorldGroup], proof: Proof = "none"
    ) -> None:
        self.url = url
        self.proof = proof
        self.alive, self.stopped = True, False
        self.strikes: list[list[Any]] = []
        self.struck = 0
        self.calls: list[str] = []
        self.lied: set[str] = set()
        self._time = time_
        self._groups = groups
        self._queue: list[Callable[[], object]] = []
        self._state = threading.RLock()
        self._begin_anew()

    def _begin_anew(self) -> None:
        self.weights = dict.fromkeys(NAMES, BASE)
        self.cached = {self.fingerprint}
        self.session_open = self.paused = False
        self.groups_joined: set[str] = set()
        self.label_shown = "default"
        self.instance = f"start {next(_instances)}"
        self._queue.clear()

    # -- what a test asks and does ------------------------------------------------------

    @property
    def fingerprint(self) -> tuple[float, ...]:
        """Which version each weight is of."""
        return tuple(self.weights[name] for name in NAMES)

    @property
    def answers(self) -> bool:
        """Whether anybody is at home."""
        return self.alive and not self.stopped

    @property
    def generates(self) -> bool:
        """Whether a request would be served now."""
        return self.answers and not self.paused

    @property
    def stale(self) -> bool:
        """Whether a prefix that other weights computed could be served."""
        return bool(self.cached - {self.fingerprint})

    def serve(self) -> None:
        """Handles some traffic, which fills the cache."""
        if self.generates:
            self.cached.add(self.fingerprint)

    def arm(self, strike: Strike) -> None:
        """Has a fault strike once."""
        self.strikes.append([strike, strike.after])

    def kill(self) -> None:
        """The process ends."""
        with self._state:
            self.alive = False

    def restart(self) -> None:
        """A new process takes its place: base weights, no group, no session, another instance."""
        with self._state:
            self.alive, self.stopped = True, False
            self._begin_anew()

    def stop(self) -> None:
        """The process is stopped (SIGSTOP)."""
        self.stopped = True

    def wake(self) -> None:
        """It goes on, and handles the requests that nobody waits for any more."""
        with self._state:
            self.stopped = False
            waiting, self._queue = self._queue, []
            for effect in waiting:
                with suppress(EngineRejected):
                    effect()

    def bring_back(self) -> None:
        """Whatever is wrong with the process is put right; armed faults are gone."""
        self.strikes.clear()
        if not self.alive:
            self.restart()
        if self.stopped:
            self.wake()

    # -- calls --------------------------------------------------------------------------

    def _refused(self, words: str, applied: Applied = "nothing") -> EngineRejected:
        error = EngineRejected(words, engine=self.url, phase="transfer")
        error.applied = applied
        return error

    def _gone(self) -> EngineUnreachable:
        return EngineUnreachable("connection reset", engine=self.url, phase="transfer")

    def _late(self, deadline: Deadline) -> UpdateTimeout:
        self._time.run_out(deadline)
        return UpdateTimeout("no answer", engine=self.url, phase="transfer")

    def _due(self, call: str) -> Kind | None:
        for entry in self.strikes:
            if entry[0].call == call:
                entry[1] -= 1
                if entry[1] < 0:
                    self.strikes.remove(entry)
                    self.struck += 1
                    return entry[0].kind  # type: ignore[no-any-return]
        return None

    def _request(
        self,
        call: str,
        deadline: Deadline,
        effect: Callable[[], Any] = lambda: None,
        partial: Callable[[], None] = lambda: None,
    ) -> Any:
        """One request: handled, unless the process is gone or a fault strikes."""
        self.calls.append(call)
        kind = self._due(call)
        if kind == "killed":
            self.kill()
        elif kind == "stopped":
            self.stop()
        elif kind in ("restarted", "restarted_reset"):
            self.restart()
        if not self.alive or kind in ("reset", "restarted_reset"):
            raise self._gone()
        if self.stopped:
            self._queue.append(effect)
            raise self._late(deadline)
        return self._misbehave(kind, call, deadline, effect, partial)

    def _misbehave(
        self,
        kind: Kind | None,
        call: str,
        deadline: Deadline,
        effect: Callable[[], Any],
        partial: Callable[[], None],
    ) -> Any:
        if kind == "refuse":
            raise self._refused("no thanks")
        if kind == "hang":
            raise self._late(deadline)
        if kind == "lie":
            self.lied.add(call)
            return None
        if kind == "refuse_partly":
            with self._state:
                partial()
            raise self._refused("the model is partially updated", "partly")
        if kind == "slow":
            self._time.advance(0.2 * deadline.remaining())
        with self._state:
            answer = effect()
        if kind in ("refuse_late", "refuse_unknown"):
            raise self._refused("torn", "unknown")
        if kind == "refuse_all":
            raise self._refused("weights were updated, but the cache was not flushed", "all")
        if kind == "reset_late":
            raise self._gone()
        if kind == "hang_late":
            raise self._late(deadline)
        return answer

    # -- the Engine protocol ------------------------------------------------------------

    @property
    def ranks(self) -> int:
        return 1

    @property
    def layout(self) -> str | None:
        return "equal" if self.proof == "twins" else None

    def inspect(self, deadline: Deadline) -> None:
        self._request("inspect", deadline)

    def objection(self, mode: str) -> str | None:
        return None

    intake = Intake()

    def workers(self, deadline: Deadline) -> tuple[str, ...]:
        return ()

    def observe(self, deadline: Deadline, *, readiness: bool = True) -> Sighting:
        def look() -> Sighting:
            return Sighting(self.label_shown, not self.paused, self.instance)

        seen = self._request("observe", deadline, look)
        return seen if seen is not None else Sighting()

    def label(self, deadline: Deadline) -> str | None:
        return self._request("label", deadline, lambda: self.label_shown)  # type: ignore[no-any-return]

    def check_names(self, names: Sequence[str], deadline: Deadline) -> NameCheck:
        return NameCheck()

    def digests(self, deadline: Deadline) -> Digests | None:
        if self.proof not in ("described", "twins"):
            return None
        return self._request("prove", deadline, self._make_digests)  # type: ignore[no-any-return]

    def _make_digests(self) -> Digests:
        held = {name: _digest(tag) for name, tag in self.weights.items()}
        if self.proof == "twins":
            return Digests((held,))
        return Digests((held,), (dict.fromkeys(NAMES, Part()),), "float32")

    def first_values(self, name: str, deadline: Deadline) -> tuple[float, ...] | None:
        if self.proof != "sample":
            return None

        def read() -> tuple[float, ...] | None:
            return (self.weights[name],) * 2 if name in self.weights else None

        return self._request("prove", deadline, read)  # type: ignore[no-any-return]

    def join(
        self, *, group_name: str, rank_offset: int, deadline: Deadline, **arguments: Any
    ) -> None:
        def effect() -> None:
            self.groups_joined.add(group_name)
            group = self._groups[group_name]
            group.peers[self.url] = (self, self.instance)
            group.ranks.add(rank_offset)

        self._request("join", deadline, effect)

    def leave(self, group_name: str, deadline: Deadline) -> None:
        self._request("leave", deadline, lambda: self.groups_joined.discard(group_name))

    def pause(self, mode: str, deadline: Deadline, *, again: bool) -> None:
        self._request("pause", deadline, lambda: self._set_paused(True))

    def resume(self, deadline: Deadline) -> None:
        self._request("resume", deadline, lambda: self._set_paused(False))

    def _set_paused(self, paused: bool) -> None:
        self.paused = paused
        self.serve()

    def drain(self, mode: str, deadline: Deadline) -> None:
        self._request("drain", deadline)

    def can_flush(self, mode: str) -> bool:
        return mode != "in_place"

    def flushes_with_update(self, mode: str) -> bool:
        return mode == "abort"

    def flush(self, deadline: Deadline) -> None:
        self._request("flush", deadline, self._drop_cache)

    def flush_once(self, deadline: Deadline) -> bool:
        self._request("flush", deadline, self._drop_cache)
        return True

    def _drop_cache(self) -> None:
        self.cached = set()
        self.serve()

    def stamp(self, label: str, deadline: Deadline) -> None:
        def effect() -> None:
            self.label_shown = label

        self._request("stamp", deadline, effect)

    def session(self, way: Any) -> ModelSession:
        return ModelSession(self)

    def close(self) -> None:
        self.calls.append("close")


class ModelSession:
    """One update of a :class:`ModelEngine`."""

    def __init__(self, engine: ModelEngine) -> None:
        self._engine = engine

    def open(self, deadline: Deadline) -> bool:
        engine = self._engine

        def effect() -> bool:
            left, engine.session_open = engine.session_open, True
            return left

        return bool(engine._request("begin", deadline, effect))

    def apply(
        self, bucket: Bucket, cargo: Any, *, group_name: str, flush: bool, deadline: Deadline
    ) -> None:
        names = [spec.name for spec in bucket.specs]

        def load(some: Sequence[str]) -> None:
            self._refuse(group_name)
            values = {weight.spec.name: float(weight.read()[0]) for weight in bucket.weights}
            self._engine.weights.update({name: values[name] for name in some})

        def effect() -> None:
            load(names)
            if flush:
                self._engine._drop_cache()

        self._engine._request("apply", deadline, effect, lambda: load(names[:1]))

    def _refuse(self, group_name: str) -> None:
        engine = self._engine
        if not engine.session_open:
            raise engine._refused("no weight-update session is open")
        if group_name not in engine.groups_joined:
            raise engine._refused("Failed to receive weights: unknown group")
        if engine._groups[group_name].broken:
            raise engine._refused("Failed to receive weights: connection closed by peer")

    def close(self, deadline: Deadline) -> None:
        engine = self._engine

        def effect() -> None:
            if not engine.session_open:
                raise engine._refused("no weight-update session is open")
            engine.session_open = False

        engine._request("end", deadline, effect)

    def recover(self, deadline: Deadline) -> None:
        def effect() -> None:
            self._engine.session_open = False

        self._engine._request("recover", deadline, effect)


class WorldGroup:
    """A group that breaks when one of its peers does."""

    address, port, backend = "127.0.0.1", 1, "gloo"
    device = torch.device("cpu")

    def __init__(self, name: str) -> None:
        self.name = name
        self.given_up = False
        self.peers: dict[str, tuple[ModelEngine, str]] = {}
        self.ranks: set[int] = set()

    @property
    def broken(self) -> bool:
        """Whether bytes can no longer arrive."""
        gone = any(not e.alive or e.instance != start for e, start in self.peers.values())
        return gone or self.given_up

    def join(self) -> None:
        pass

    def arrived(self, rank: int) -> bool:
        return rank in self.ranks

    def decoy(self) -> None:
        return None

    def missing_rank(self) -> int | None:
        return None

    def broadcast(self, tensors: list[torch.Tensor]) -> None:
        pass

    def moving(self) -> bool:
        return False

    def give_up(self) -> None:
        self.given_up = True


class WorldPacker:
    """Packs nothing: model engines read the weights of a bucket themselves."""

    def format(self, specs: Any, terms: Any) -> Format:
        return Format(terms.bucket_bytes or 1 << 30, lambda _: True)

    def reserve(self, plan: Any) -> None:
        pass

    def objections(self, plan: Any) -> list[str]:
        return []

    def abandon(self) -> None:
        pass

    def pack(self, bucket: Bucket) -> Cargo:
        return Cargo()


@dataclass
class World:
    """Engines, a trainer, and what it counted.

    Attributes:
        size: Engines at the start.
        proof: What they can prove.
        threads: Whether calls run in threads of their own, as they do in earnest.
        options: Of the update.
    """

    size: int = 1
    proof: Proof = "none"
    threads: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.time = VirtualTime(threads=self.threads)
        self.groups: dict[str, WorldGroup] = {}
        self.engines: dict[str, ModelEngine] = {}
        self.counted: list[int] = []
        self.wholes = {(BASE,) * len(NAMES)}
        self.updater = self.make_updater([self.make_engine().url for _ in range(self.size)])

    def make_engine(self) -> ModelEngine:
        """One more engine; no fleet holds it yet."""
        url = f"http://engine{len(self.engines)}:1"
        self.engines[url] = ModelEngine(url, self.time, self.groups, self.proof)
        return self.engines[url]

    def make_updater(self, urls: Sequence[str]) -> Updater:
        """A trainer's updater for some of the engines."""
        options = UpdateOptions(bucket_bytes=16, **{"timeout": TIMEOUT, **self.options})
        return Updater(
            list(urls),
            self.engines.__getitem__,
            {"broadcast": Ends(self._open_group, lambda device: WorldPacker())},
            options,
            self.time.clock,
        )

    def _open_group(self, *arguments: Any) -> WorldGroup:
        name = f"group {len(self.groups)}"
        self.groups[name] = WorldGroup(name)
        return self.groups[name]

    @property
    def fleet(self) -> list[ModelEngine]:
        """The engines of the updater's fleet, in its order."""
        return [self.engines[url] for url in self.updater.roster.urls]

    def push(
        self,
        tag: float,
        names: Sequence[str] = NAMES,
        *,
        whole: bool = True,
        updater: Updater | None = None,
        progress: ProgressHook | None = None,
    ) -> UpdateReport:
        """Brings the weights of one version, or some of them."""

        def count(version: int) -> list[str]:
            self.counted.append(version)
            return []

        self._note_wholes(tag, names)
        tensors = {name: value_of(tag) for name in names}
        weights = extract_weights(tensors)
        push = Push(lambda: Payload(weights, whole=whole), count, progress=progress)
        return (updater or self.updater).update(push)

    def _note_wholes(self, tag: float, names: Sequence[str]) -> None:
        """What an engine may hold once the push is through: what it held, and all of the push."""
        held = [dict(zip(NAMES, each, strict=True)) for each in list(self.wholes)]  # threads push
        for weights in [*held, *(dict(e.weights) for e in self.engines.values() if self.sane(e))]:
            new = {**weights, **dict.fromkeys(names, tag)}
            self.wholes.add(tuple(new[name] for name in NAMES))

    def sane(self, engine: ModelEngine) -> bool:
        """Whether its weights are what some update, or none, brought as a whole."""
        return engine.fingerprint in self.wholes
