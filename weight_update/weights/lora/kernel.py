"""The merge on a GPU in one pass: a value is read once, changed in fp32, rounded once, written.

No product of torch's does that: into bf16, its libraries round the product before they add it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # it comes with torch for CUDA
    triton = tl = None

_ROWS, _COLUMNS, _WARPS = 128, 128, 8
_DTYPES = frozenset({torch.bfloat16, torch.float16, torch.float32})

_broken: set[torch.device] = set()
_jit: Callable[[Callable[..., Any]], Any] = triton.jit if triton else lambda function: function


def add_low_rank(
    merged: torch.Tensor, base: torch.Tensor, left: torch.Tensor, right: torch.Tensor, scale: float
) -> bool:
    """Writes ``base + scale * left @ right`` to ``merged``, as exact as fp32 and rounded once.

    The result is the same to the bit whatever torch is set to (TF32, reduced precision), wherever
    ``merged`` lies, and whether all rows are made together or some of them.

    Args:
        merged: The place, contiguous; it may be ``base`` itself.
        base: A matrix, or one for each expert; contiguous.
        left: As many rows.
        right: As many columns.
        scale: Of the product.

    Returns:
        Whether it was done. It is not where there is no GPU of NVIDIA's, no Triton, or no compiler
        for it.
    """
    tensors = (merged, base, left, right)
    if not (merged.is_cuda and _is_there() and all(map(_is_taken, tensors))):
        return False
    if merged.device in _broken or not (merged.is_contiguous() and base.is_contiguous()):
        return False
    try:
        _launch(merged, base, left, right, scale)
    except Exception:
        _broken.add(merged.device)
        logging.getLogger("weight_update").warning(
            "Triton does not work here, so adapters are merged in several passes", exc_info=True
        )
        return False
    return True


def _is_there() -> bool:
    return triton is not None and torch.version.hip is None


def _is_taken(tensor: torch.Tensor) -> bool:
    return type(tensor) is torch.Tensor and tensor.dtype in _DTYPES


def _launch(merged: Any, base: Any, left: Any, right: Any, scale: float) -> None:
    if merged.numel() == 0:
        return
    rows, columns = merged.shape[-2:]
    rank = right.shape[-2]
    experts = merged.shape[0] if merged.ndim == 3 else 1
    one = () if merged.ndim == 3 else (0,)
    tiles = triton.cdiv(rows, _ROWS) * triton.cdiv(columns, _COLUMNS)
    with torch.cuda.device(merged.device):  # Triton starts kernels on the current one
        _merge_tile[tiles, experts](
            *(merged, base, left, right, scale, rows, columns, rank),
            *(*one, *left.stride(), *one, *right.stride()),
            ROWS=_ROWS,
            COLUMNS=_COLUMNS,
            RANK=16 if rank <= 16 else 32,
            num_warps=_WARPS,
        )


# fmt: off
@_jit
def _merge_tile(  # type: ignore[no-untyped-def]
    merged, base, left, right, scale, rows, columns, rank,
    left_expert, left_row, left_rank, right_expert, right_rank, right_column,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANK: tl.constexpr,
):
    # fmt: on
    across = tl.cdiv(columns, COLUMNS)
    tile, expert = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row = ((tile // across) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = ((tile % across) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)[None, :]
    left += expert * left_expert + row * left_row
    right += expert * right_expert + column * right_column
    product = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for first in range(0, rank, RANK):
        inner = first + tl.arange(0, RANK)
        along, down = inner[None, :], inner[:, None]
        b = tl.load(left + along * left_rank, (row < rows) & (along < rank), 0.0)
        a = tl.load(right + down * right_rank, (down < rank) & (column < columns), 0.0)
        product = _add_product(product, b, a)
    inside = (row < rows) & (column < columns)
    place = (expert * rows + row) * columns + column
    value = tl.load(base + place, inside, 0.0).to(tl.float32) + scale * product
    tl.store(merged + place, value.to(merged.dtype.element_ty), inside)


@_jit
def _add_product(product, b, a):  # type: ignore[no-untyped-def]
    """Tensor cores multiply bf16 exactly and add up in fp32, and three bf16 hold one fp32.

    Left out are products of parts that are too small to be seen in fp32.
    """
    b1, b2, b3 = _in_three(b)
    a1, a2, a3 = _in_three(a)
    product = tl.dot(b1, a3, product)
    product = tl.dot(b2, a2, product)
    product = tl.dot(b3, a1, product)
    product = tl.dot(b1, a2, product)
    product = tl.dot(b2, a1, product)
    return tl.dot(b1, a1, product)


@_jit
def _in_three(value):  # type: ignore[no-untyped-def]
    value = value.to(tl.float32)
    first = value.to(tl.bfloat16)
    rest = value - first.to(tl.float32)
    second = rest.to(tl.bfloat16)
    return first, second, (rest - second.to(tl.float32)).to(tl.bfloat16)
