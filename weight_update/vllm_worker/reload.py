"""The model of a vLLM worker, loaded layer by layer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from weight_update.vllm_worker.shared_update import Views

# An attribute of a worker: the layers that hold weights of updates that were not completed.
_OWED = "weight_update_owed"


class LayerwiseReload:
    """The model of a vLLM worker, under vLLM's own reload, layer by layer.

    Each layer waits until all of its weights came; they are then processed as at the start, and
    copied to where the layer was. One that got none is put back. So what has no weights, or not
    all, holds the old ones, and kernels find everything where it was.

    Args:
        worker: The worker.
    """

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._model: torch.nn.Module = worker.model_runner.get_model()
        self._owed: set[str] = vars(worker).setdefault(_OWED, set())

    def begin(self) -> bool:
        """Opens an update; one that somebody left open is closed first."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        left_open = self.put_back() > 0
        with self._configured():
            initialize_layerwise_reload(self._model)
        return left_open or bool(self._owed)

    def load(self, weights: Views) -> None:
        """Loads some weights; layers that wait for more keep copies."""
        lent: set[int] = set()

        def noted() -> Iterator[tuple[str, torch.Tensor]]:
            for name, weight in weights:
                lent.add(weight.untyped_storage().data_ptr())
                yield name, weight

        with self._configured(), some_of_a_model():
            self._model.load_weights(noted())  # type: ignore[operator]
        for _, info in self._named():
            for _, call in info.loaded_weights:
                keep(call.arguments, lent)

    def complete(self) -> None:
        """Closes the update."""
        renewed = {name for name, info in self._named() if info.load_numel or not info.can_load()}
        self._finalize()
        runner = self._worker.model_runner
        if hasattr(runner, "reset_lora_state"):  # 0.27 has none
            runner.reset_lora_state()
        self._owed -= renewed

    def undo(self) -> bool:
        """Puts old weights back; returns whether some weights of the update stay."""
        changed = {name for name, info in self._named() if not info.can_load()}
        self._owed |= changed
        self.put_back()
        return bool(changed)

    def put_back(self) -> int:
        """Puts old weights back into every layer that is not whole yet; returns how many wait."""
        waiting = [info for _, info in self._named() if info.can_load()]
        for info in waiting:
            info.load_numel = 0  # what came for it would be taken for all of it
            info.loaded_weights.clear()
        if waiting:
            self._finalize()
        return len(waiting)

    def _finalize(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        with self._configured():
            finalize_layerwise_reload(self._model, self._worker.model_config)

    def _named(self) -> Iterator[tuple[str, Any]]:
        """What vLLM knows of each layer: one that can load waits for weights."""
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        return ((name, get_layerwise_info(layer)) for name, layer in self._model.named_modules())

    def _configured(self) -> AbstractContextManager[Any]:
        from vllm.config import set_current_vllm_config

        context: AbstractContextManager[Any] = set_current_vllm_config(self._worker.vllm_config)
        return context


def keep(arguments: dict[str, Any], lent: set[int]) -> None:
    """Copies what lies in memory that was only lent.

    Args:
        arguments: Of a call that a layer makes when all of its weights came.
        lent: Where the memory begins that others will write.
    """
    for name, value in arguments.items():
        real = isinstance(value, torch.Tensor) and not value.is_meta
        if real and value.untyped_storage().data_ptr() in lent:
            arguments[name] = value.clone()


def some_of_a_model() -> AbstractContextManager[Any]:
    """In it, a loader is content with some weights of a model, where a release minds."""
    try:
        from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
    except ImportError:
        return nullcontext()
    context: AbstractContextManager[Any] = disable_mtp_completeness_check()
    return context
