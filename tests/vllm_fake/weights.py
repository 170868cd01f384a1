"""The weights of a fake: a checkpoint's names, the modules that fuse them, and layerwise reload.

A module is put aside when an update starts, collects what arrives, and is made of that once it is
complete. What of it never arrived is whatever lay in memory: NaN here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

HIDDEN, VOCABULARY, LAYERS = 8, 16, 2
_FUSED = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}
_ALONE = ("self_attn.o_proj", "mlp.down_proj")
_NORMS = ("input_layernorm", "post_attention_layernorm")


def checkpoint(seed: int) -> dict[str, torch.Tensor]:
    """The weights of a tiny model, under the names of a checkpoint and in its order."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator)
        for parts in modules().values()
        for name, shape in parts.items()
    }


def signature(weights: Mapping[str, torch.Tensor]) -> str:
    """What a server that holds these weights generates."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(name.encode() + weights[name].float().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def modules() -> dict[str, dict[str, tuple[int, ...]]]:
    """Names and shapes of the weights that each module of the server is made of."""
    square = (HIDDEN, HIDDEN)
    found = {"embed": {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        for module, parts in _FUSED.items():
            names = {f"{prefix}.{part}.weight": square for part in parts}
            found[f"{prefix}.{module}"] = dict(names)
        for module in _ALONE:
            found[f"{prefix}.{module}"] = {f"{prefix}.{module}.weight": square}
        for module in _NORMS:
            found[f"{prefix}.{module}"] = {f"{prefix}.{module}.weight": (HIDDEN,)}
    found["norm"] = {"model.norm.weight": (HIDDEN,)}
    found["lm_head"] = {"lm_head.weight": (VOCABULARY, HIDDEN)}
    return found


@dataclass
class Module:
    """One module of the served model.

    Attributes:
        shapes: Of the weights that it is made of.
        values: What it computes with.
        aside: What it computed with before the update that is under way; None when none is.
        arrived: What came for it, good or bad, in this update.
    """

    shapes: Mapping[str, tuple[int, ...]]
    values: dict[str, torch.Tensor]
    aside: dict[str, torch.Tensor] | None = None
    arrived: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    good: int = 0

    @property
    def on_meta(self) -> bool:
        """Whether it has no weights to compute with."""
        return self.aside is not None

    def put_aside(self) -> None:
        """Begins to collect; one that a failed update left open goes on where it was."""
        if self.aside is None:
            self.aside, self.arrived, self.good = dict(self.values), [], 0

    def load(self, name: str, value: torch.Tensor) -> None:
        """Takes a weight; a wrong shape fails, and stays among what arrived."""
        if not self.on_meta:
            return  # a module that is complete ignores what else comes
        self.arrived.append((name, value))
        if value.shape != self.shapes[name]:
            raise RuntimeError(
                f"start (0) + length ({value.shape[0]}) exceeds dimension size "
                f"({self.shapes[name][0]})."
            )
        self.good += value.numel()
        if self.good >= sum(torch.Size(shape).numel() for shape in self.shapes.values()):
            self.make()

    def make(self) -> None:
        """Makes it of what arrived."""
        made = {name: torch.full(shape, float("nan")) for name, shape in self.shapes.items()}
        for name, value in self.arrived:
            made[name].copy_(value)  # a wrong shape fails here once more
        self._settle(made)

    def put_back(self) -> None:
        """Makes it of what it was."""
        assert self.aside is not None
        self._settle(self.aside)

    def _settle(self, values: dict[str, torch.Tensor]) -> None:
        self.values, self.aside, self.arrived, self.good = values, None, [], 0


class Model:
    """The served model."""

    def __init__(self, weights: Mapping[str, torch.Tensor]) -> None:
        self._modules = {
            module: Module(shapes, {name: weights[name].clone() for name in shapes})
            for module, shapes in modules().items()
        }
        self._of = {name: m for m in self._modules.values() for name in m.shapes}

    @property
    def on_meta(self) -> bool:
        """Whether some of it has no weights to compute with."""
        return any(module.on_meta for module in self._modules.values())

    def weights(self) -> dict[str, torch.Tensor]:
        """All weights, by the checkpoint's names."""
        return {n: v for module in self._modules.values() for n, v in module.values.items()}

    def begin(self) -> None:
        """Puts all modules aside."""
        for module in self._modules.values():
            module.put_aside()

    def load(self, name: str, value: torch.Tensor) -> None:
        """Takes a weight.

        Raises:
            ValueError: No module has it.
            RuntimeError: It has another shape.
        """
        if name not in self._of:
            raise ValueError(f"There is no module or parameter named {name!r} in FakeForCausalLM.")
        self._of[name].load(name, value.float())

    def finish(self) -> None:
        """Makes every module: of what arrived, or of what it was where nothing did."""
        for module in self._modules.values():
            if module.on_meta and module.good:
                module.make()
            elif module.on_meta:
                module.put_back()
