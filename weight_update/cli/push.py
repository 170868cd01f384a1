"""``weight-update push``: hot-swaps a checkpoint on disk into live servers."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from weight_update.cli import options, push_options
from weight_update.cli.doctor import http_options, show
from weight_update.cli.output import (
    Exit,
    Terminated,
    console,
    give,
    one_interrupt,
    plain,
    result_on_stdout,
    say,
    usage,
)
from weight_update.cli.progress import shown

if TYPE_CHECKING:
    from weight_update import SGLangWeightSender, WeightUpdateError
    from weight_update import options as library
    from weight_update.cli.doctor_facts import Facts
    from weight_update.cli.servers import Servers
    from weight_update.engines.recognition import EngineName
    from weight_update.report import EngineOutcome
    from weight_update.schemes.server_scheme import ServerScheme
    from weight_update.weights.checkpoint import Checkpoint
    from weight_update.weights.saved_state_dict import SavedStateDict

_CHECK_SECONDS = 20.0
# Phases in which an update has changed nothing on any server yet.
_BEFORE_ANY_SERVER = ("configure", "plan", "connect")

HELP = """\
Hot-swap a checkpoint into live servers, which go on serving.

Each server is asked what it is: SGLang, vLLM, or a router in front of such servers. All are
paused, get the weights at once, and continue; requests in flight are kept.
The report says which way the bytes took, and why. The checkpoint is read shard by shard:
memory holds one shard and two buckets.
It is a folder of safetensors, or a file of torch.save(model.state_dict(), ...), which is
mapped and read with weights_only=True: nothing in it is run.

\b
Example:
  weight-update push --server http://127.0.0.1:30000 ./checkpoint
  weight-update push --server http://a:30000 --server http://b:30000 ./checkpoint --dry-run
  weight-update push --server http://vllm:8000 ./checkpoint
  weight-update push --server http://a:30000 --server http://vllm:8000 ./checkpoint
  weight-update push --server http://a:30000 ./model.pt --dtype engine --name-map '^policy[.]='
  weight-update push --server http://a:30000 ./checkpoint --transport disk --directory /shared

With --json, standard output is the report and nothing else; after a failure it has "error"
(kind, message, engine, engines, phase, remedy) too. Progress goes to standard error.

\b
Exit codes:
  0    every server (with --quorum, that many) generates with the new weights
  1    refused, or failed before any server was touched, or every server is as it was
  2    wrong arguments
  3    failed after servers were touched, and one is left mixed, paused or unreachable; the
       text says which. Push again: a whole checkpoint heals and resumes it
  130  interrupted (143: terminated); the text says what every server holds

\b
Environment:
  WEIGHT_UPDATE_API_KEY          key of the servers' ordinary routes
  WEIGHT_UPDATE_ADMIN_API_KEY    key of their control routes, where it differs
  WEIGHT_UPDATE_MASTER_ADDRESS   stands in for --master-address
  WEIGHT_UPDATE_BUCKET_BYTES     stands in for --bucket-bytes
  WEIGHT_UPDATE_DIRECTORY        stands in for --directory
