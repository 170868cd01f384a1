"""Start an SGLang HTTP server with LoRA on a CPU; arguments as for `launch_sglang_cpu.py`.

SGLang keeps its LoRA bookkeeping in pinned memory, which torch has only beside an accelerator
and refuses without one. Pinned or not, the values are the same, so here torch is made to leave
memory as it is where it is asked to pin it. Nothing of SGLang is changed.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any

import launch_sglang_cpu  # also what makes SGLang importable here
import torch

LORA_ARGUMENTS = ["--enable-lora", "--lora-backend", "torch_native"]


def _pageable(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> torch.Tensor:
        kwargs.pop("pin_memory", None)
        return make(*args, **kwargs)

    return made


for name in ("tensor", "empty", "zeros"):
    setattr(torch, name, _pageable(getattr(torch, name)))
torch.Tensor.pin_memory = lambda tensor, *_: tensor  # type: ignore[assignment,method-assign]


if __name__ == "__main__":
    launch_sglang_cpu.main(LORA_ARGUMENTS + sys.argv[1:])
