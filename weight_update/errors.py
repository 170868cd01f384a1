"""The error tree: what failed, on which engine, in which phase, and what to do next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import requests

if TYPE_CHECKING:
    from weight_update.report import UpdateReport

Applied = Literal["nothing", "partly", "all", "unknown"]
Phase = Literal[
    "configure",
    "connect",
    "plan",
    "pause",
    "drain",
    "begin",
    "transfer",
    "end",
    "flush",
    "verify",
    "stamp",
    "count",
    "continue",
]

TRANSFER_FAILED = "Weight transfer failed: "
"""How synchronizers begin the message of a refit that failed, which their users match on."""


class WeightUpdateError(RuntimeError):
    """Base of every error this library raises.

    Args:
        message: What happened, in one sentence, with the engine's own words.
        engine: URL of the engine that caused it, or None when no single engine did.
        phase: The step of the update that was running.
        remedy: What the reader can do about it.
        engines: URLs of all engines that share in it, when there are several.

    Attributes:
        report: The :class:`~weight_update.UpdateReport` of the failed update, which says in
            which state each engine was left; None when no update had started.

    Example:
        >>> error = WeightUpdateError("the server said no", engine="http://a:1", phase="pause")
        >>> print(error)
        pause: http://a:1: the server said no
    """

    def __init__(
        self,
        message: str = "",
        *,
        engine: str | None = None,
        phase: Phase = "configure",
        remedy: str = "",
        engines: Sequence[str] = (),
    ) -> None:
        super().__init__(message)
        self.message = message
        self.engine = engine
        self.engines = tuple(engines) or ((engine,) if engine else ())
        self.phase: Phase = phase
        self.remedy = remedy
        self.report: UpdateReport | None = None

    def __str__(self) -> str:
        phase = "" if self.phase == "configure" else self.phase
        text = ": ".join(part for part in (phase, self.engine, self.message) if part)
        if self.remedy:
            text += f" [{self.remedy}]"
        if self.report is not None:
            outcomes = self.report.engines.values()
            words = self.message.removeprefix(TRANSFER_FAILED)
            lines = (str(o).removesuffix(f": {words}") for o in outcomes)
            text += "".join(f"\n  {line}" for line in lines)
            text += "".join(f"\n  next: {step}" for step in self._next_steps(self.report))
        return text

    def to_dict(self) -> dict[str, Any]:
        """The error as plain JSON values; :func:`~weight_update.report.error_from_dict` reads it.

        Example:
            >>> EngineUnreachable("it is gone", engine="http://a:1").to_dict()["kind"]
            'EngineUnreachable'
        """
        return {
            "kind": type(self).__name__,
            "message": self.message,
            "engine": self.engine,
            "engines": list(self.engines),
            "phase": self.phase,
            "remedy": self.remedy,
            "report": None if self.report is None else self.report.to_dict(),
        }

    @staticmethod
    def _next_steps(report: UpdateReport) -> list[str]:
        held = any(outcome.held for outcome in report.engines.values())
        lost = [o.url for o in report.engines.values() if o.state == "unreachable"]
        heal = "push again, or call a sender's recover(); a whole model heals and resumes them"
        revive = f"look at {', '.join(lost)}, restart what is down; the next push takes it back"
        return [step for step, due in ((heal, held), (revive, lost)) if due]


def wrapped(error: Exception, phase: Phase) -> WeightUpdateError:
    """Any exception as one of the library's own, its cause kept."""
    if isinstance(error, WeightUpdateError):
        return error
    wrapper = WeightUpdateError(f"{type(error).__name__}: {error}", phase=phase)
    wrapper.__cause__ = error
    return wrapper


class ConfigurationError(WeightUpdateError, ValueError):
    """An argument, an environment variable or a deployment that cannot work as given."""


class MissingSetting(ConfigurationError, KeyError):
    """A configuration lacks something that has no default."""


class NotSupported(WeightUpdateError, NotImplementedError):
    """A deployment that is not there yet; the text names what works instead."""


class WeightMismatchError(WeightUpdateError, ValueError):
    """The weights differ from what was announced: names, dtypes, shapes or values."""


class EngineRejected(WeightUpdateError, requests.HTTPError):
    """An engine answered, and the answer was no.

    Attributes:
        response: The answer (without the request's credentials), when there was one.
        applied: How much of a refused update request the engine had applied by then.
    """

    response: requests.Response | None
    applied: Applied = "nothing"

    def __init__(
        self,
        message: str = "",
        *,
        engine: str | None = None,
        phase: Phase = "configure",
        remedy: str = "",
        response: requests.Response | None = None,
    ) -> None:
        WeightUpdateError.__init__(self, message, engine=engine, phase=phase, remedy=remedy)
        self.response = response
        self.request = None


class EngineUnreachable(WeightUpdateError, ConnectionError):
    """No answer came: the connection was refused, reset or closed."""


class UpdateTimeout(WeightUpdateError, TimeoutError):
    """The deadline passed in the named phase."""


class RefitAborted(WeightUpdateError):
    """Workers gave a refit up at its deadline, since somebody did not take part."""

    marks = ("refit-aborted", "RefitAborted")
    """What a worker's words have in them then; a call through an engine keeps no types."""


def first_of(errors: Sequence[BaseException]) -> BaseException:
    """The first of several errors, an interrupt before all; notes on it tell of the others.

    It also names the engines that others of its kind came from.

    Example:
        >>> gone = [EngineUnreachable("gone", engine=url) for url in ("http://a:1", "http://b:1")]
        >>> first_of(gone).engines
        ('http://a:1', 'http://b:1')
    """
    first = next((e for e in errors if not isinstance(e, Exception)), errors[0])
    for other in errors:
        if other is not first:
            ours = isinstance(other, WeightUpdateError)
            first.add_note(f"and besides: {other if ours else repr(other)}")
            if isinstance(first, WeightUpdateError) and isinstance(other, type(first)):
                first.engines = tuple(dict.fromkeys((*first.engines, *other.engines)))
    return first


def some_of(names: Sequence[str], shown: int = 3) -> str:
    """The first names of many, for a message.

    Example:
        >>> some_of(["a", "b", "c", "d"])
        "'a', 'b', 'c', ..."
    """
    return ", ".join(map(repr, names[:shown])) + (", ..." if len(names) > shown else "")


def kind_of_error(name: str) -> type[WeightUpdateError]:
    """The class of that name; the base class for a name that is none.

    Example:
        >>> kind_of_error("UpdateTimeout"), kind_of_error("MissingSetting")
        (<class '...UpdateTimeout'>, <class '...MissingSetting'>)
    """
    kind = globals().get(name)
    if isinstance(kind, type) and issubclass(kind, WeightUpdateError):
        return kind
    return WeightUpdateError
