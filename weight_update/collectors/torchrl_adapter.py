"""What TorchRL's collectors need of a scheme, and every torchrl name beyond the public ones.

| name | why it is needed |
|---|---|
| ``_init_on_sender_impl`` | the hook of ``init_on_sender``; the base class has none that works |
| ``_init_on_receiver_impl`` | the same for workers |
| ``_setup_connection_and_weights_on_sender_impl`` | the hook of ``connect``, likewise |
| ``_setup_connection_and_weights_on_receiver_impl`` | the same for workers |
| ``_register_worker_sender`` | ``sender_transports`` is filled by it alone |
| ``_sender_transports``, ``_receiver_transport`` | pickled by the base; ours drops them |
| ``_initialized_on_sender`` | nothing else lets a scheme be given to another collector |
| ``collector._weight_sync_schemes`` | ``LLMCollector`` is given none; who of several counts |
| ``RayLLMCollector._collector`` | the handle of its actor: who is busy must not be waited for |
| ``collector._receiver_schemes`` | where ``cascade_execute`` finds what counts in an actor |
| ``collector.__class__`` | only ``RayCollector`` tells its schemes that it shuts down |
| ``SGLangWrapper._process_generation_results`` | there alone an answer meets its sample |
| ``_WEIGHT_SYNC_SCHEMES`` | whether ``from_backend()`` has a name already, which is left alone |

All are alike in 0.13.3 and 0.14.1, but for ``_WEIGHT_SYNC_SCHEMES``, which 0.13.3 lacks.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable
from concurrent.futures import wait
from contextlib import suppress
from functools import cache
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import torch
from tensordict import TensorDictBase
from torch import nn
from torchrl import logger as torchrl_logger
from torchrl.weight_update import WeightSyncScheme, weight_sync_schemes

from weight_update.collectors.collector_weights import (
    are_given,
    gone_model,
    has_weights,
    is_extracted_from,
    model_in,
    named_in,
    refuse_one_a_worker,
    refuse_stand_in,
    refuse_unknown_workers,
)
from weight_update.collectors.counting import Counters, Remote, is_handle
from weight_update.collectors.remote_counting import Actors
from weight_update.collectors.self_counting import self_counting
from weight_update.collectors.worker_counting import WorkerEnds, count_at, pipes
from weight_update.errors import ConfigurationError, WeightUpdateError
from weight_update.options import Strategy
from weight_update.waiting import spawn
from weight_update.weights.extract import device_of

__all__ = [
    "AnswersHook",
    "CollectorScheme",
    "drive",
    "is_driven",
    "register_backend",
    "torchrl_logger",
]

# Leaving a group takes a request to each server, which may be gone.
_END_SECONDS = 10.0

SchemeClass = TypeVar("SchemeClass", bound="type[WeightSyncScheme]")


def register_backend(name: str) -> Callable[[SchemeClass], SchemeClass]:
    """Has ``WeightSyncScheme.from_backend(name)`` make a class, where torchrl has that (0.14).

    A name that torchrl has given away itself is left as it is.
    """

    def register(cls: SchemeClass) -> SchemeClass:
        enter = getattr(weight_sync_schemes, "register_weight_sync_backend", None)
        owner = getattr(weight_sync_schemes, "_WEIGHT_SYNC_SCHEMES", {}).get(name)
        if enter is not None and getattr(owner, "__module__", cls.__module__) == cls.__module__:
            enter(name)(cls)
        return cls

    return register


class CollectorScheme(WeightSyncScheme):  # type: ignore[misc]
    """A scheme that a collector can drive: one transport to the servers, no receivers.

    ``weight_sync_schemes={"policy": scheme}`` works with ``Collector``, ``MultiSyncCollector``,
    ``MultiAsyncCollector`` and ``RayCollector``: the group is made with the collector, and
    ``collector.update_policy_weights_()`` sends the registered training model, or the collector's
    own policy when none was registered, once for all workers. Workers and actors get a copy of
    the scheme as configuration; there it only counts, so that frames carry the version.

    A scheme drives one collector at a time: one that was shut down may be followed by another.
    """

    _training_model: weakref.ref[nn.Module] | None = None
    _model_was_named = False
    _workers = 1
    _remote: Remote | None = None
    _worker_ends: WorkerEnds | None = None
    _end: Connection | None = None

    def __init__(self, strategy: Strategy) -> None:
        with warnings.catch_warnings():
            # It warns of TorchRL's own extraction, which this scheme does not use.
            warnings.filterwarnings("ignore", message="state_dict strategy is experimental")
            super().__init__(strategy)
        self._here = Counters()

    def attach(self, collector: Any) -> None:
        """Drives a collector that takes no ``weight_sync_schemes``, as ``LLMCollector``."""
        from weight_update.collectors.llm import attach

        attach(self, collector)

    def register_model(self, model: nn.Module) -> None:
        """Names the training model that collectors' updates send; it is held weakly.

        A collector's own policy is usually a client without parameters.
        """
        self._training_model = weakref.ref(model)
        self._model_was_named = True

    @property
    def model(self) -> Any:
        """The training model if one was registered, else the collector's; None without either."""
        trained = self._trained()
        if trained is not None:
            return trained
        try:
            return super().model
        except AttributeError:  # the collector has no such model
            return None

    @model.setter
    def model(self, model: Any) -> None:
        WeightSyncScheme.model.fset(self, model)

    def prepare_weights(
        self, weights: Any, model_id: str, strategy: Any, context: Any = None
    ) -> Any:
        """Explicit weights first, then the registered model, then the collector's own.

        Words name a model of the collector, as TorchRL has it.

        Raises:
            ConfigurationError: There is nothing to send.
        """
        trained = self._trained()
        if isinstance(weights, str) and weights != model_id:
            return named_in(context, weights)
        if are_given(weights):
            refuse_one_a_worker(weights)
            # RayCollector extracts the model by itself: what it holds is the model, whole.
            whole = trained is not None and is_extracted_from(weights, trained)
            return trained if whole else weights
        if trained is not None:
            return trained
        if self._model_was_named:
            raise gone_model()
        model = model_in(context, model_id)
        if model is not None:
            return model
        raise ConfigurationError(
            f"there are no weights to send: {model_id!r} of the collector has no parameters",
            phase="plan",
            remedy="call scheme.register_model(training_model) before updating",
        )

    def send(self, weights: Any = None, worker_ids: Any = None) -> None:
        """Pushes weights to the servers once, and has workers and actors count.

        They count once every server has the weights, before any continues: no frame of new
        weights carries the old number. A worker that is dead or does not count is warned of.

        Args:
            weights: What to send; None takes the registered model, or the collector's policy.
            worker_ids: Checked, and without meaning beyond that: all workers sample from the same
                servers, so the frames of all have the new version.

        Raises:
            WeightUpdateError: As ``SGLangWeightSender.update_weights`` does.
        """
        if not self.initialized_on_sender or not self.synchronized_on_sender:
            state = "synchronized" if self.initialized_on_sender else "initialized"
            raise ConfigurationError(
                f"Must be {state} on sender before sending weights",
                remedy="a scheme drives the collector that it was given to until one of both is "
                "shut down; give each collector a scheme of its own",
            )
        _refuse_second(self, self.context)
        refuse_unknown_workers(worker_ids, self._workers)
        prepared = self.prepare_weights(weights, self.model_id, self.strategy, self.context)
        self.sender_transports[0].update(lambda: prepared, self._count_elsewhere)

    def connect(self, *, worker_idx: int | None = None, weights: Any = None) -> None:
        """Makes the group with the servers, or starts to count in a worker; once.

        Raises:
            ConfigurationError: It was called before: the scheme drives a collector.
            WeightUpdateError: The servers cannot be reached.
        """
        if self.synchronized_on_sender:
            raise ConfigurationError(
                "Cannot synchronize weights on sender twice: the scheme drives "
                f"{type(self.context).__name__} already",
                remedy="give each collector a scheme of its own, or register them with one sender",
            )
        super().connect(worker_idx=worker_idx, weights=weights)

    def count(self, version: int) -> list[str]:
        """Counts a version beside a collector that makes frames, in a worker or an actor.

        Args:
            version: The version that the engines have now.

        Returns:
            What went wrong, in words.
        """
        context = self.context
        if context is None:
            return ["its collector is gone"]
        self._here.add(context)
        return self._here.count(version)

    def shutdown(self) -> None:
        """Gives the group up, and stops counting; safe to call twice.

        The scheme may be given to another collector afterwards.
        """
        for transport in (getattr(self, "_sender_transports", None) or {}).values():
            transport.shutdown()
        self._close_channels()
        self._here.clear()
        self._initialized_on_sender = self.synchronized_on_sender = False
        super().shutdown()

    def __getstate__(self) -> dict[str, Any]:
        state = dict(super().__getstate__())
        dropped = ("_sender_transports", "_receiver_transport", "_training_model")
        processes_own = ("_remote", "_end")
        return {**state, **dict.fromkeys(dropped + processes_own), "_here": Counters()}

    def _init_on_sender_impl(
        self,
        model_id: str | None = None,
        context: Any = None,
        ctx: Any = None,
        remote_collectors: Any = None,
        model: nn.Module | None = None,
        **ignored: Any,
    ) -> None:
        if ctx is not None:
            refuse_stand_in(context)
        self._close_channels()
        self.model_id = model_id or "policy"
        self.model = None  # an earlier collector's
        self.synchronized_on_sender = False
        if context is not None:
            self.context = context
        if self._trained() is None and model is not None and has_weights(model):
            self._training_model = weakref.ref(model)
        if not self._sender_transports:
            self._register_worker_sender(worker_idx=0, transport=self._followed_transport())
        self._workers = context.num_workers if ctx is not None else len(remote_collectors or [self])
        if _counts_versions(context, self.model_id):
            self._reach(context, ctx, remote_collectors)
        if remote_collectors is None and context is not None:
            _end_schemes_with(context)

    def _reach(self, context: Any, ctx: Any, remote_collectors: Any) -> None:
        name = type(context).__name__
        if ctx is not None:
            self._remote, self._worker_ends = pipes(ctx, context.num_workers, name)
        elif remote_collectors is not None:
            path = count_path(self.model_id)
            self._remote = Actors(
                lambda: remote_collectors,
                lambda handle, version: handle.cascade_execute.remote(path, version),
                name,
            )

    def _setup_connection_and_weights_on_sender_impl(self, **ignored: Any) -> None:
        if self._worker_ends is not None:
            self._worker_ends.close()  # the workers were started, and have them
        transport = self.sender_transports[0]
        if not transport.check_connection():
            transport.setup_connection_and_weights_on_sender()

    def _init_on_receiver_impl(
        self,
        model_id: str | None = None,
        context: Any = None,
        worker_idx: int | None = None,
        model: Any = None,
        **ignored: Any,
    ) -> None:
        self.model_id = model_id or "policy"
        self.worker_idx = worker_idx
        self.model = model
        if self._worker_ends is not None:
            self._end = self._worker_ends.take(worker_idx)
        if context is not None:
            self.context = context
            self._here.add(context)
        _warn_of_own_weights(model_in(context, self.model_id) if model is None else model)

    def _setup_connection_and_weights_on_receiver_impl(self, **ignored: Any) -> None:
        end, self._end = self._end, None
        if end is not None:
            count_at(end, self.count)  # its thread alone closes it: two would close one twice

    def _count_elsewhere(self, version: int) -> list[str]:
        context = self.context
        if self._remote is None or context is None:
            return []
        counters = Counters()
        counters.join(context, self._remote, here=hasattr(context, "increment_version"))
        return counters.count(version)

    def _close_channels(self) -> None:
        for channel in (self._remote, self._worker_ends, self._end):
            if channel is not None:
                channel.close()
        self._remote = self._worker_ends = self._end = None

    def _trained(self) -> nn.Module | None:
        return None if self._training_model is None else self._training_model()

    def _followed_transport(self) -> Any:
        transport = self.create_transport()
        transport.follow(self._device)
        return transport

    def _device(self) -> torch.device | None:
        try:
            return device_of(self.prepare_weights(None, self.model_id, None, self.context))
        except WeightUpdateError:
            return None


