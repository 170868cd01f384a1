"""A sender whose updates are made up: what it tells, and to whom, is what is tested."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from weight_update import EngineState, SGLangWeightSender, UpdateReport
from weight_update.errors import EngineRejected
from weight_update.report import EngineOutcome
from weight_update.schemes.listeners import Listeners

URL = "http://a:1"


def report_of(
    version: int, states: Sequence[str] = ("new",), labels: Sequence[str | None] = (), **more: Any
) -> UpdateReport:
    """A report of engines in these states, which show these labels."""
    shown = labels or [str(version)] * len(states)
    outcomes = [
        EngineOutcome(f"http://{i}", EngineState(state), label, paused=state == "mixed")
        for i, (state, label) in enumerate(zip(states, shown, strict=True))
    ]
    seconds = {"pause": 0.25, "transfer": 0.5, "paused": 0.75, "total": 1.0}
    return UpdateReport(
        **{
            "version": version,
            "bytes": 2_000_000_000,
            "tensors": 291,
            "buckets": 3,
            "seconds": seconds,
            "engines": {outcome.url: outcome for outcome in outcomes},
            **more,
        }
    )


def failure(report: UpdateReport) -> EngineRejected:
    error = EngineRejected("no", engine=URL, phase="transfer")
    error.report = report
    return error


class MadeUp:
    """A transport whose updates end as they are told to, one after the other; then well."""

    timeout = 30.0
    engines: Mapping[str, EngineOutcome] = {}

    def __init__(self) -> None:
        self.version = 0
        self.ends: list[Exception] = []
        self.during: Callable[[], object] = lambda: None

    def update(self, source: Callable[[], Any], counted: Any, **_: Any) -> UpdateReport:
        self.during()
        if self.ends:
            raise self.ends.pop(0)
        self.version += 1
        return report_of(self.version)

    recover = update

    def snapshot(self, source: Any) -> Any:
        return source

    def shutdown(self) -> None:
        pass


class MadeUpScheme:
    """A scheme of such transports."""

    class options:
        trainer_ranks = "one"

    def __init__(self) -> None:
        self.listeners = Listeners()

    def create_transport(self) -> MadeUp:
        return MadeUp()


def made_up() -> tuple[SGLangWeightSender, MadeUp]:
    """A sender and its transport."""
    sender = SGLangWeightSender(MadeUpScheme())  # type: ignore[arg-type]
    return sender, sender._transport  # type: ignore[return-value]
