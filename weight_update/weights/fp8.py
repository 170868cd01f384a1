"""Weights for an fp8 block-quantised engine: eight-bit values, and a scale for each block."""

from __future__ import annotations

from math import ceil

import torch
from torch.nn import functional

from weight_update.errors import ConfigurationError
from weight_update.facts import Intake
from weight_update.weights.specs import TensorSpec, Weight

DTYPE = torch.float8_e4m3fn
SCALE = "_scale_inv"
"""What is added to the name of a weight to name its scales."""

_LARGEST = torch.finfo(DTYPE).max
# Rows are quantised in runs of about as many elements: the work needs 8 bytes for each.
_RUN_ELEMENTS = 16 << 20
# Modules with a matrix that is no linear layer, or one that checkpoints never quantise.
_PLAIN = frozenset(
    {
        *("lm_head", "embed_tokens", "wte", "wpe", "word_embeddings", "embed_out", "embed_in"),
        *("gate", "router", "shared_expert_gate", "score", "classifier", "weights_proj"),
    }
)


def is_quantised(spec: TensorSpec, intake: Intake) -> bool:
    """Whether a block-quantised engine holds a weight as fp8 and scales.

    Its checkpoint says so where that can be read here. Elsewhere it is every linear layer but
    those that its configuration leaves out, the output layer and routers.

    Example:
        >>> intake = Intake(quantization="fp8", block=(128, 128), unconverted=("visual",))
        >>> def quantised(name):
        ...     return is_quantised(TensorSpec(name, torch.bfloat16, (256, 256)), intake)
        >>> quantised("model.layers.0.mlp.up_proj.weight"), quantised("lm_head.weight")
        (True, False)
        >>> quantised("model.visual.blocks.0.attn.proj.weight")
        False
    """
    if intake.scaled is not None:
        return spec.name in intake.scaled
    module, _, leaf = spec.name.rpartition(".")
    if leaf != "weight" or len(spec.shape) != 2 or module.rpartition(".")[2] in _PLAIN:
        return False
    place = f".{module}."
    return not any(f".{left_out.strip('.')}." in place for left_out in intake.unconverted)


def quantised(weight: Weight, block: tuple[int, int]) -> tuple[Weight, Weight]:
    """The scales of a weight and the weight in fp8; its value is read once for both.

    The scales come first: they are read before the weight in any bucket that holds both.

    Raises:
        ConfigurationError: It is no matrix.
    """
    spec = weight.spec
    if len(spec.shape) != 2:
        raise ConfigurationError(
            f"{spec.name!r} of shape {spec.shape} is no matrix that has a scale for each block",
            phase="plan",
        )
    rows, columns = spec.shape
    grid = (ceil(rows / block[0]), ceil(columns / block[1]))
    halves = _Halves(weight, block)
    scales = weight.derived(TensorSpec(spec.name + SCALE, torch.float32, grid), halves.scales)
    # Only the first of the two is announced to other ranks, as only one is read with them.
    value = Weight(TensorSpec(spec.name, DTYPE, spec.shape), weight.device, halves.value)
    return scales, value


class _Halves:
    """One reading, made into two weights that are read one after the other."""

    def __init__(self, weight: Weight, block: tuple[int, int]) -> None:
        self._weight = weight
        self._block = block
        self._rest: torch.Tensor | None = None

    def scales(self) -> torch.Tensor:
        self._rest, scales = block_quantised(self._weight.read(), self._block)
        return scales

    def value(self) -> torch.Tensor:
        rest, self._rest = self._rest, None
        if rest is not None:
            return rest
        if self._weight.turn is not None or self._weight.collective:
            raise RuntimeError(f"{self._weight.spec.name!r} is read before its scales")
        return block_quantised(self._weight.read(), self._block)[0]


@torch.no_grad()
def block_quantised(
    value: torch.Tensor, block: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix in fp8, and the scale that each of its blocks is to be multiplied by.

    Computed in fp32: a block's largest magnitude becomes the largest number of the dtype.

    Example:
        >>> fp8, scales = block_quantised(torch.tensor([[1.0, -2.0], [0.0, 896.0]]), (1, 2))
        >>> fp8.float().tolist(), (448 * scales).tolist()
        ([[224.0, -448.0], [0.0, 448.0]], [[2.0], [896.0]])
    """
    rows, columns = value.shape
    high, wide = block
    quantised = torch.empty(rows, columns, dtype=DTYPE, device=value.device)
    grid = (ceil(rows / high), ceil(columns / wide))
    scales = torch.empty(grid, dtype=torch.float32, device=value.device)
    step = max(1, _RUN_ELEMENTS // max(1, columns) // high)
    for first in range(0, grid[0], step):
        run = slice(first * high, (first + step) * high)
        _quantise(value[run], block, quantised[run], scales[first : first + step])
    return quantised, scales


def _quantise(
    value: torch.Tensor, block: tuple[int, int], quantised: torch.Tensor, scales: torch.Tensor
) -> None:
    rows, columns = value.shape
    padding = (0, -columns % block[1], 0, -rows % block[0])
    padded = functional.pad(value.to(torch.float32), padding)
    grid = (scales.shape[0], block[0], scales.shape[1], block[1])
    blocks = padded.reshape(grid)
    largest = torch.maximum(blocks.amax((1, 3)), -blocks.amin((1, 3)))
    found = largest / _LARGEST
    scales.copy_(torch.where(found == 0, 1.0, found))  # of subnormal numbers it is 0 too
    scaled = (blocks / scales[:, None, :, None]).clamp_(-_LARGEST, _LARGEST)
    quantised.copy_(scaled.flatten(2, 3).flatten(0, 1)[:rows, :columns])
