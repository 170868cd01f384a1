"""The options that ``push`` alone has."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from weight_update.cli import options

CheckpointDir = Annotated[
    Path,
    typer.Argument(
        metavar="CHECKPOINT",
        help="Folder with safetensors, as save_pretrained writes it, or a file with a state_dict.",
    ),
]
DryRun = Annotated[
    bool,
    typer.Option("--dry-run", help="Say what would be sent and what doctor finds; send nothing."),
]
CastTo = Annotated[
    options.CastTo | None,
    typer.Option(
        "--dtype",
        help="Cast floating weights on the way; engine means to what the servers compute with. "
        "By default as stored.",
    ),
]
NameMap = Annotated[
    list[str] | None,
    typer.Option(
        "--name-map",
        metavar="REGEX=REPLACEMENT",
        help="Rename weights: every match of the regular expression is replaced. Repeat it for "
        "more; they are applied in order. The last = divides.",
    ),
]
TrimVocabulary = Annotated[
    bool,
    typer.Option(
        "--trim-vocabulary",
        help="Cut off rows of the embedding and the output layer beyond the servers' vocabulary.",
    ),
]
CheckFinite = Annotated[
    bool,
    typer.Option(
        "--check-finite",
        help="Look at every value before anything is paused, and refuse NaN and infinity. Reads "
        "the checkpoint once more.",
    ),
]
BucketBytes = Annotated[
    int | None,
    typer.Option(
        "--bucket-bytes",
        metavar="BYTES",
        min=1,
        help="Weights of one request; two buckets are held in memory. By default it is chosen from "
        "the memory that is free; the report says how large it was.",
    ),
]
Directory = Annotated[
    Path | None,
    typer.Option(
        "--directory",
        metavar="DIR",
        file_okay=False,
        help="Where --transport disk writes; the servers must see it under the same path. By "
        "default this host's memory, if all servers run here.",
    ),
]
Check = Annotated[
    bool,
    typer.Option(
        "--check/--no-check",
        help="First compare names and shapes with what the servers say they have, and refuse what "
        "does not fit: SGLang itself may take it without a word.",
    ),
]
Quorum = Annotated[
    int | None,
    typer.Option(
        "--quorum",
        metavar="N",
        min=1,
        help="How many servers must take it; those that fail are left out and reported. By "
        "default all must.",
    ),
]
Verify = Annotated[
    options.Verify | None,
    typer.Option(
        "--verify",
        help="How servers prove, before they continue, that they hold what was sent: digests of "
        "all weights, some weights read back, or whatever they can do (auto, the default; off "
        "with --no-check).",
    ),
]