def count_path(key: str | None) -> str:
    """Where ``cascade_execute`` finds the ``count`` of what was registered as a receiver."""
    return f"_receiver_schemes[{key!r}].count"


def _end_schemes_with(collector: Any) -> None:
    """Has a collector's schemes give up what they hold when it shuts down.

    It takes a class that overrides ``shutdown`` alone: a function on the instance could reach it
    only by a reference, which would keep it alive or be gone when the garbage collector ends it.
    """
    if not hasattr(collector, "ends_its_schemes"):
        with suppress(TypeError):  # what is not laid out as a collector is left as it is
            collector.__class__ = _ending(collector.__class__)


@cache
def _ending(kind: Any) -> Any:
    def shutdown(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return kind.shutdown(self, *args, **kwargs)
        finally:
            _end_schemes_of(self)

    body = {"shutdown": shutdown, "__module__": kind.__module__, "ends_its_schemes": True}
    return type(kind)(kind.__name__, (kind,), body)


def _end_schemes_of(collector: Any) -> None:
    schemes = getattr(collector, "_weight_sync_schemes", None) or {}
    ours = [s for s in schemes.values() if isinstance(s, CollectorScheme)]
    # A collector that outlives the program is dropped by an interpreter that starts no threads.
    ending = [] if sys.is_finalizing() else [s for s in ours if s.context in (collector, None)]
    # Threads, since the garbage collector may call this amid an update of theirs.
    wait([spawn(s.shutdown) for s in ending], _END_SECONDS)


def _refuse_second(scheme: CollectorScheme, driven: Any) -> None:
    """Raises ConfigurationError for a collector that was handed what drives another one.

    TorchRL's ``Collector`` uses a scheme that is in use without a word to it.
    """
    for collector in self_counting():
        holds = (getattr(collector, "_weight_sync_schemes", None) or {}).values()
        if collector is not driven and any(one is scheme for one in holds):
            raise ConfigurationError(
                f"the scheme drives another {type(driven).__name__} already, whose workers or "
                "environments would not count this update",
                phase="plan",
                remedy="give each collector a scheme of its own, or register them with one sender",
            )


def _counts_versions(collector: Any, model_id: str) -> bool:
    """Whether updates of this model move the version: the policy's do, or the only one's."""
    schemes = getattr(collector, "_weight_sync_schemes", None) or {model_id: None}
    return model_id == ("policy" if "policy" in schemes else next(iter(schemes)))


def _warn_of_own_weights(policy: Any) -> None:
    if has_weights(policy):
        torchrl_logger.warning(
            f"the {type(policy).__name__} of this worker has weights of its own, which are never "
            "updated: the scheme updates servers, and counts for policies that sample from them"
        )


def actor_behind(collector: Any) -> Any:
    """The handle of the actor that a ``RayLLMCollector`` stands for; else what is given.

    Its own ``increment_version()`` waits for an actor that is busy, or is gone.
    """
    handle = getattr(collector, "__dict__", {}).get("_collector")
    return handle if is_handle(handle) else collector


def is_driven(collector: Any) -> bool:
    """Whether ``collector.update_policy_weights_()`` goes through a scheme or an updater."""
    schemes = getattr(collector, "_weight_sync_schemes", None)
    return bool(schemes) or collector.weight_updater is not None


def drive(collector: Any, scheme: CollectorScheme) -> None:
    """Has ``collector.update_policy_weights_()`` go through a scheme that it was not given."""
    collector._weight_sync_schemes = {"policy": scheme}


class AnswersHook:
    """Before ``SGLangWrapper`` among a policy's bases: shows it answers and samples together."""

    def _process_generation_results(
        self,
        results: list[dict[str, Any]],
        text_prompts: list[str],
        out: TensorDictBase,
        history: Any = None,
        tokens_prompt: list[Any] | None = None,
    ) -> TensorDictBase:
        prompts = [torch.tensor(answer["prompt_ids"]) for answer in results]
        made: TensorDictBase = super()._process_generation_results(  # type: ignore[misc]
            results, text_prompts, out, history=history, tokens_prompt=prompts
        )
        self.complete(made, results)
        return made

    def complete(self, out: TensorDictBase, answers: list[dict[str, Any]]) -> None:
        """Adds to a batch of samples what TorchRL leaves out of the engine's answers."""
        raise NotImplementedError
