"""Models of the shapes that people train, with arbitrary weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

Family = Literal["llama", "moe"]

_FULL_LAYERS: dict[Family, int] = {"llama": 32, "moe": 12}
_EXPERTS = 128
_VALUES_STD = 0.02


@dataclass(frozen=True)
class BigModel:
    """A decoder in bf16 that has the shapes of a well-known one.

    ``llama`` is Llama-3.1-8B: 291 tensors, 16.06 GB. ``moe`` is Qwen3-30B-A3B with 12 of its 48
    layers: 4,719 tensors, 16.2 GB.

    Args:
        family: Which.
        layers: How many layers; None for all of them.
        shrink: All widths are divided by it, for a machine without a GPU.

    Example:
        >>> model = BigModel("llama", layers=2, shrink=32)
        >>> model.config().hidden_size, len(list(model.tensor_names()))
        (128, 21)
        >>> len(list(BigModel("llama").tensor_names())), len(list(BigModel("moe").tensor_names()))
        (291, 4719)
    """

    family: Family
    layers: int | None = None
    shrink: int = 1

    @property
    def depth(self) -> int:
        """Number of layers."""
        return self.layers or _FULL_LAYERS[self.family]

    @property
    def is_whole(self) -> bool:
        """Whether it has the size for which something is promised."""
        return self.depth == _FULL_LAYERS[self.family] and self.shrink == 1

    @property
    def title(self) -> str:
        """What tables call it."""
        name = {"llama": "8B shapes", "moe": "MoE shapes"}[self.family]
        if self.is_whole:
            return name
        return f"{name}, {self.depth} layers" + (f", 1/{self.shrink}" if self.shrink > 1 else "")

    def config(self) -> Any:
        """The transformers configuration."""
        from transformers import LlamaConfig, Qwen3MoeConfig

        if self.family == "llama":
            return LlamaConfig(
                architectures=["LlamaForCausalLM"],
                intermediate_size=14_336 // self.shrink,
                num_key_value_heads=8,
                **self._common(128_256, 4096),
            )
        return Qwen3MoeConfig(
            architectures=["Qwen3MoeForCausalLM"],
            moe_intermediate_size=768 // self.shrink,
            intermediate_size=6144 // self.shrink,
            num_experts=_EXPERTS,
            num_experts_per_tok=8,
            num_key_value_heads=4,
            **self._common(151_936, 2048),
        )

    def _common(self, vocabulary: int, hidden: int) -> dict[str, Any]:
        return {
            "vocab_size": vocabulary // self.shrink,
            "hidden_size": hidden // self.shrink,
            "head_dim": 128 // self.shrink,
            "num_attention_heads": 32,
            "num_hidden_layers": self.depth,
            "tie_word_embeddings": False,
            "dtype": "bfloat16",
        }

    def build(self, device: torch.device) -> Any:
        """The trainer's model."""
        model = self._empty().to_empty(device=device).eval().requires_grad_(False)
        change(model, seed=0)
        return model

    def _empty(self) -> Any:
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(self.config(), dtype=torch.bfloat16)

    @property
    def nbytes(self) -> int:
        """Bytes of all parameters."""
        return sum(parameter.nbytes for parameter in self._empty().parameters())

    def save(self, folder: Path) -> None:
        """Writes what an engine with dummy weights needs, as :meth:`engine_options` names it."""
        self.config().save_pretrained(folder)
        if self.family == "moe":
            shapes = {name: list(shape) for name, shape in self._moe_shapes()}
            (folder / "shapes.json").write_text(json.dumps(shapes))

    def engine_options(self, folder: Path) -> dict[str, Any]:
        """Arguments of a reference engine that holds such a model.

        It knows no experts that are not stacked, which engines hold one by one: it gets
        parameters of those names, without a model around them.
        """
        bag = {"shapes": folder / "shapes.json"} if self.family == "moe" else {}
        return {"model": folder, "dtype": "bfloat16", "load_format": "dummy", **bag}

    def tensor_names(self) -> Iterator[str]:
        """Names of a checkpoint's tensors."""
        if self.family == "moe":
            return (name for name, _ in self._moe_shapes())
        names = [f"self_attn.{part}_proj.weight" for part in "qkvo"]
        names += [f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")]
        names += ["input_layernorm.weight", "post_attention_layernorm.weight"]
        layers = (f"model.layers.{i}.{name}" for i in range(self.depth) for name in names)
        return iter(("model.embed_tokens.weight", *layers, "model.norm.weight", "lm_head.weight"))

    def _moe_shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        config = self.config()
        hidden, embedding = config.hidden_size, (config.vocab_size, config.hidden_size)
        yield "model.embed_tokens.weight", embedding
        for layer in range(self.depth):
            for name, shape in self._moe_layer(config):
                yield f"model.layers.{layer}.{name}.weight", shape
        yield "model.norm.weight", (hidden,)
        yield "lm_head.weight", embedding

    def _moe_layer(self, config: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
        hidden, inner, head = config.hidden_size, config.moe_intermediate_size, config.head_dim
        wide, narrow = 32 * head, config.num_key_value_heads * head
        yield "self_attn.q_proj", (wide, hidden)
        yield "self_attn.k_proj", (narrow, hidden)
        yield "self_attn.v_proj", (narrow, hidden)
        yield "self_attn.o_proj", (hidden, wide)
        yield from ((f"self_attn.{part}_norm", (head,)) for part in "qk")
        yield "mlp.gate", (_EXPERTS, hidden)
        for expert in range(_EXPERTS):
            yield f"mlp.experts.{expert}.gate_proj", (inner, hidden)
            yield f"mlp.experts.{expert}.up_proj", (inner, hidden)
            yield f"mlp.experts.{expert}.down_proj", (hidden, inner)
        yield from ((f"{part}_layernorm", (hidden,)) for part in ("input", "post_attention"))


@torch.no_grad()
def change(model: Any, seed: int) -> None:
    """Gives every parameter random values that it did not have before."""
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    for parameter in model.parameters():
        parameter.normal_(std=_VALUES_STD, generator=generator)
