"""SGLang, on the trainer's own GPUs or on others.

NeMo-RL's own policy and generation are taken as they are; what they are asked for, in order, is
what :mod:`weight_update.update.procedure` does: layout, pause, begin, send, end, flush, continue.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from weight_update.errors import ConfigurationError, MissingSetting, WeightUpdateError
from weight_update.synchronizers.base import ColocatedSynchronizer, DeliverySynchronizer
from weight_update.synchronizers.exchange import Exchange, Refit, verdicts_of
from weight_update.synchronizers.quantization import check_scheme
from weight_update.synchronizers.resolve import resolve
from weight_update.waiting import Deadline


@dataclass(frozen=True)
class Layout:
    """Which engines there are, and where.

    Attributes:
        engines: The engines.
        new: How many of them the policy is not connected to.
        gpu_counts: GPUs of each.
        gpu_offsets: The first GPU of each.
        lock: What holds the engines for one refit; None where there is none.
    """

    engines: Any
    new: int
    gpu_counts: Any
    gpu_offsets: Any
    lock: Any = None


class SGLangExchange(Exchange):
    """What both placements share: the engines' layout, and the session around the transfer."""

    holds = True
    receives = "begin_weight_update"

    def __init__(self, policy: Any, generation: Any, timeout_s: float | None = None) -> None:
        super().__init__(policy, generation, timeout_s)
        self.mode = getattr(generation, "pause_generation_mode", "retract")
        self.layout = Layout([], 0, [], [])

    def check(self) -> None:
        """Raises unless it is known how the engines quantise weights."""
        quantization_of(self.generation)

    def recover(self) -> None:
        """Has dead engines restarted, where the generation is configured to."""
        if restarts_engines(self.generation):
            self.wait(self.generation.recover_updatable_engines(), "plan")

    def look(self) -> bool:
        """Asks which engines there are; whether the policy is not connected to some."""
        self.layout = layout_of(self.generation, Deadline(self.patience))
        return self.layout.new > 0

    def connect(self, *, again: bool) -> None:
        """Connects the policy to new engines, or anew where the connection was given up."""
        if self.layout.new > 0 or again:
            self.wait(self._connect(), "connect")
            self.wait(self.generation.clear_updatable_num_new_engines(), "connect")

    def pause(self) -> None:
        """Pauses generation, by its own mode."""
        mode = getattr(self.generation, "pause_generation_mode", self.mode)
        self.wait(self.generation.pause_generation(mode=mode), "pause")

    def begin(self) -> None:
        """Opens the engines' update."""
        self.wait(self.generation.begin_weight_update(), "begin")

    def transfer(self, refit: Refit, deadline: Deadline) -> None:
        """Has the policy send all buckets, and waits for all its workers."""
        quantization = quantization_of(self.generation)
        sent = self._send(
            rollout_engines=self.layout.engines,
            buffer_size_bytes=refit.buffer_bytes,
            target_precision=quantization["scheme"],
            sglang_quantization_cfg=quantization,
        )
        results = verdicts_of(resolve(sent, deadline))
        refused = [result for result in results if result is not None and not result]
        if refused or (self.layout.engines and not results):
            what = "refused to send" if refused else "sent anything"
            who = f"{len(refused)} of the policy's workers" if refused else "no worker"
            raise WeightUpdateError(f"{who} {what}", phase="transfer")

    def end(self) -> None:
        """Ends the engines' update."""
        self.wait(self.generation.end_weight_update(), "end")

    def invalidate(self) -> bool:
        """Empties the KV cache; whether that was done."""
        return bool(self.wait(self.generation.invalidate_kv_cache(), "flush"))

    def resume(self) -> None:
        """Continues generation."""
        self.wait(self.generation.continue_generation(), "continue")

    @abstractmethod
    def _connect(self) -> Any:
        """Has the policy connect to the engines."""

    @abstractmethod
    def _send(self, **how: Any) -> Any:
        """Has the policy's workers send."""


