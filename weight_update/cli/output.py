"""What commands write: results to standard output, all else to standard error."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, Self

import typer

if TYPE_CHECKING:
    from rich.console import Console


_DEMO_EXTRA = ("transformers", "starlette", "uvicorn")


class Exit(IntEnum):
    """Exit codes of every command."""

    OK = 0
    FAILED = 1
    USAGE = 2
    UNCLEAN = 3
    INTERRUPTED = 130
    TERMINATED = 143


def say(text: str) -> None:
    """Writes a line for people."""
    typer.echo(text, err=True)


def give(value: Any) -> None:
    """Writes a result as JSON."""
    typer.echo(json.dumps(value, indent=2))


def plain(error: BaseException) -> dict[str, Any]:
    """An error as JSON values, which are the same in the output of every command.

    Example:
        >>> plain(OSError("no space"))["kind"], sorted(plain(OSError("no space")))
        ('OSError', ['engine', 'engines', 'kind', 'message', 'phase', 'remedy'])
    """
    from weight_update.errors import WeightUpdateError

    if isinstance(error, WeightUpdateError):
        return {name: value for name, value in error.to_dict().items() if name != "report"}
    nothing: dict[str, Any] = {"engine": None, "engines": [], "phase": None, "remedy": ""}
    return {"kind": type(error).__name__, "message": str(error), **nothing}


class ListOnStdout:
    """A JSON list whose items are written as they come; it is whole when the block ends."""

    def __init__(self) -> None:
        self._before = "["

    def give(self, value: Any) -> None:
        """Writes an item."""
        typer.echo(f"{self._before}\n{json.dumps(value, indent=2)}", nl=False)
        self._before = ","

    def __enter__(self) -> Self:
        """Begins the list."""
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the list, whatever ended the block."""
        typer.echo("[]" if self._before == "[" else "\n]")


def usage(message: str) -> NoReturn:
    """Ends the command over a wrong argument."""
    say(f"Error: {message}")
    raise typer.Exit(Exit.USAGE)


def needs_extra(command: str) -> None:
    """Ends a command whose extra, ``[demo]``, is not installed."""
    missing = [name for name in _DEMO_EXTRA if importlib.util.find_spec(name) is None]
    if missing:
        say(f'{missing[0]} is not installed. {command} needs: pip install ".[demo]" (from a clone)')
        raise typer.Exit(Exit.FAILED)


def console(*, stderr: bool = False) -> Console:
    """A rich console; imported late, since most of a start is imports."""
    from rich.console import Console

    return Console(stderr=stderr, highlight=False, soft_wrap=True)


@contextmanager
def result_on_stdout() -> Iterator[None]:
    """Keeps what native libraries print (gloo does) off standard output.

    They write to descriptor 1, which is standard error meanwhile; :func:`give` and
    ``typer.echo`` write to the real one.
    """
    before = sys.stdout
    if before is not sys.__stdout__ or before is None:
        yield  # somebody holds what we write already
        return
    before.flush()
    real = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = os.fdopen(os.dup(real), "w", buffering=1, encoding=before.encoding)
    try:
        yield
    finally:
        sys.stdout.close()
        sys.stdout = before
        os.dup2(real, 1)
        os.close(real)


class Terminated(KeyboardInterrupt):
    """The process was told to end (SIGTERM); like Ctrl-C, it leaves a known state."""


@contextmanager
def one_interrupt() -> Iterator[None]:
    """Lets Ctrl-C or SIGTERM interrupt once.

    What follows puts the servers in a known state, within bounds; a second Ctrl-C would leave
    it half done. A command that has no words for it ends with the code of what came.
    """

    def interrupt(number: int, _: FrameType | None) -> None:
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_IGN)
        print("\ninterrupted; the servers are put in a known state ...", file=sys.stderr)
        raise (
            Terminated("terminated")
            if number == signal.SIGTERM
            else KeyboardInterrupt("interrupted")
        )

    before = {each: signal.signal(each, interrupt) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    except Terminated as error:
        raise typer.Exit(Exit.TERMINATED) from error
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
