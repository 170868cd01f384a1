"""Names of a push against the names that a server shows for its weights: pure functions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weight_update.engines.names import FUSED, HEAD, Loader, Rename, compare_names
from weight_update.facts import Digests, NameCheck

_EXPERTS: tuple[Rename, ...] = (
    (r"\.experts\.\d+\.(?:gate_proj|up_proj|w1|w3)\.", ".experts.w13_"),
    (r"\.experts\.\d+\.(?:down_proj|w2)\.", ".experts.w2_"),
    *FUSED,
)
_STACKED: tuple[Rename, ...] = (
    (r"\.experts\.gate_up_proj(_bias)?$", r".experts.w13_weight\1"),
    (r"\.experts\.down_proj(_bias)?$", r".experts.w2_weight\1"),
    *FUSED,
)
_LATENT = (r"\.(?:q_a_proj|kv_a_proj_with_mqa)\.", ".fused_qkv_a_proj_with_mqa.")
# On GPUs a shared expert is one more of the others. (The first finds `gate_proj` and `up_proj` as
# `FUSED` has left them.)
_SHARED: tuple[Rename, ...] = (
    (r"\.shared_experts\.gate_up_proj\.", ".experts.w13_"),
    (r"\.shared_experts\.down_proj\.", ".experts.w2_"),
)
_GRANITE: tuple[Rename, ...] = (
    (r"\.input_linear\.", ".experts.w13_"),
    (r"\.output_linear\.", ".experts.w2_"),
    (r"\.router\.layer\.", ".gate."),
    *FUSED,
)
_VISION = (r"\.attn\.qkv\.", ".attn.qkv_proj.")
_NESTED: tuple[Rename, ...] = (
    (r"^model\.language_model\.", "model."),
    (r"^model\.visual\.", "visual."),
    _VISION,
)
_GEMMA3 = (r"^(vision_tower\..*\.self_attn)\.out_proj\.", r"\1.proj.")

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
        Loader((_VISION, *FUSED)),
    ),
    "Qwen3VLForConditionalGeneration": Loader((*_NESTED, *FUSED)),
    "Qwen3VLMoeForConditionalGeneration": Loader((*_NESTED, *_STACKED)),
    "Gemma3ForConditionalGeneration": Loader((_GEMMA3, *FUSED)),
}
# Start arguments under which a server's weights have other names inside.
_RENAMING = ("quantization", "enable_lora", "speculative_algorithm")
# What only a quantised weight has; of experts, behind `w13_` or `w2_`.
_QUANTISED = re.compile(
    r"\.(?:w13_|w2_)?(?:weight_scale(?:_inv)?|input_scale|scales|qweight|weight_packed)$"
)
_MULTIMODAL = "ForConditionalGeneration"
_TOWER = re.compile(r"(?:^|\.)(?:visual|vision_\w+|image_tower|multi_modal_projector)\.")
_EMBEDDING = "model.embed_tokens.weight"


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
    tied = all(HEAD not in rank or rank[HEAD] == rank.get(_EMBEDDING) for rank in digests.ranks)
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


def loader_of(architectures: Iterable[str]) -> Loader | None:
    """What is known of the first architecture that something is known of."""
    return next((_LOADERS[name] for name in architectures if name in _LOADERS), None)
