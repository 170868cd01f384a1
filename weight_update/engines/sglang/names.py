"""Names of a push against the names that a server shows for its weights: pure functions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weight_update.facts import Digests, NameCheck

_Rename = tuple[str, str]
_FUSED: tuple[_Rename, ...] = (
    (r"\.(?:q|k|v)_proj\.", ".qkv_proj."),
    (r"\.(?:gate|up)_proj\.", ".gate_up_proj."),
)
_EXPERTS: tuple[_Rename, ...] = (
    (r"\.experts\.\d+\.(?:gate_proj|up_proj|w1|w3)\.", ".experts.w13_"),
    (r"\.experts\.\d+\.(?:down_proj|w2)\.", ".experts.w2_"),
    *_FUSED,
)
_STACKED: tuple[_Rename, ...] = (
    (r"\.experts\.gate_up_proj(_bias)?$", r".experts.w13_weight\1"),
    (r"\.experts\.down_proj(_bias)?$", r".experts.w2_weight\1"),
    *_FUSED,
)
_LATENT = (r"\.(?:q_a_proj|kv_a_proj_with_mqa)\.", ".fused_qkv_a_proj_with_mqa.")
# On GPUs a shared expert is one more of the others. (The first finds `gate_proj` and `up_proj` as
# `_FUSED` has left them.)
_SHARED: tuple[_Rename, ...] = (
    (r"\.shared_experts\.gate_up_proj\.", ".experts.w13_"),
    (r"\.shared_experts\.down_proj\.", ".experts.w2_"),
)
_GRANITE: tuple[_Rename, ...] = (
    (r"\.input_linear\.", ".experts.w13_"),
    (r"\.output_linear\.", ".experts.w2_"),
    (r"\.router\.layer\.", ".gate."),
    *_FUSED,
)
_VISION = (r"\.attn\.qkv\.", ".attn.qkv_proj.")
_NESTED: tuple[_Rename, ...] = (
    (r"^model\.language_model\.", "model."),
    (r"^model\.visual\.", "visual."),
    _VISION,
)
_GEMMA3 = (r"^(vision_tower\..*\.self_attn)\.out_proj\.", r"\1.proj.")


@dataclass(frozen=True)
class Loader:
    """What a model class of the server does with names; read in its source, or seen.

    Attributes:
        renames: How a name that is not among the server's own becomes one of them.
        prefixes: Whether it puts ``model.`` before names that lack it.
        drafts: Whether it skips layers beyond its last: they are those of a draft model.
    """

    renames: tuple[_Rename, ...] = _FUSED
    prefixes: bool = False
    drafts: bool = False


# Of other architectures, a name that does not fit may be one that they fuse or rename in a way
# not known here. Held to SGLang's own classes by tests/engines/test_families.py.
_LOADERS = {
    **dict.fromkeys(("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM"), Loader()),
    "Qwen3ForCausalLM": Loader(prefixes=True),
    **dict.fromkeys(("Gemma2ForCausalLM", "Gemma3ForCausalLM"), Loader()),
    **dict.fromkeys(("PhiForCausalLM", "Phi3ForCausalLM"), Loader()),
    **dict.fromkeys(
        (
            *("Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM", "OlmoeForCausalLM"),
            *("MixtralForCausalLM", "PhiMoEForCausalLM"),
        ),
        Loader(_EXPERTS),
    ),
    "GptOssForCausalLM": Loader(_STACKED),
    "GraniteMoeForCausalLM": Loader(_GRANITE),
    "DeepseekV3ForCausalLM": Loader((*_EXPERTS, _LATENT, *_SHARED), drafts=True),
    **dict.fromkeys(
        ("Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"),
        Loader((_VISION, *_FUSED)),
    ),
    "Qwen3VLForConditionalGeneration": Loader((*_NESTED, *_FUSED)),
    "Qwen3VLMoeForConditionalGeneration": Loader((*_NESTED, *_STACKED)),
    "Gemma3ForConditionalGeneration": Loader((_GEMMA3, *_FUSED)),
}
# Start arguments under which a server's weights have other names inside.
_RENAMING = ("quantization", "enable_lora", "speculative_algorithm")
# Buffers that models make themselves (rotary tables, positions, Gemma's factors), and the scales
# of a KV cache, which no digest covers.
_APART = re.compile(
    r"rotary_(?:pos_)?emb\.|\.(?:(?:k|v|kv)_scale|position_ids|gemma_weight|normalizer)$"
)
# What only a quantised weight has; of experts, behind `w13_` or `w2_`.
_QUANTISED = re.compile(
    r"\.(?:w13_|w2_)?(?:weight_scale(?:_inv)?|input_scale|scales|qweight|weight_packed)$"
)
_MULTIMODAL = "ForConditionalGeneration"
_TOWER = re.compile(r"(?:^|\.)(?:visual|vision_\w+|image_tower|multi_modal_projector)\.")
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


def sign_of_quantisation(names: Iterable[str]) -> str | None:
    """A name that only a quantised weight has, or None.

    Example:
        >>> sign_of_quantisation(["a.weight", "a.weight_scale_inv"])
        'a.weight_scale_inv'
        >>> sign_of_quantisation(["a.weight", "attn.k_scale"]) is None
        True
    """
    return next((name for name in names if _QUANTISED.search(name)), None)


def without_scales(names: Iterable[str]) -> list[str]:
    """Names without those of blocks' scales: SGLang's digests fold these into their weights.

    Example:
        >>> without_scales(["a.weight", "a.weight_scale_inv"])
        ['a.weight']
    """
    return [name for name in names if not name.endswith("weight_scale_inv")]


def are_names_known(info: Mapping[str, Any], architectures: Iterable[str]) -> bool:
    """Whether the names that a server tells are those of its model, fused in a way known here.

    Args:
        info: Its start arguments.
        architectures: Those of its model.
    """
    return not any(info.get(name) for name in _RENAMING) and loader_of(architectures) is not None


def check_names(
    names: Sequence[str], runtime: RuntimeNames, architectures: Iterable[str]
) -> NameCheck:
    """What a server of a known architecture makes of the names of a push.

    Example:
        >>> runtime = RuntimeNames(frozenset({"a.qkv_proj.weight", "norm"}), tied=True)
        >>> check_names(["a.q_proj.weight", "x"], runtime, ["LlamaForCausalLM"])
        NameCheck(known=True, unknown=('x',), lacking=('norm',), remark='')
    """
    loader = loader_of(architectures) or Loader()
    unknown, lacking = compare_names(names, runtime.names, tied=runtime.tied, loader=loader)
    remark = remark_on(names, runtime.names, architectures) if unknown or lacking else ""
    return NameCheck(True, tuple(unknown), tuple(lacking), remark)


def remark_on(names: Iterable[str], runtime: Iterable[str], architectures: Iterable[str]) -> str:
    """What to make of a text-only push to a server of a vision-language model.

    Returns:
        Empty unless the server has a vision tower, and the names have none.

    Example:
        >>> runtime = ["visual.blocks.0.norm1.weight", "model.norm.weight"]
        >>> remark_on(["model.norm.weight"], runtime, ["Qwen2VLForConditionalGeneration"])
        "the server runs Qwen2VLForConditionalGeneration, with weights under 'model.', 'visual.'; \
the names, under 'model.', are those of a text-only model (...ForCausalLM)"
    """
    kind = next((name for name in architectures if name.endswith(_MULTIMODAL)), None)
    if kind is None or any(map(_TOWER.search, names)) or not any(map(_TOWER.search, runtime)):
        return ""
    return (
        f"the server runs {kind}, with weights under {_heads(runtime)}; the names, under "
        f"{_heads(names)}, are those of a text-only model (...ForCausalLM)"
    )


def _heads(names: Iterable[str]) -> str:
    heads = sorted({name.partition(".")[0] for name in names})
    return ", ".join(f"'{head}.'" for head in heads)


def compare_names(
    names: Iterable[str],
    runtime: frozenset[str],
    *,
    tied: bool = False,
    loader: Loader = Loader(),
) -> tuple[list[str], list[str]]:
    """Names that the server does not have, and its own that no name brings.

    Args:
        names: The checkpoint's.
        runtime: The server's, fused as it fuses them.
        tied: Whether the model ties its output layer to its embedding.
        loader: What the server does with names.

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


def loader_of(architectures: Iterable[str]) -> Loader | None:
    """What is known of the first architecture that something is known of."""
    return next((_LOADERS[name] for name in architectures if name in _LOADERS), None)


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
    return sorted(name for name in loaded if not (tied and name.endswith(_HEAD)))
