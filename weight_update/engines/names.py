"""Names of a push against those that an engine has for its weights: pure functions."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

Rename = tuple[str, str]
FUSED: tuple[Rename, ...] = (
    (r"\.(?:q|k|v)_proj\.", ".qkv_proj."),
    (r"\.(?:gate|up)_proj\.", ".gate_up_proj."),
)
HEAD = "lm_head.weight"
# Buffers that models make themselves (rotary tables, positions, Gemma's factors), and the scales
# of a KV cache, which no digest covers.
_APART = re.compile(
    r"rotary_(?:pos_)?emb\.|\.(?:(?:k|v|kv)_scale|position_ids|gemma_weight|normalizer)$"
)


@dataclass(frozen=True)
class Loader:
    """What a model class of the engine does with names; read in its source, or seen.

    Attributes:
        renames: How a name that is not among the engine's own becomes one of them.
        prefixes: Whether it puts ``model.`` before names that lack it.
        drafts: Whether it skips layers beyond its last: they are those of a draft model.
    """

    renames: tuple[Rename, ...] = FUSED
    prefixes: bool = False
    drafts: bool = False


def compare_names(
    names: Iterable[str],
    runtime: frozenset[str],
    *,
    tied: bool = False,
    loader: Loader = Loader(),
) -> tuple[list[str], list[str]]:
    """Names that the engine does not have, and its own that no name brings.

    Args:
        names: The checkpoint's.
        runtime: The engine's: fused as it fuses them, or those of the checkpoint that it loaded.
        tied: Whether the model ties its output layer to its embedding.
        loader: What the engine does with names.

    Example:
        >>> compare_names(["a.q_proj.weight", "x"], frozenset({"a.qkv_proj.weight", "norm"}))
        (['x'], ['norm'])
    """
    homes = {name: _home(name, runtime, loader) for name in names}
    unknown = {name for name, home in homes.items() if home not in runtime}
    if loader.drafts:
        last = max(map(_layer, runtime), default=0)
        unknown = {name for name in unknown if _layer(name) <= last}
    lacking = runtime - set(homes.values())
    return _loaded(unknown, tied), _loaded(lacking, tied)


def _layer(name: str) -> int:
    found = re.search(r"\.layers\.(\d+)\.", name)
    return -1 if found is None else int(found[1])


def _home(name: str, runtime: frozenset[str], loader: Loader) -> str:
    if loader.prefixes and name.startswith(("layers.", "embed_tokens.", "norm.")):
        name = f"model.{name}"
    for pattern, replacement in loader.renames:
        if name in runtime:
            break
        name = re.sub(pattern, replacement, name)
    return name


def _loaded(names: Iterable[str], tied: bool) -> list[str]:
    """Without what loads in a way of its own, and without a tied output layer."""
    loaded = (name for name in names if not _APART.search(name))
    return sorted(name for name in loaded if not (tied and name.endswith(HEAD)))
