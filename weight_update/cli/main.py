"""The command ``weight-update``."""

from __future__ import annotations

import logging
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from weight_update import __version__
from weight_update.cli import demo, doctor, push
from weight_update.cli.bench import app as bench

HELP = """\
Move weights into live inference engines.

\b
A first round, against a server that runs:
  weight-update doctor --server http://127.0.0.1:30000 --checkpoint ./checkpoint
  weight-update push --server http://127.0.0.1:30000 ./checkpoint

\b
Without a server:
  weight-update demo

\b
Exit codes of every command:
  0    it worked
  1    it did not, and the text says why
  2    wrong arguments
  3    push: it failed after servers were touched, and left one mixed, paused or unreachable
  130  interrupted (Ctrl-C); 143 after SIGTERM
"""


class _Commands(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        """Runs a command; what typer says of a wrong value is left as plain words."""
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            error.message = error.message.removeprefix("Value error, ")
            raise


app = typer.Typer(
    name="weight-update",
    cls=_Commands,
    help=HELP,
    no_args_is_help=True,
    rich_markup_mode=None,  # help is pasted from: no frames, no folded examples
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"weight-update {__version__}")
        raise typer.Exit


@app.callback()
def _top(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Move weights into live inference engines."""


app.command(help=push.HELP)(push.push)
app.command(help=doctor.HELP)(doctor.doctor)
app.command(help=demo.HELP)(demo.demo)
app.add_typer(bench, name="bench")


def main() -> None:
    """Runs the command line."""
    # What the library warns of stands in the reports that are printed.
    log = logging.getLogger("weight_update")
    log.addHandler(logging.NullHandler())
    log.propagate = False
    app(prog_name="weight-update")
