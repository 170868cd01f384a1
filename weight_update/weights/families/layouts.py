"""How checkpoints of model families differ from the modules that transformers builds: a table."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

Rename = tuple[str, str]
"""A regular expression, and what every match of it in a name is replaced by."""


@dataclass(frozen=True)
class Stack:
    """A tensor that holds a matrix of each expert of a layer.

    Attributes:
        name: How its name ends in the module.
        parts: The projections that an expert's rows hold, from the first row on, in equal shares.

    Example:
        >>> stack = Stack(".mlp.experts.gate_up_proj", ("gate_proj", "up_proj"))
        >>> stack.part("model.layers.0.mlp.experts.gate_up_proj", 7, "up_proj")
        'model.layers.0.mlp.experts.7.up_proj.weight'
    """

    name: str
    parts: tuple[str, ...]

    def part(self, name: str, expert: int, part: str) -> str:
        """The checkpoint's name of an expert's projection."""
        return f"{name.rpartition('.')[0]}.{expert}.{part}.weight"


@dataclass(frozen=True)
class Layout:
    """What a checkpoint has under other names, or in another form, than the module.

    The names are those of the module in transformers 5. Modules of transformers 4 have the
    checkpoint's names already where nothing here matches.

    Attributes:
        stacks: Stacked experts that the checkpoint holds one by one.
        kept: How the names of stacked experts end that the checkpoint holds as they are.
        swapped: How the names of stacked experts end whose matrices published checkpoints (and
            transformers 4) have transposed. ``save_pretrained`` of transformers 5 does not
            transpose them back; engines expect it.
        renames: Renames, wherever in a name.
        outer: Renames of the whole model's names; they do not hold where it is a part of another.
    """

    stacks: tuple[Stack, ...] = ()
    kept: tuple[str, ...] = ()
    swapped: tuple[str, ...] = ()
    renames: tuple[Rename, ...] = ()
    outer: tuple[Rename, ...] = ()

    def stack_of(self, name: str) -> Stack | None:
        """The rule that splits a tensor."""
        return next((stack for stack in self.stacks if name.endswith(stack.name)), None)

    def renamed(self, name: str) -> str:
        """A name of the module as the checkpoint has it."""
        for pattern, replacement in (*self.renames, *self.outer):
            name = re.sub(pattern, replacement, name)
        return name


def layout_of(config: Any) -> Layout | None:
    """The layout for a transformers configuration and those inside it.

    Returns:
        None where the family has no entry: then the checkpoint has the module's names, unless
        experts are stacked.
    """
    own = LAYOUTS.get(config.model_type)
    if own is None:
        return None
    found = [*filter(None, map(layout_of, _parts(config))), own]
    return Layout(
        stacks=tuple(stack for layout in found for stack in layout.stacks),
        kept=tuple(name for layout in found for name in layout.kept),
        swapped=tuple(name for layout in found for name in layout.swapped),
        renames=tuple(rename for layout in found for rename in layout.renames),
        outer=own.outer,
    )


def _parts(config: Any) -> list[Any]:
    parts = (part for part in vars(config).values() if not isinstance(part, type))
    return [part for part in parts if isinstance(getattr(part, "model_type", None), str)]


def _stacks(block: str, gate: str, up: str, down: str) -> tuple[Stack, ...]:
    return (
        Stack(f".{block}.experts.gate_up_proj", (gate, up)),
        Stack(f".{block}.experts.down_proj", (down,)),
    )


_QWEN = Layout(stacks=_stacks("mlp", "gate_proj", "up_proj", "down_proj"))
_MIXTRAL = Layout(
    stacks=_stacks("mlp", "w1", "w3", "w2"),
    renames=((r"\.mlp\.(?=experts\.|gate\.|e_score_)", ".block_sparse_moe."),),
)
_PHIMOE = Layout(
    stacks=_MIXTRAL.stacks,
    renames=((r"\.mlp\.router\.", ".mlp.gate."), *_MIXTRAL.renames),
)
_FUSED = Layout(kept=(".experts.gate_up_proj", ".experts.down_proj"))
_GRANITE = Layout(
    kept=(*_FUSED.kept, ".input_linear.weight", ".output_linear.weight"),
    renames=(
        (r"\.block_sparse_moe\.experts\.gate_up_proj$", ".block_sparse_moe.input_linear.weight"),
        (r"\.block_sparse_moe\.experts\.down_proj$", ".block_sparse_moe.output_linear.weight"),
        (r"\.block_sparse_moe\.router\.weight$", ".block_sparse_moe.router.layer.weight"),
    ),
)
_LLAVA = Layout(
    outer=(
        (r"^model\.language_model\.", "language_model.model."),
        (r"^lm_head\.", "language_model.lm_head."),
        (r"^model\.", ""),
    )
)
_QWEN2_VL = Layout(
    outer=((r"^model\.language_model\.", "model."), (r"^model\.visual\.", "visual."))
)
# Published checkpoints of the families that hold such a tower have this level of names. A model
# that was loaded from one is saved with it; one that was never loaded is saved without.
_TOWER = Layout(renames=((r"(^|\.)((?:vision|image|video)_tower)\.(?!vision_model\.)",
                          r"\1\2.vision_model."),))  # fmt: skip

LAYOUTS: dict[str, Layout] = {
    **dict.fromkeys(
        (
            *("qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_5_moe", "qwen3_5_moe_text"),
            *("qwen3_omni_moe_thinker", "deepseek_v2", "deepseek_v3", "deepseek_v32"),
            *("glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "glm4v_moe", "dots1", "longcat_flash"),
            *("olmoe", "flex_olmo", "hunyuan_v1_moe", "afmoe", "cohere2_moe", "solar_open"),
            "mellum",
        ),
        _QWEN,
    ),
    "ernie4_5_moe": Layout(_QWEN.stacks, renames=((r"\.gate\.moe_statics\.", ".moe_statics."),)),
    "exaone_moe": Layout(
        _QWEN.stacks, renames=((r"\.gate\.e_score_correction_bias$", ".e_score_correction_bias"),)
    ),
    "mimo_v2_flash": Layout(
        _QWEN.stacks, renames=((r"\.self_attn\.sinks$", ".self_attn.attention_sink_bias"),)
    ),
    "axk1": Layout(
        _QWEN.stacks, renames=((r"\.mlp\.post_mlp_layernorm\.", ".post_mlp_layernorm."),)
    ),
    "laguna": Layout(
        _QWEN.stacks,
        renames=(
            (r"\.gate\.e_score_correction_bias$", ".experts.e_score_correction_bias"),
            (r"\.mlp\.shared_experts\.", ".mlp.shared_expert."),
        ),
    ),
    "hy_v3": Layout(
        _QWEN.stacks,
        renames=(
            (r"\.mlp\.gate\.weight$", ".mlp.router.gate.weight"),
            (r"\.mlp\.e_score_correction_bias$", ".mlp.expert_bias"),
            (r"\.mlp\.shared_experts\.", ".mlp.shared_mlp."),
        ),
    ),
    **dict.fromkeys(("mixtral", "minimax", "minimax_m2"), _MIXTRAL),
    "phimoe": _PHIMOE,
    "lfm2_moe": Layout(_stacks("feed_forward", "w1", "w3", "w2")),
    "jamba": Layout(_stacks("feed_forward", "gate_proj", "up_proj", "down_proj")),
    "nemotron_h": Layout(
        (
            Stack(".mixer.experts.up_proj", ("up_proj",)),
            Stack(".mixer.experts.down_proj", ("down_proj",)),
        ),
        outer=((r"^model\.", "backbone."),),
    ),
    **dict.fromkeys(("gpt_oss", "llama4", "llama4_text", "mistral4", "zaya"), _FUSED),
    "jetmoe": Layout(kept=(".experts.input_linear.weight", ".experts.output_linear.weight")),
    **dict.fromkeys(("granitemoe", "granitemoeshared", "granitemoehybrid"), _GRANITE),
    "qwen3_vl_moe": Layout(swapped=_FUSED.kept),
    **dict.fromkeys(
        (
            *("llava", "llava_next", "llava_next_video", "llava_onevision", "video_llava"),
            *("vipllava", "paligemma", "gemma3", "mistral3", "internvl", "aya_vision"),
            *("got_ocr2", "pp_chart2table", "mllama", "fuyu"),
        ),
        _LLAVA,
    ),
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl"), _QWEN2_VL),
    **dict.fromkeys(("clip_vision_model", "siglip_vision_model"), _TOWER),
    "cohere2_vision": Layout(),
    "gpt_neox": Layout(outer=((r"^lm_head\.", "embed_out."),)),
}
"""By `model_type`. Held to what `save_pretrained` writes by tests/weights/families."""