Keys have no option: arguments are visible to everyone on the host (ps).
"""


@dataclass(frozen=True)
class Order:
    """What one command line asks for.

    Attributes:
        path: The checkpoint.
        urls: The servers, as they were named.
        engine: What they are, or ``"auto"``.
        arguments: Those of a scheme.
        check: Whether names and shapes are compared beforehand.
        as_json: Whether the result is JSON.
    """

    path: Path
    urls: tuple[str, ...]
    engine: EngineName
    arguments: dict[str, Any]
    check: bool
    as_json: bool


@dataclass(frozen=True)
class Job:
    """An order whose servers are known.

    Attributes:
        order: The order.
        servers: The servers, by engine.
        schemes: That of all servers, and if they are mixed one for each engine after it.
    """

    order: Order
    servers: Servers
    schemes: tuple[ServerScheme, ...]

    @property
    def options(self) -> library.UpdateOptions:
        """How the update is done; what differs by engine does not matter where it is used."""
        return self.schemes[-1].options

    def plan(self, checkpoint: Checkpoint | SavedStateDict, way: library.Transport) -> Any:
        """What would be sent; the same to every engine."""
        scheme = self.schemes[-1]
        scheme.options = replace(scheme.options, transport=way)
        return scheme.create_transport().plan(checkpoint)


def push(
    checkpoint: push_options.CheckpointDir,
    server: options.Server,
    dry_run: push_options.DryRun = False,
    as_json: options.Json = False,
    engine: options.Engine = options.EngineName.AUTO,
    pause_mode: options.Pause = None,
    dtype: push_options.CastTo = None,
    name_map: push_options.NameMap = None,
    trim_vocabulary: push_options.TrimVocabulary = False,
    check_finite: push_options.CheckFinite = False,
    timeout: options.Timeout = 300.0,
    bucket_bytes: push_options.BucketBytes = None,
    device: options.Device = "cpu",
    transport: options.HowToTravel = None,
    directory: push_options.Directory = None,
    check: push_options.Check = True,
    verify: push_options.Verify = None,
    quorum: push_options.Quorum = None,
    master_address: options.MasterAddress = None,
    master_port: options.MasterPort = None,
    ca_file: options.CaFile = None,
) -> None:
    """Hot-swap a checkpoint into live servers, which go on serving."""
    arguments: dict[str, Any] = {
        "master_address": master_address,
        "master_port": master_port,
        "device": device,
        "pause_mode": None if pause_mode is None else pause_mode.value,
        "bucket_bytes": bucket_bytes,
        "transport": "auto" if transport is None else transport.value,
        "directory": directory,
        "dtype": _dtype(dtype),
        "name_map": _table(name_map),
        "trim_vocabulary": trim_vocabulary,
        "check_finite": check_finite,
        "timeout": timeout,
        "ca_file": None if ca_file is None else str(ca_file),
        "verify": verify.value if verify else "auto" if check else "off",
        "quorum": "all" if quorum is None else quorum,
    }
    with result_on_stdout():
        urls = _checked(server, engine.value, arguments)
        order = Order(checkpoint, urls, engine.value, arguments, check, as_json)
        _rehearse(order) if dry_run else _run(order)


def _checked(server: list[str], engine: EngineName, arguments: dict[str, Any]) -> tuple[str, ...]:
    """The servers; wrong arguments are found before a checkpoint is read or a server asked."""
    from weight_update import ConfigurationError
    from weight_update.cli.servers import Servers, schemes_for
    from weight_update.options import parse_server_urls

    try:
        urls = parse_server_urls(server)
        schemes_for(Servers((), urls) if engine == "vllm" else Servers(urls, ()), **arguments)
    except ConfigurationError as error:
        usage(str(error))
    return urls


def _job(order: Order) -> Job:
    """Asks the servers what they are."""
    from weight_update import ConfigurationError
    from weight_update.cli.servers import find_out, schemes_for

    seconds = min(order.arguments["timeout"], _CHECK_SECONDS)
    http = http_options(order.arguments["ca_file"])
    servers = find_out(order.urls, http, seconds, order.engine)
    for line in () if order.as_json else servers.words:
        say(line)
    try:
        return Job(order, servers, schemes_for(servers, **order.arguments))
    except ConfigurationError as error:
        usage(str(error))


def _dtype(named: options.CastTo | None) -> Any:
    import torch

    return None if named is None else getattr(torch, named.value, named.value)


def _table(rules: list[str] | None) -> dict[str, str] | None:
    """The regular expressions and replacements that were named; None without any."""
    table: dict[str, str] = {}
    for rule in rules or ():
        pattern, divider, replacement = rule.rpartition("=")
        if not divider or pattern in table:
            why = "is given twice" if divider else "has no ="
            usage(f"--name-map {rule!r} {why}; give REGEX=REPLACEMENT")
        table[pattern] = replacement
    return table or None


def _run(order: Order) -> None:
    from weight_update import WeightUpdateError

    with one_interrupt():
        checkpoint = _opened(order)
        job = _job(order)
        with job.schemes[0].create_sender() as sender:
            try:
                if order.check:
                    _refuse_misfit(job, checkpoint)
                with shown(quiet=order.as_json) as progress:
                    report = sender.update_weights(checkpoint, progress=progress)
            except WeightUpdateError as error:
                _failed(order, error, sender)
            except KeyboardInterrupt as interrupt:
                _interrupted(order, interrupt, sender)
    if order.as_json:
        give(report.to_dict())
    else:
        typer.echo(str(report))


def _opened(order: Order) -> Checkpoint | SavedStateDict:
    from weight_update import WeightUpdateError
    from weight_update.weights.saved_state_dict import open_weights

    try:
        checkpoint = open_weights(order.path)
        if order.arguments["dtype"] is not None:
            _refuse_float8(order.path, checkpoint)
    except WeightUpdateError as error:
        _failed(order, error, None)
    return checkpoint


def _refuse_float8(path: Path, checkpoint: Checkpoint | SavedStateDict) -> None:
    from weight_update import ConfigurationError

    dtypes = {spec.dtype for spec in checkpoint.specs}
    if any(dtype.is_floating_point and dtype.itemsize == 1 for dtype in dtypes):
        raise ConfigurationError(
            f"{path} holds float8 weights, which mean nothing without their scales: "
            "they cannot be cast",
            phase="plan",
            remedy="leave --dtype out, or dequantise the model",
        )


# -- before anything is sent --------------------------------------------------------------


def _facts(job: Job, checkpoint: Checkpoint | SavedStateDict) -> Facts:
    from weight_update.cli.doctor_facts import ModelFacts, check_facts

    chosen = job.options
    quick = replace(chosen, timeout=min(chosen.timeout, _CHECK_SECONDS))
    plan = job.plan(checkpoint, chosen.transport)
    model = replace(
        ModelFacts.of(checkpoint),
        specs={spec.name: spec for bucket in plan.buckets for spec in bucket.specs},
        trims=chosen.trim_vocabulary,
        casts=chosen.dtype == "engine",
    )
    return check_facts(job.servers.urls, quick, model, job.order.engine)


def _refuse_misfit(job: Job, checkpoint: Checkpoint | SavedStateDict) -> None:
    """Raises if a server says that it has other weights; what is unknown refuses nothing."""
    from weight_update import WeightMismatchError
    from weight_update.cli.doctor_checks import misfits

    found = misfits(_facts(job, checkpoint))
    if found:
        others = "".join(f"; {each.where}: {each.what}" for each in found[1:])
        raise WeightMismatchError(
            f"{found[0].what}{others}",
            engine=found[0].where,
            phase="plan",
            remedy=f"{found[0].remedy}; --no-check pushes all the same",
        )


def _rehearse(order: Order) -> None:
    from weight_update import WeightUpdateError
    from weight_update.cli.doctor_checks import diagnose

    checkpoint = _opened(order)
    job = _job(order)
    try:
        facts = _facts(job, checkpoint)
        plan, diagnosis = _plan(job, checkpoint, facts), diagnose(facts)
    except WeightUpdateError as error:
        _failed(order, error, None)
    if order.as_json:
        give({**plan, "doctor": diagnosis.to_dict()})
    else:
        typer.echo(_plan_line(plan))
        show(diagnosis, console())
    raise typer.Exit(Exit.OK if diagnosis.ok else Exit.FAILED)


def _plan(job: Job, checkpoint: Checkpoint | SavedStateDict, facts: Facts) -> dict[str, Any]:
    """What would be sent, and which way."""
    way = _way(job, facts)
    plan = job.plan(checkpoint, way)
    dtypes: Counter[str] = Counter()
    for bucket in plan.buckets:
        for spec in bucket.specs:
            dtypes[spec.dtype_name] += spec.nbytes
    return {
        "checkpoint": str(job.order.path),
        "tensors": plan.tensors,
        "bytes": plan.nbytes,
        "buckets": len(plan.buckets),
        "way": way,
        "dtypes": dict(dtypes),
    }


def _way(job: Job, facts: Facts) -> library.Transport:
    """Which way an update would try first."""
    from weight_update.engines.sglang.capabilities import read_layout

    asked = job.options.transport
    if asked != "auto":
        return asked
    sglang = [server for server in facts.servers if server.service == "sglang"]
    return "disk" if any(read_layout(s.info).offline for s in sglang) else "broadcast"


def _plan_line(plan: dict[str, Any]) -> str:
    dtypes = ", ".join(f"{size / 1e6:.1f} MB of {name}" for name, size in plan["dtypes"].items())
    return (
        f"would send {plan['tensors']} tensors, {plan['bytes']} bytes in {plan['buckets']} "
        f"bucket(s) by {plan['way']}: {dtypes}"
    )


# -- endings ------------------------------------------------------------------------------


def _failed(order: Order, error: WeightUpdateError, sender: SGLangWeightSender | None) -> NoReturn:
    report = {} if error.report is None else error.report.to_dict()
    if order.as_json:
        give({**report, "error": plain(error)})
    say(str(error))
    outcomes = [] if sender is None else list(sender.engines.values())
    touched = error.phase not in _BEFORE_ANY_SERVER
    raise typer.Exit(Exit.UNCLEAN if touched and _unclean(outcomes) else Exit.FAILED)


def _unclean(outcomes: list[EngineOutcome]) -> bool:
    return any(outcome.paused or outcome.state not in ("old", "new") for outcome in outcomes)


def _interrupted(
    order: Order, interrupt: KeyboardInterrupt, sender: SGLangWeightSender
) -> NoReturn:
    outcomes = sender.engines
    if order.as_json:
        engines = {url: outcome.to_dict() for url, outcome in outcomes.items()}
        give({"engines": engines, "error": plain(interrupt)})
    say("interrupted; what every server holds:")
    for outcome in outcomes.values():
        say(f"  {outcome}")
    if _unclean(list(outcomes.values())):
        say("  next: push again; a whole checkpoint heals and resumes them")
    terminated = isinstance(interrupt, Terminated)
    raise typer.Exit(Exit.TERMINATED if terminated else Exit.INTERRUPTED)
