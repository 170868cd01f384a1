"""A scheme that TorchRL's collectors can drive."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from concurrent.futures import wait
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import nn
from torchrl import logger as torchrl_logger
from torchrl.weight_update import WeightSyncScheme

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
from weight_update.collectors.counting import Counters, Remote
from weight_update.collectors.remote_counting import receivers_in, register
from weight_update.collectors.self_counting import self_counting
from weight_update.collectors.torchrl_adapter import Given, HookedScheme, end_with, schemes_of
from weight_update.collectors.worker_counting import WorkerEnds, count_at, pipes
from weight_update.errors import ConfigurationError, WeightUpdateError
from weight_update.options import Strategy
from weight_update.report import UpdateReport
from weight_update.waiting import spawn
from weight_update.weights.extract import device_of

# Leaving a group takes a request to each server, which may be gone.
_END_SECONDS = 10.0


class CollectorScheme(HookedScheme):
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
        super().__init__(strategy)
        self._here = Counters()

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
        context = self.context

        def prepared() -> Any:
            return self.prepare_weights(weights, self.model_id, self.strategy, context)

        self.tell(lambda: self.sender_transports[0].update(prepared, self._count_elsewhere))

    def tell(self, push: Callable[[], UpdateReport]) -> None:
        """Runs an update, and tells whoever listens."""
        push()

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
        register(self._here, context)
        return self._here.count(version)

    def shutdown(self) -> None:
        """Gives the group up, and stops counting; safe to call twice.

        The scheme may be given to another collector afterwards.
        """
        for transport in self.transports:
            transport.shutdown()
        self._close_channels()
        self._here.clear()
        self.let_go()
        super().shutdown()

    def __getstate__(self) -> dict[str, Any]:
        own = dict.fromkeys(("_training_model", "_remote", "_end"))
        return {**super().__getstate__(), **own, "_here": Counters()}

    def begin(self, given: Given) -> None:
        """Takes note of the collector, and of who makes its frames."""
        context = given.context
        if given.ctx is not None:
            refuse_stand_in(context)
        self._close_channels()
        self.model_id = given.model_id or "policy"
        self.model = None  # an earlier collector's
        self.synchronized_on_sender = False
        if context is not None:
            self.context = context
        if self._trained() is None and has_weights(given.model):
            self._training_model = weakref.ref(given.model)
        if not self.transports:
            self.take_transport(self._followed_transport())
        self._workers = _workers_of(given)
        if _counts_versions(context, self.model_id):
            self._reach(given)
        if given.remote_collectors is None and context is not None:
            end_with(context, _end_schemes_of)

    def _reach(self, given: Given) -> None:
        name, actors = type(given.context).__name__, given.remote_collectors
        if given.ctx is not None:
            self._remote, self._worker_ends = pipes(given.ctx, given.context.num_workers, name)
        elif actors is not None:  # a function that holds `given` would keep the collector alive
            self._remote = receivers_in(lambda: actors, self.model_id, name)

    def join_servers(self) -> None:
        """Makes the group."""
        if self._worker_ends is not None:
            self._worker_ends.close()  # the workers were started, and have them
        transport = self.sender_transports[0]
        if not transport.check_connection():
            transport.setup_connection_and_weights_on_sender()

    def begin_in_worker(self, given: Given) -> None:
        """Takes note of who counts here, and of where versions are told."""
        context, model = given.context, given.model
        self.model_id = given.model_id or "policy"
        self.worker_idx = given.worker_idx
        self.model = model
        if self._worker_ends is not None:
            self._end = self._worker_ends.take(given.worker_idx)
        if context is not None:
            self.context = context
            register(self._here, context)
        _warn_of_own_weights(model_in(context, self.model_id) if model is None else model)

    def listen(self) -> None:
        """Starts to count in a worker."""
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


def _workers_of(given: Given) -> int:
    if given.ctx is not None:
        return int(given.context.num_workers)
    return len(given.remote_collectors or [given.context])


def _end_schemes_of(collector: Any) -> None:
    """Has a collector's schemes give up what they hold."""
    ours = [s for s in schemes_of(collector).values() if isinstance(s, CollectorScheme)]
    # A collector that outlives the program is dropped by an interpreter that starts no threads.
    ending = [] if sys.is_finalizing() else [s for s in ours if s.context in (collector, None)]
    # Threads, since the garbage collector may call this amid an update of theirs.
    wait([spawn(s.shutdown) for s in ending], _END_SECONDS)


def _refuse_second(scheme: CollectorScheme, driven: Any) -> None:
    """Raises ConfigurationError for a collector that was handed what drives another one.

    TorchRL's ``Collector`` uses a scheme that is in use without a word to it.
    """
    for collector in self_counting():
        holds = schemes_of(collector).values()
        if collector is not driven and any(one is scheme for one in holds):
            raise ConfigurationError(
                f"the scheme drives another {type(driven).__name__} already, whose workers or "
                "environments would not count this update",
                phase="plan",
                remedy="give each collector a scheme of its own, or register them with one sender",
            )


def _counts_versions(collector: Any, model_id: str) -> bool:
    """Whether updates of this model move the version: the policy's do, or the only one's."""
    schemes = schemes_of(collector) or {model_id: None}
    return model_id == ("policy" if "policy" in schemes else next(iter(schemes)))


def _warn_of_own_weights(policy: Any) -> None:
    if has_weights(policy):
        torchrl_logger.warning(
            f"the {type(policy).__name__} of this worker has weights of its own, which are never "
            "updated: the scheme updates servers, and counts for policies that sample from them"
        )
