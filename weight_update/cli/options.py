"""Options that several commands share; torch is not imported for them."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class PauseMode(StrEnum):
    """What happens to requests in flight."""

    ABORT = "abort"
    RETRACT = "retract"
    IN_PLACE = "in_place"


class CastTo(StrEnum):
    """What floating weights may be cast to on their way to a server."""

    ENGINE = "engine"
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"


class Transport(StrEnum):
    """How the bytes get to the servers."""

    AUTO = "auto"
    BROADCAST = "broadcast"
    IPC = "ipc"
    DISK = "disk"


class Verify(StrEnum):
    """How servers prove that they hold what was sent."""

    AUTO = "auto"
    CHECKSUM = "checksum"
    SAMPLE = "sample"
    OFF = "off"


class EngineName(StrEnum):
    """What the servers are."""

    AUTO = "auto"
    SGLANG = "sglang"
    VLLM = "vllm"


Server = Annotated[
    list[str],
    typer.Option(
        "--server",
        metavar="URL",
        help="A server's root URL; repeat it for several servers, SGLang's and vLLM's alike.",
    ),
]
Engine = Annotated[
    EngineName,
    typer.Option("--engine", help="What the servers are; auto asks each of them."),
]
HowToTravel = Annotated[
    Transport | None,
    typer.Option(
        "--transport",
        help="How the bytes travel: in a process group (broadcast); through memory that servers on "
        "the same GPU, or the same host's CPU, open (ipc); as files that SGLang reads (disk). By "
        "default auto: broadcast, where the servers can take one; the report says why.",
    ),
]
Device = Annotated[
    str,
    typer.Option(
        "--device", help="Where the bytes leave from: cpu (gloo), or cuda or cuda:N (NCCL)."
    ),
]
Json = Annotated[
    bool, typer.Option("--json", help="JSON on standard output, and nothing else there.")
]
Timeout = Annotated[
    float,
    typer.Option(
        "--timeout",
        metavar="SECONDS",
        min=0.1,
        help="Time for the update or the diagnosis; before an update, servers are asked what they "
        "are and what they have, for as long at most and never over 20 s each.",
    ),
]
MasterAddress = Annotated[
    str | None,
    typer.Option(
        "--master-address",
        metavar="ADDRESS",
        help="Address of this host that the servers reach; by default the one that routes to them.",
    ),
]
MasterPort = Annotated[
    int | None,
    typer.Option(
        "--master-port",
        metavar="PORT",
        help="Port that they come to, vLLM's of a mixed set to the next; by default a free one.",
    ),
]
CaFile = Annotated[
    Path | None,
    typer.Option(
        "--ca-file",
        metavar="FILE",
        exists=True,
        dir_okay=False,
        help="Certificate authority to check https:// servers against.",
    ),
]
Pause = Annotated[
    PauseMode | None,
    typer.Option(
        "--pause-mode",
        help="What happens to requests in flight: recomputed (retract, the default), frozen "
        "(in_place: they go on with their old KV cache), or ended early (abort).",
    ),
]
