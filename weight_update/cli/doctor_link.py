"""What NCCL is told on both ends, as far as that can be known."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from weight_update.cli.findings import Finding
from weight_update.engines.intake import nccl_of
from weight_update.engines.probing import ServerFacts

# Set on one side only, they keep NCCL from connecting; on both, they leave it the network.
_ONE_SIDED = ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE")


def link_findings(server: ServerFacts, ours: Mapping[str, str]) -> Iterator[Finding]:
    """Settings that NCCL may fail over; a server on the CPU has none.

    Args:
        server: The server.
        ours: The settings of this process.
    """
    theirs = nccl_of(server.info)
    if not theirs:
        return
    disabled = [f"{name}={ours[name]}" for name in _ONE_SIDED if ours.get(name, "0") != "0"]
    if disabled:
        yield Finding(
            "warning",
            f"this process has {', '.join(disabled)}: NCCL fails unless the server was started "
            "with the same, and is many times slower if it was",
            server.url,
            "unset it here, and on the server",
        )
    here = ", ".join(f"{name}={value}" for name, value in ours.items()) or "none"
    there = ", ".join(f"{name}={value}" for name, value in theirs.items())
    yield Finding(
        "unknown",
        f"whether NCCL is told the same on both ends: here {here}; the server sets {there} "
        "unless its environment does, which it does not tell",
        server.url,
    )
