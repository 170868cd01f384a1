"""What each rank of a tensor parallel model holds, and how the parts come together."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

# The dimension along which a layer's tensors are divided: 0 by output, 1 by input. Layers
# that are not named are whole on every rank.
_DIVIDED = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), 0),
    **dict.fromkeys(("embed_tokens", "lm_head"), 0),
    **dict.fromkeys(("o_proj", "down_proj"), 1),
}

Cut = tuple[int, int, int]


@dataclass(frozen=True)
class Shard:
    """One rank's share of a model.

    Args:
        rank: Whose share.
        size: How many ranks share.

    Example:
        >>> Shard(rank=1, size=2).cut("model.layers.0.self_attn.o_proj.weight", [4, 8])
        (1, 4, 4)
    """

    rank: int = 0
    size: int = 1

    def cut(self, name: str, shape: list[int]) -> Cut | None:
        """Return dimension, start and length of this share of a tensor; None if all of it.

        Raises:
            ValueError: The tensor cannot be divided.
        """
        dimension = _DIVIDED.get(name.split(".")[-2])
        if self.size == 1 or dimension is None:
            return None
        if dimension >= len(shape) or shape[dimension] % self.size:
            raise ValueError(f"{name} {shape} cannot be divided among {self.size} ranks")
        length = shape[dimension] // self.size
        return dimension, self.rank * length, length

    def divide(self, model: Any) -> None:
        """Keep this share's room of each parameter, and join the parts where layers end.

        Raises:
            ValueError: A tensor cannot be divided, or the heads cannot.
        """
        if self.size == 1:
            return
        if heads := model.config.num_key_value_heads % self.size:
            raise ValueError(f"{heads} key-value heads are left over with {self.size} ranks")
        for path, module in model.named_modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                if cut := self.cut(f"{path}.{name}", list(parameter.shape)):
                    part = parameter.narrow(*cut).contiguous()
                    setattr(module, name, torch.nn.Parameter(part, requires_grad=False))
            self._join(path.rpartition(".")[2], module)

    def _join(self, kind: str, module: Any) -> None:
        if kind in ("o_proj", "down_proj"):
            module.register_forward_hook(lambda _, __, output: _sum(output))
        elif kind == "lm_head":
            module.register_forward_hook(lambda _, __, output: self._side_by_side(output))
        elif kind == "embed_tokens":
            module.forward = partial(self._look_up, module)

    def _look_up(self, module: Any, ids: torch.Tensor) -> torch.Tensor:
        rows = module.weight.shape[0]
        local = ids - self.rank * rows
        foreign = (local < 0) | (local >= rows)
        found = F.embedding(local.masked_fill(foreign, 0), module.weight)
        return _sum(found.masked_fill(foreign[..., None], 0))

    def _side_by_side(self, output: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(output) for _ in range(self.size)]
        dist.all_gather(parts, output.contiguous())
        return torch.cat(parts, dim=-1)


def _sum(output: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(output)
    return output
