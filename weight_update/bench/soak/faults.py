"""What goes wrong in the soak: the table of troubles, and how an engine is brought back."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from weight_update.reference_engine import Fault, ReferenceEngine

INIT = "/init_weights_update_group"
PAUSE = "/pause_generation"
BEGIN = "/begin_weight_update"
UPDATE = "/update_weights_from_distributed"
END = "/end_weight_update"
FLUSH = "/flush_cache"
CHECK = "/weights_checker"
STAMP = "/update_weight_version"
CONTINUE = "/continue_generation"
_ROUTES = (INIT, PAUSE, BEGIN, UPDATE, END, FLUSH, CHECK, STAMP, CONTINUE)

Act = Literal["none", "kill", "kill midway", "freeze", "freeze briefly", "restart"]

_MIDWAY_SECONDS = 0.05
_BRIEF_SECONDS = 0.7
_PROBE_SECONDS = 5.0


@dataclass(frozen=True)
class Trouble:
    """One thing that goes wrong on one engine around one update.

    Args:
        name: What a reader is told.
        fault: A fault of the engine's own.
        act: What is done to its process from outside.
    """

    name: str
    fault: Fault | None = None
    act: Act = "none"

    def strike(self, engine: ReferenceEngine) -> threading.Timer | None:
        """Brings it about; what comes later, during the update, is in the timer."""
        if self.act == "restart":
            engine.restart()
        if self.fault is not None:
            engine.inject(self.fault)
        if self.act in ("freeze", "freeze briefly"):
            signal_to(engine, signal.SIGSTOP)
        if self.act == "kill":
            kill(engine)
        later = {"freeze briefly": (_BRIEF_SECONDS, wake), "kill midway": (_MIDWAY_SECONDS, kill)}
        if self.act not in later:
            return None
        seconds, call = later[self.act]
        timer = threading.Timer(seconds, call, [engine])
        timer.start()
        return timer


def troubles() -> dict[str, list[Trouble]]:
    """The table, by kind; each kind comes about as often as another.

    Example:
        >>> sorted(troubles())[:3]
        ['broken answers', 'deaths', 'frozen']
    """
    return {
        "refusals": list(_at_routes(("refuse", "success_false"))),
        "broken answers": list(_at_routes(("close", "non_json"))),
        "lost answers": [*_at_routes(("close", "hang"), when="before_answer")],
        "hangs": list(_at_routes(("hang",))),
        "slowness": list(_at_routes(("slow",))),
        "lies": [
            _inside("lie", UPDATE, when="before_join"),
            _inside("lie", END, when="before_join"),
            _inside("drop", UPDATE, when="after_receive"),
            _inside("drop", UPDATE, when="after_receive", names=("model.norm.weight",)),
        ],
        "inside an update": [
            _inside(kind, UPDATE, when=when)
            for kind in ("refuse", "slow", "hang")
            for when in ("after_receive", "after_load")
        ],
        "deaths": [
            *_at_routes(("die",)),
            _inside("die", UPDATE, when="after_receive"),
            _inside("die", UPDATE, when="after_load"),
            Trouble("kill -9 before the update", act="kill"),
            Trouble("kill -9 during the update", act="kill midway"),
            Trouble("restart before the update", act="restart"),
        ],
        "frozen": [
            *_at_routes(("stop",)),
            _inside("stop", UPDATE, when="after_load"),
            Trouble("kill -STOP before the update", act="freeze"),
            Trouble("kill -STOP, and -CONT 0.7 s later", act="freeze briefly"),
        ],
    }


def choose(chance: random.Random) -> Trouble:
    """A trouble by chance."""
    table = troubles()
    return chance.choice(table[chance.choice(sorted(table))])


def _at_routes(kinds: tuple[str, ...], when: str = "before_join") -> Iterator[Trouble]:
    for path in _ROUTES:
        for kind in kinds:
            yield _inside(kind, path, when=when)


def _inside(kind: str, path: str, *, when: str, names: tuple[str, ...] | None = None) -> Trouble:
    times = None if names else 1  # only one of the buckets has them
    fault = Fault(path, kind, when=when, times=times, seconds=0.3, names=names)  # type: ignore[arg-type]
    of = f" of {', '.join(names)}" if names else ""
    moment = "" if when == "before_join" else f" ({when.replace('_', ' ')})"
    # The group is joined anew only when an engine lost it.
    act: Act = "restart" if path == INIT else "none"
    return Trouble(f"{path[1:]}: {kind}{of}{moment}", fault, act)


# -- the engine's process ------------------------------------------------------------------


def signal_to(engine: ReferenceEngine, number: int) -> None:
    """Signals an engine's process, if there is one."""
    with suppress(ProcessLookupError):
        os.kill(engine.pid, number)


def kill(engine: ReferenceEngine) -> None:
    """Kill -9."""
    signal_to(engine, signal.SIGKILL)


def wake(engine: ReferenceEngine) -> None:
    """Kill -CONT."""
    signal_to(engine, signal.SIGCONT)


def is_dead(engine: ReferenceEngine) -> bool:
    """Whether its process ended."""
    return engine.process.poll() is not None


def is_frozen(engine: ReferenceEngine) -> bool:
    """Whether its process is stopped."""
    try:
        state = Path(f"/proc/{engine.pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state in ("T", "t")


def is_stuck(engine: ReferenceEngine) -> bool:
    """Whether its scheduler obeys no more; only a restart helps then."""
    try:
        engine.call("GET", "/server_info", timeout=_PROBE_SECONDS)
    except (OSError, RuntimeError):
        return True
    return False


def revive(engine: ReferenceEngine) -> bool:
    """Does what an operator would, nothing to the weights; whether it had to be restarted."""
    wake(engine)
    if not is_dead(engine) and not is_stuck(engine):
        engine.clear_faults()
        return False
    engine.restart()
    return True
