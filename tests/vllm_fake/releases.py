"""What the releases that are imitated differ in, as far as a gloo group shows it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Release:
    """One release.

    Attributes:
        version: Its number.
        missing: Routes that it does not have yet.
    """

    version: str
    missing: frozenset[str] = frozenset()


RELEASES = {
    "0.27.1": Release("0.27.1", frozenset({"/shutdown_weight_transfer_engine", "/weight_checker"})),
    "0.32.0": Release("0.32.0"),
}
#: Keys of the library's own gloo backend; another one, or a missing one, is an error.
INIT_KEYS = {"master_address", "master_port", "rank_offset", "world_size", "group_name", "packed"}
UPDATE_KEYS = {"names", "dtype_names", "shapes"}
