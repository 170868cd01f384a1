"""Names of a push against the names that a server shows for its weights: pure functions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weight_update.facts import Digests, NameCheck

# Architectures whose loaders and fused names were read in SGLang's source; of others, a name
# that does not fit may be one that they fuse or rename in a way not known here.
_KNOWN = {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
# Those that put "model." before names that lack it.
_PREFIXING = {"Qwen3ForCausalLM"}
# Start arguments under which a server's weights have other names inside.
_RENAMING = ("quantization", "enable_lora", "speculative_algorithm")
_FUSED = (
    (re.compile(r"\.(?:q|k|v)_proj\."), ".qkv_proj."),
    (re.compile(r"\.(?:gate|up)_proj\."), ".gate_up_proj."),
)
# Loaders compute rotary tables themselves, and no digest covers the scales of a KV cache.
_APART = re.compile(r"rotary_emb\.|\.(?:k|v|kv)_scale$")
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@dataclass(frozen=True)
class RuntimeNames:
    """The names of a server's weights.

    Attributes:
        names: Fused as the server fuses them.
        tied: Whether its output layer is its embedding.
    """

    names: frozenset[str]
    tied: bool


def runtime_names(digests: Digests) -> RuntimeNames:
    """The names in an answer; ranks hold parts of the same weights.

    Example:
        >>> runtime_names(Digests(({"lm_head.weight": "a", "norm": "b"},))).tied
        False
        >>> runtime_names(Digests(({"norm": "b"},))).tied
        True
    """
    names = frozenset(name for rank in digests.ranks for name in rank)
    # A server that ties shows no output layer, or a copy of its embedding.
    tied = all(_HEAD not in rank or rank[_HEAD] == rank.get(_EMBEDDING) for rank in digests.ranks)
    return RuntimeNames(names, tied)


def are_names_known(info: Mapping[str, Any], architectures: Iterable[str]) -> bool:
    """Whether the names that a server tells are those of its model, fused in a way known here.

    Args:
        info: Its start arguments.
        architectures: Those of its model.
    """
    return not any(info.get(name) for name in _RENAMING) and not _KNOWN.isdisjoint(architectures)


def check_names(
    names: Sequence[str], runtime: RuntimeNames, architectures: Iterable[str]
) -> NameCheck:
    """What a server of a known architecture makes of the names of a push.

    Example:
        >>> runtime = RuntimeNames(frozenset({"a.qkv_proj.weight", "norm"}), tied=True)
        >>> check_names(["a.q_proj.weight", "x"], runtime, ["LlamaForCausalLM"])
        NameCheck(known=True, unknown=('x',), lacking=('norm',))
    """
    prefixes = not _PREFIXING.isdisjoint(architectures)
    unknown, lacking = compare_names(names, runtime.names, tied=runtime.tied, prefixes=prefixes)
    return NameCheck(True, tuple(unknown), tuple(lacking))


def compare_names(
    names: Iterable[str], runtime: frozenset[str], *, tied: bool = False, prefixes: bool = False
) -> tuple[list[str], list[str]]:
    """Names that the server does not have, and its own that no name brings.

    Args:
        names: The checkpoint's.
        runtime: The server's, fused as it fuses them.
        tied: Whether the model ties its output layer to its embedding.
        prefixes: Whether the server puts ``model.`` before a name that lacks it.

    Example:
        >>> compare_names(["a.q_proj.weight", "x"], frozenset({"a.qkv_proj.weight", "norm"}))
        (['x'], ['norm'])
    """
    homes = {name: _home(name, runtime, prefixes) for name in names}
    unknown = {name for name, home in homes.items() if home not in runtime}
    lacking = runtime - set(homes.values())
    return _loaded(unknown, tied), _loaded(lacking, tied)


def _home(name: str, runtime: frozenset[str], prefixes: bool) -> str:
    if prefixes and name.startswith(("layers.", "embed_tokens.", "norm.")):
        name = f"model.{name}"
    if name in runtime:
        return name
    for pattern, fused in _FUSED:
        name = pattern.sub(fused, name)
    return name


def _loaded(names: Iterable[str], tied: bool) -> list[str]:
    """Without what loads in a way of its own, and without a tied output layer."""
    loaded = (name for name in names if not _APART.search(name))
    return sorted(name for name in loaded if not (tied and name.endswith(_HEAD)))
