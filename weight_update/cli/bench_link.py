"""``weight-update bench link``: the link to live SGLang servers, and the setting that suits it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weight_update.cli import options
from weight_update.cli.output import console, one_interrupt, say, usage
from weight_update.cli.rows import measure

if TYPE_CHECKING:
    from weight_update.bench.link import LinkJobs
    from weight_update.bench.rows import Row

HELP = """Measure the link to live SGLang servers, and print the setting that suits it.

Zeros travel as weights do, in buckets of several sizes and as one broadcast a tensor, and right
before each of them as one huge tensor: the limit. The ratio is the distance from it. Then comes
a line for your code, or word that the defaults do as well.

The servers keep their weights and their version labels: what is sent has names that no loader
keeps. But each measurement PAUSES every server as long as it takes, as an update does; requests
in flight are treated as --pause-mode says, and servers are resumed even if something fails. A
server needs free memory for all that is sent at once (--gigabytes). What a loader does with
weights of its own is not measured.

Only broadcasts are measured, over NCCL (--device cuda) or gloo. Memory that trainer and server
share (transport="ipc") is opened, and no link is in between.

\b
Example:
  weight-update bench link --server http://a:30000
  weight-update bench link --server http://a:30000 --server http://b:30000 --device cuda
  weight-update bench link --server http://a:30000 --gigabytes 0.1 --rounds 1 --json

\b
Exit codes:
  0    measured
  1    a server refused, did not come, or failed
  2    wrong arguments
  130  interrupted (143: terminated); the servers are resumed, except that over gloo one may hang
       that had a part of a broadcast whose rest takes more than 0.5 s
"""


def link(
    server: Annotated[
        list[str],
        typer.Option(metavar="URL", help="An SGLang server's root URL; repeat it for several."),
    ],
    gigabytes: Annotated[
        float, typer.Option(min=0.001, help="How much is sent at a time (GB = 1e9 bytes).")
    ] = 1.0,
    tensors: Annotated[int, typer.Option(min=1, help="In how many tensors.")] = 300,
    rounds: Annotated[int, typer.Option(min=1, help="How often each setting is measured.")] = 3,
    device: Annotated[
        str,
        typer.Option(help="Where the bytes leave from: cpu (gloo), or cuda or cuda:N (NCCL)."),
    ] = "cpu",
    pause_mode: options.Pause = None,
    timeout: options.Timeout = 300.0,
    master_address: options.MasterAddress = None,
    master_port: options.MasterPort = None,
    ca_file: options.CaFile = None,
    as_json: options.Json = False,
) -> None:
    """Measures the link to live SGLang servers."""
    from weight_update.bench.link import LinkJobs, advice, run_link

    scheme = _scheme(
        server,
        device=device,
        pause_mode=None if pause_mode is None else pause_mode.value,
        timeout=timeout,
        master_address=master_address,
        master_port=master_port,
        ca_file=None if ca_file is None else str(ca_file),
        transport="broadcast",
    )
    jobs = LinkJobs(list(server), scheme.options, round(gigabytes * 1e9), tensors, rounds)
    objection = jobs.objection()
    if objection:
        usage(objection)
    rows: list[Row] = []
    with one_interrupt():
        measure(_noted(run_link(jobs, say), rows), as_json=as_json)
    if not as_json:
        _conclude(rows, advice(rows), jobs)


def _scheme(server: list[str], **arguments: Any) -> Any:
    from weight_update import ConfigurationError, SGLangWeightSyncScheme

    try:
        return SGLangWeightSyncScheme(server, **arguments)
    except ConfigurationError as error:
        usage(str(error))


def _noted(measured: Iterator[Row], rows: list[Row]) -> Iterator[Row]:
    for row in measured:
        rows.append(row)
        yield row


def _conclude(rows: list[Row], told: str, jobs: LinkJobs) -> None:
    out, best = console(), min(rows, key=lambda row: row.median.seconds)
    found = best.identity
    out.print(f"a request costs {1e3 * (found['request_seconds'] or 0):.1f} ms, whatever its size")
    limit = jobs.nbytes / best.median.limit_seconds / 1e9
    out.print(
        f"{found['gigabytes_per_second']:.2f} GB/s at best over {found['backend']}; one huge "
        f"broadcast has {limit:.2f} GB/s"
    )
    for reason in found["reasons"]:
        out.print(reason, markup=False)
    out.print(told, markup=False)
