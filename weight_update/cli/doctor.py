"""``weight-update doctor``: says what it finds and whether an update would work."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weight_update.cli import options
from weight_update.cli.output import Exit, console, give, usage

if TYPE_CHECKING:
    from rich.console import Console

    from weight_update.cli.doctor_checks import Diagnosis
    from weight_update.options import HttpOptions, UpdateOptions


HELP = """\
Say what is found on servers, and whether an update would work. Changes nothing.

Each server is asked what it is: SGLang, vLLM, or a router in front of such servers. Then it
reads release, layout, keys, pause, the address that the servers would be told, of vLLM also how
it was started for updates, and with --checkpoint whether names, shapes and dtype fit. Only GET
and OPTIONS requests are sent, of routes that read. What cannot be found out that way is called
unknown, never fine: whether a server can connect to this host, for one, is proven by an update
alone.

\b
Example:
  weight-update doctor --server http://127.0.0.1:30000 --checkpoint ./checkpoint
  weight-update doctor --server http://sglang:30000 --server http://vllm:8000
  weight-update doctor --server http://vllm:8000 --device cuda

\b
With --json:
  {"ok": true, "servers": [{...}], "problems": [{"what": "", "where": "", "remedy": ""}]}

\b
Exit codes:
  0    an update would work, as far as that can be known
  1    problems were found; each is listed with its remedy
  2    wrong arguments

\b
Environment:
  WEIGHT_UPDATE_API_KEY          key of the servers' ordinary routes
  WEIGHT_UPDATE_ADMIN_API_KEY    key of their control routes, where it differs
  WEIGHT_UPDATE_MASTER_ADDRESS   stands in for --master-address
Keys have no option: arguments are visible to everyone on the host (ps).
"""


CheckpointDir = Annotated[
    Path | None,
    typer.Option(
        "--checkpoint",
        metavar="CHECKPOINT",
        help="Compare the names, shapes and dtype of this checkpoint (a folder, or a file with a "
        "state_dict) with the server's. The server reads its weights once for that and generates "
        "nothing meanwhile.",
    ),
]


def doctor(
    server: options.Server,
    checkpoint: CheckpointDir = None,
    as_json: options.Json = False,
    engine: options.Engine = options.EngineName.AUTO,
    pause_mode: options.Pause = None,
    device: options.Device = "cpu",
    transport: options.HowToTravel = None,
    timeout: options.Timeout = 20.0,
    master_address: options.MasterAddress = None,
    master_port: options.MasterPort = None,
    ca_file: options.CaFile = None,
) -> None:
    """Say what is found on servers, and whether an update would work. Changes nothing."""
    from weight_update.cli.doctor_checks import diagnose
    from weight_update.cli.doctor_facts import ModelFacts, check_facts
    from weight_update.errors import ConfigurationError
    from weight_update.options import parse_server_urls

    try:
        urls = parse_server_urls(server)
        chosen = replace(
            _options(pause_mode, timeout, (master_address, master_port), ca_file),
            device=device,
            transport="auto" if transport is None else transport.value,
        )
    except ConfigurationError as error:
        usage(str(error))
    model = None if checkpoint is None else ModelFacts.at(checkpoint)
    diagnosis = diagnose(check_facts(urls, chosen, model, engine.value))
    if as_json:
        give(diagnosis.to_dict())
    else:
        show(diagnosis, console())
    raise typer.Exit(Exit.OK if diagnosis.ok else Exit.FAILED)


def _options(
    pause_mode: options.PauseMode | None,
    timeout: float,
    address: tuple[str | None, int | None],
    ca_file: Path | None,
) -> UpdateOptions:
    from weight_update.options import MASTER_ADDRESS_VARIABLE, UpdateOptions, read_text

    return UpdateOptions(
        master_address=address[0] or read_text(MASTER_ADDRESS_VARIABLE),
        master_port=address[1],
        pause_mode=None if pause_mode is None else pause_mode.value,
        timeout=timeout,
        http=http_options(None if ca_file is None else str(ca_file)),
    )


def http_options(ca_file: str | None) -> HttpOptions:
    """How servers are spoken to; keys come from the environment."""
    from weight_update.options import HttpOptions

    return HttpOptions.read(ca_file=ca_file)


def show(diagnosis: Diagnosis, to: Console) -> None:
    """Writes a diagnosis for people."""
    from rich.text import Text

    def line(text: str, style: str = "") -> None:
        to.print(Text(text, style))

    for server in diagnosis.servers:
        line(server["url"], "bold")
        for name, value in _rows(server):
            line(f"  {name:<11} {value}")
        for warning in server["warnings"]:
            line(f"  warning     {warning['what']}", "yellow")
            line(f"              -> {warning['remedy']}")
        for what in server["unknown"]:
            line(f"  unknown     {what}", "dim")
    for problem in diagnosis.problems:
        line(f"problem: {problem.where}: {problem.what}", "bold red")
        line(f"  -> {problem.remedy}")
    if diagnosis.ok:
        line("an update would work, as far as that can be known", "bold green")
    else:
        count = len(diagnosis.problems)
        line(f"an update would not work: {count} problem{'s' if count > 1 else ''}", "bold red")


def _rows(server: dict[str, Any]) -> list[tuple[str, str]]:
    """What is known of a server, in lines."""
    if server["ranks"] is None and server["keys"] is None:
        return []
    keys = ", ".join(f"{kind} {state}" for kind, state in (server["keys"] or {}).items())
    running = server["running_requests"]
    sizes = [f"{n} {server[n]}" for n in ("tp", "pp", "dp") if server[n] is not None]
    engine = {"sglang": "SGLang", "vllm": "vLLM"}.get(server["service"], "")
    joins = [
        *sizes,
        f"{server['ranks']} rank(s) join",
        *([server["dtype"]] if server["dtype"] else []),
    ]
    rows = {
        "release": f"{engine} {server['release'] or '(not said)'}: {server['found_by']}",
        "model": server["model"],
        "layout": ", ".join(joins) if sizes or server["ranks"] is not None else None,
        "device": server["device"],
        "transfer": server["backend"],
        "version": server["version"],
        "pause modes": ", ".join(server["pause_modes"]),
        "sessions": {True: "yes", False: "no"}.get(server["sessions"]),
        "keys": keys,
        "paused": {True: "yes", False: "no"}.get(server["paused"]),
        "requests": None if running is None else f"{running} running",
        "rendezvous": server["rendezvous"],
    }
    return [(name, str(value)) for name, value in rows.items() if value]
