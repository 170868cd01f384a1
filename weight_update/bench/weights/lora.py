"""What reading a LoRA model costs, beside a merged copy of it, and beside a model without LoRA."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from weight_update.bench.machine import PeakMemory
from weight_update.bench.planning import timed
from weight_update.bench.rows import Pair, Row
from weight_update.transports.broadcast import BucketPacker
from weight_update.weights.buckets import DEFAULT_BUCKET_BYTES, plan_buckets
from weight_update.weights.cargo import Cargo, Terms
from weight_update.weights.extraction_cache import ExtractionCache

_AIM = 1 / 3
_RANK = 16


@dataclass(frozen=True)
class LoraShape:
    """A decoder in bf16, with a LoRA of rank 16 on all of its linear layers."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocabulary: int
    tied: bool

    def build(self, device: torch.device) -> Any:
        """The PEFT model, with arbitrary values and adapters that have an effect."""
        import peft

        settings = peft.LoraConfig(r=_RANK, lora_alpha=2 * _RANK, target_modules="all-linear")
        model = peft.get_peft_model(self._base(device), settings)
        for parameter in model.parameters():
            if parameter.requires_grad:
                torch.nn.init.normal_(parameter, std=0.02)
        return model

    def _base(self, device: torch.device) -> Any:
        from transformers import Qwen2Config, Qwen2ForCausalLM

        config = Qwen2Config(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            tie_word_embeddings=self.tied,
        )
        with torch.device("meta"):
            model = Qwen2ForCausalLM(config).to(torch.bfloat16)
        model.to_empty(device=device)
        model.tie_weights()
        for index, parameter in enumerate(model.parameters()):
            parameter.detach().fill_(1.0 + index % 7)
        return model.eval()


HALF_A_BILLION = LoraShape(24, 896, 4864, 14, 2, 151_936, tied=True)
EIGHT_BILLION = LoraShape(32, 4096, 14_336, 32, 8, 128_256, tied=False)


def lora_rows(
    device: torch.device,
    rounds: int,
    identity: Mapping[str, Any],
    *,
    shape: LoraShape | None = None,
    bucket_bytes: int | None = None,
) -> Iterator[Row]:
    """Reads all merged weights bucket by bucket; as TorchRL does, from a merged copy; and the base.

    Args:
        device: Where the model is.
        rounds: How often both are measured, one after the other.
        identity: What identifies the run.
        shape: The model; None for one of 8B on a GPU, and of 0.5B elsewhere.
        bucket_bytes: As the scheme's; None for its default.
    """
    shape = shape or (EIGHT_BILLION if device.type == "cuda" else HALF_A_BILLION)
    size = bucket_bytes or DEFAULT_BUCKET_BYTES[device.type]
    model = shape.build(device)
    base = _without_adapters(model)
    ours, plain, theirs = (
        _settled(call, device)
        for call in (_Reader(model, device, size), _Reader(base, device, size), _Copier(model))
    )
    extra, their_extra = (_extra_memory(call, device) for call in (ours, theirs))
    ours()  # from now on the model is known
    rounds_of_three = [(timed(ours), timed(plain), timed(theirs)) for _ in range(rounds)]
    settings = asdict(shape) | {"device": str(device), "bucket_bytes": size, "rounds": rounds}
    sizes = [tensor.nbytes for tensor in base.values()]
    job = (
        f"LoRA r={_RANK} on {sum(p.numel() for p in model.parameters()) / 1e9:.1f}B parameters, "
        "merged and packed"
    )
    yield Row(
        job,
        "TorchRL's copy and merge",
        [Pair(mine, copied) for mine, _, copied in rounds_of_three],
        aim=_AIM,
        extra_memory_bytes=extra,
        allowed_memory_bytes=2 * min(size, sum(sizes)) + max(sizes),
        identity={**identity, "settings": settings, "copy_memory_bytes": their_extra},
    )
    yield Row(
        job,
        "the base packed",
        [Pair(mine, unmerged) for mine, unmerged, _ in rounds_of_three],
        identity={**identity, "settings": settings},
    )


def _without_adapters(model: Any) -> dict[str, torch.Tensor]:
    named = model.get_base_model().named_parameters()
    return {name: tensor for name, tensor in named if ".lora_" not in name}


class _Reader:
    """Extracts, plans and packs; one bucket is held while the next is packed, as on the wire."""

    def __init__(self, source: Any, device: torch.device, bucket_bytes: int) -> None:
        self._source = source
        self._size = bucket_bytes
        self._packer = BucketPacker(device)
        self._cache = ExtractionCache()

    def __call__(self) -> None:
        packs = self._packer.format(None, Terms()).packs
        plan = plan_buckets(self._cache.extract(self._source), self._size, packs, even=True)
        self._packer.reserve(plan)
        travelling = Cargo()
        for bucket in plan.buckets:
            packed = self._packer.pack(bucket)
            travelling = packed
        del travelling


class _Copier:
    """TorchRL's way: a copy of the whole model is merged, and its state_dict taken."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __call__(self) -> None:
        copy.deepcopy(self._model).merge_and_unload().state_dict()


def _settled(call: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """The call, with all that it left to a GPU."""

    def whole() -> None:
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return whole


def _extra_memory(call: Callable[[], None], device: torch.device) -> int | None:
    peak = PeakMemory(device)
    call()
    return peak.above()
