"""Engines and a group inside the process: every call is recorded and can be told to fail."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from weight_update.errors import EngineRejected, EngineUnreachable, UpdateTimeout
from weight_update.facts import Digests, Intake, NameCheck, Sighting
from weight_update.options import UpdateOptions
from weight_update.update.planning import Payload
from weight_update.update.push import Push
from weight_update.update.updater import Updater
from weight_update.update.ways import Ends
from weight_update.waiting import Deadline
from weight_update.weights.buckets import Bucket
from weight_update.weights.cargo import Cargo, Format
from weight_update.weights.extract import extract_weights


def refused(url: str, applied: Any = "nothing") -> EngineRejected:
    error = EngineRejected("refused", engine=url, phase="transfer")
    error.applied = applied
    return error


FAULTS: dict[str, Callable[[str], Exception]] = {
    "refuse": refused,
    "partial": lambda url: refused(url, "partly"),
    "reset": lambda url: EngineUnreachable("reset", engine=url, phase="transfer"),
    "late": lambda url: UpdateTimeout("no answer", engine=url, phase="transfer"),
    "bug": lambda url: ZeroDivisionError("a bug"),
}


@dataclass
class FakeEngine:
    """Holds a version per bucket, as an engine that applies what it confirms."""

    url: str
    ranks: int | None = 1
    harmless_name: str = "none"
    flush_skipped: str = "Skipping the SGLang radix-cache flush"
    shown: str | None = "default"
    paused: bool = False
    open: bool = False
    dead: bool = False
    buckets: list[str] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    faults: dict[str, list[Exception | None]] = field(default_factory=dict)
    can: bool = True
    salts_prefixes: bool = True
    ends_without_group: bool = False
    layout: str | None = None
    instance: str = "first"

    def fail(self, call: str, fault: str, *, after: int = 0) -> None:
        """Makes the call after `after` good ones fail once."""
        self.faults[call] = [*[None] * after, FAULTS[fault](self.url)]

    def _enter(self, call: str) -> None:
        self.calls.append(call)
        if self.dead:
            raise EngineUnreachable("dead", engine=self.url, phase="transfer")
        planned = self.faults.get(call)
        error = planned.pop(0) if planned else None
        if error is not None:
            raise error

    def inspect(self, deadline: Deadline) -> None:
        self._enter("inspect")

    def objection(self, mode: str) -> str | None:
        return None

    intake = Intake()

    def workers(self, deadline: Deadline) -> tuple[str, ...]:
        return ()

    def observe(self, deadline: Deadline, *, readiness: bool = True) -> Sighting:
        self._enter("observe")
        return Sighting(self.shown, not self.paused, self.instance)

    def label(self, deadline: Deadline) -> str | None:
        self._enter("label")
        return self.shown

    def check_names(self, names: Sequence[str], deadline: Deadline) -> NameCheck:
        return NameCheck()

    def digests(self, deadline: Deadline) -> Digests | None:
        return None

    def first_values(self, name: str, deadline: Deadline) -> tuple[float, ...] | None:
        return None

    def join(self, **arguments: Any) -> None:
        self._enter("join")

    def leave(self, group_name: str, deadline: Deadline) -> None:
        self._enter("leave")

    def pause(self, mode: str, deadline: Deadline, *, again: bool) -> None:
        self.paused = True  # a pause whose answer is lost may have taken effect
        self._enter("pause")

    def drain(self, mode: str, deadline: Deadline) -> None:
        self._enter("drain")

    def resume(self, deadline: Deadline) -> None:
        self._enter("resume")
        self.paused = False

    def can_flush(self, mode: str) -> bool:
        return self.can

    def flushes_with_update(self, mode: str) -> bool:
        return False

    def flush(self, deadline: Deadline) -> None:
        self._enter("flush")

    def flush_once(self, deadline: Deadline) -> bool:
        return True

    def stamp(self, label: str, deadline: Deadline) -> None:
        self._enter("stamp")
        self.shown = label

    def session(self, way: Any) -> FakeSession:
        return FakeSession(self)

    def close(self) -> None:
        self.calls.append("close")


class FakeSession:
    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine

    def open(self, deadline: Deadline) -> bool:
        self._engine._enter("begin")
        left, self._engine.open = self._engine.open, True
        return left

    def apply(self, bucket: Bucket, cargo: Any, **arguments: Any) -> None:
        self._engine._enter("apply")
        self._engine.buckets += [spec.name for spec in bucket.specs[:1]]

    def close(self, deadline: Deadline) -> None:
        self._engine._enter("end")
        self._engine.open = False

    def recover(self, deadline: Deadline) -> None:
        self._engine._enter("recover")
        self._engine.open = False


class FakeGroup:
    name, address, port, backend = "group", "127.0.0.1", 1, "gloo"
    device = torch.device("cpu")

    def __init__(self) -> None:
        self.given_up = False
        self.stuck = threading.Event()

    def join(self) -> None:
        pass

    def arrived(self, rank: int) -> bool:
        return True

    def decoy(self) -> None:
        return None

    def missing_rank(self) -> int | None:
        return None

    def broadcast(self, tensors: list[torch.Tensor]) -> None:
        pass

    def moving(self) -> bool:
        return self.stuck.is_set()

    def give_up(self) -> None:
        self.given_up = True


class FakePacker:
    def format(self, specs: Any, terms: Any) -> Format:
        return Format(terms.bucket_bytes or 1 << 30, lambda _: True)

    def reserve(self, plan: Any) -> None:
        pass

    def objections(self, plan: Any) -> list[str]:
        return []

    def abandon(self) -> None:
        pass

    def pack(self, bucket: Bucket) -> Cargo:
        return Cargo([weight.read() for weight in bucket.weights])


@dataclass
class House:
    """A fleet of fakes and the updater that drives it."""

    engines: list[FakeEngine]
    updater: Updater
    groups: list[FakeGroup]
    counted: list[int] = field(default_factory=list)

    def push(self) -> Any:
        def count(version: int) -> list[str]:
            self.counted.append(version)
            return []

        weights = extract_weights({name: torch.zeros(2) for name in "abcd"})
        return self.updater.update(Push(lambda: Payload(weights), count))


def house(engines: int, **options: Any) -> House:
    """`engines` fakes; an update has four buckets."""
    fakes = [FakeEngine(f"http://engine{index}:1") for index in range(engines)]
    groups: list[FakeGroup] = []

    def open_group(*arguments: Any) -> FakeGroup:
        groups.append(FakeGroup())
        return groups[-1]

    chosen = UpdateOptions(bucket_bytes=8, **{"timeout": 5.0, **options})
    by_url = {fake.url: fake for fake in fakes}
    updater = Updater(
        list(by_url),
        by_url.__getitem__,
        {"broadcast": Ends(open_group, lambda device: FakePacker())},
        chosen,
    )
    return House(fakes, updater, groups)
