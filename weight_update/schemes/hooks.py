"""Post-hooks: what a user has called after each update that succeeded."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from weight_update.errors import ConfigurationError
from weight_update.report import UpdateReport

_log = logging.getLogger("weight_update")

PostHook = Callable[[], Any] | Callable[[UpdateReport], Any]


class PostHooks:
    """Hooks in the order of their registration; one that fails keeps no other from running."""

    def __init__(self) -> None:
        self._hooks: list[_Hook] = []

    def add(self, hook: PostHook) -> None:
        """Has a hook called once more after each update; it may be added while one runs.

        Raises:
            ConfigurationError: It takes neither nothing nor a report, or is a coroutine.
        """
        self._hooks.append(_Hook(hook, _needs_report(hook)))

    def clear(self) -> None:
        """Forgets all hooks."""
        self._hooks.clear()

    def run(self, report: UpdateReport) -> UpdateReport:
        """Calls every hook, in the caller's thread.

        Returns:
            The report, with a warning for each hook that raised.
        """
        trouble = [words for hook in tuple(self._hooks) if (words := hook.call(report))]
        return replace(report, warnings=(*report.warnings, *trouble)) if trouble else report


@dataclass
class _Hook:
    function: Callable[..., Any]
    needs_report: bool
    told: bool = False

    def call(self, report: UpdateReport) -> str:
        """Calls it; what went wrong, in words."""
        try:
            self.function(*((report,) if self.needs_report else ()))
        except Exception as error:  # noqa: BLE001 - the engines have the weights all the same
            return self._trouble(error, report.version)
        return ""

    def _trouble(self, error: Exception, version: int) -> str:
        name = getattr(self.function, "__qualname__", type(self.function).__name__)
        words = f"post-hook {name} failed ({type(error).__name__}: {error}) at version {version}"
        if not self.told:
            self.told = True
            _log.warning("%s; the update stands", words, exc_info=error)
        return words


def _needs_report(hook: Any) -> bool:
    """Whether a hook is called with the report: only one that cannot be called without.

    TorchRL's hooks take nothing, and may have defaults of their own, which stay theirs.
    """
    if not callable(hook):
        raise ConfigurationError(f"a post-hook is called, and a {type(hook).__name__} cannot be")
    if inspect.iscoroutinefunction(hook):
        raise ConfigurationError(
            "a post-hook is called and not awaited, and this one is a coroutine function",
            remedy="register a function that hands the coroutine to its loop",
        )
    try:
        signature = inspect.signature(hook)
    except (TypeError, ValueError):  # a builtin that does not say what it takes
        return False
    if _takes(signature):
        return False
    if _takes(signature, None):
        return True
    raise ConfigurationError(
        "a post-hook is called without arguments, or with the report alone, and this one takes "
        f"{signature}"
    )


def _takes(signature: inspect.Signature, *arguments: object) -> bool:
    try:
        signature.bind(*arguments)
    except TypeError:
        return False
    return True