class ColocatedExchange(SGLangExchange):
    """Each rank of the policy hands memory to the engine on its own GPU."""

    sends = "update_weights_to_sglang_colocated"

    def _connect(self) -> Any:
        return self.policy.connect_sglang_rollout_engines(
            engine_gpu_counts=self.layout.gpu_counts,
            engine_gpu_offsets=self.layout.gpu_offsets,
        )

    def _send(self, **how: Any) -> Any:
        return self.policy.update_weights_to_sglang_colocated(**how)


class DisaggregatedExchange(SGLangExchange):
    """The policy broadcasts over SGLang's own weight-update group."""

    sends = "update_weights_to_sglang_distributed"

    def _connect(self) -> Any:
        return self.policy.connect_sglang_rollout_engines_distributed(
            rollout_engines=self.layout.engines,
            engine_gpu_counts=self.layout.gpu_counts,
        )

    def _send(self, **how: Any) -> Any:
        lock = getattr(self.generation, "rollout_engine_lock", self.layout.lock)
        return self.policy.update_weights_to_sglang_distributed(rollout_engine_lock=lock, **how)


class SGLangColocatedWeightSynchronizer(ColocatedSynchronizer):
    """The trainer and SGLang share GPUs; see :class:`ColocatedSynchronizer` for the steps."""

    def _exchange(self) -> Exchange:
        return ColocatedExchange(self.policy, self.generation, self._refit_timeout_s)


class SGLangDisaggregatedWeightSynchronizer(DeliverySynchronizer):
    """SGLang has GPUs of its own: the trainer keeps all its memory.

    Prepare weights, update, prepare the KV cache; the last runs after a failure too.
    """

    def _exchange(self) -> Exchange:
        return DisaggregatedExchange(self.policy, self.generation, self._refit_timeout_s)

    @contextmanager
    def _phases(self) -> Iterator[None]:
        self._carrier.recover()
        with self._restoring(self._prepare_kv_cache):
            self._carrier.together(self._prepare_weights)
            yield


def layout_of(generation: Any, deadline: Deadline) -> Layout:
    """Asks which engines there are, by whichever of two methods answers.

    Newer generations answer with four items, older ones with a lock as the second of five. What
    comes back tells, and not whether there is a method.

    Raises:
        ConfigurationError: Neither answers so.
    """
    for method in ("get_updatable_engines", "get_updatable_engines_and_lock"):
        ask = getattr(generation, method, None)
        answer = None if ask is None else resolve(ask(), deadline, "plan")
        if not isinstance(answer, (list, tuple)):
            continue
        if len(answer) == 4:
            return Layout(*answer)
        if len(answer) == 5:
            engines, lock, new, counts, offsets = answer
            return Layout(engines, new, counts, offsets, lock)
    raise ConfigurationError(
        f"{type(generation).__name__} does not say which engines there are",
        phase="plan",
        remedy="it needs get_updatable_engines() or get_updatable_engines_and_lock()",
    )


def quantization_of(generation: Any) -> dict[str, Any]:
    """How the engines quantise weights, by NeMo-RL's configuration.

    Raises:
        MissingSetting: It says nothing.
        ConfigurationError: It is none that SGLang takes.
    """
    try:
        settings = dict(generation.sglang_cfg["sglang_cfg"]["quantization"])
        scheme = settings["scheme"]
    except KeyError as error:
        raise MissingSetting(
            f"sglang_cfg has no {error}: quantization and its scheme are required",
            phase="plan",
            remedy="set sglang_cfg.quantization.scheme, 'bf16' for weights as they are",
        ) from error
    check_scheme(scheme)
    return settings


def restarts_engines(generation: Any) -> bool:
    """Whether NeMo-RL's configuration has dead engines restarted before a refit."""
    try:
        settings = generation.sglang_cfg["sglang_cfg"]["sglang_fault_tolerance_config"]
        return settings["use_fault_tolerance"] is True
    except (KeyError, TypeError):
        return False
