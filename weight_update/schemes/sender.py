"""The sender: holds the training model and the collectors, and updates the engines."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from weight_update.collectors.collector_weights import gone_model
from weight_update.collectors.counting import Counters
from weight_update.collectors.remote_counting import register
from weight_update.collectors.self_counting import counted_by
from weight_update.delivery.delivery import is_whole, provided
from weight_update.delivery.ranks import refuse_background
from weight_update.errors import ConfigurationError
from weight_update.report import EngineOutcome, ProgressHook, UpdateReport
from weight_update.schemes.hooks import PostHook
from weight_update.schemes.listeners import Listeners
from weight_update.update.background import Background
from weight_update.weights.extract import Metadata, device_of

if TYPE_CHECKING:
    from weight_update.schemes.server_scheme import ServerScheme


class SGLangWeightSender:
    """Pushes a model's weights into the servers of a scheme.

    1. :meth:`register_model` - the training model, held weakly.
    2. :meth:`register_collector` - whose policy version counts the updates.
    3. :meth:`register_post_hook`, :meth:`register_logger` - who hears of each update.
    4. :meth:`update_weights` - makes the group on first use, then updates every server.
    5. :meth:`shutdown` - or use the sender as a context manager.

    Args:
        scheme: The configuration.

    Example:
        >>> from weight_update import SGLangWeightSyncScheme
        >>> with SGLangWeightSyncScheme("http://127.0.0.1:30000").create_sender() as sender:
        ...     sender.register_model(nn.Linear(1, 1))
        ...     sender.version
        0
    """

    def __init__(self, scheme: ServerScheme) -> None:
        self._scheme = scheme
        # One transport for life: what is known of mixed engines must outlive a group.
        self._transport = scheme.create_transport()
        self._model_ref: Callable[[], Any] | None = None
        self._counters = Counters()
        self._listeners = Listeners(scheme.listeners)
        self._background = Background()

    def register_model(self, model: nn.Module | Callable[[], Any]) -> None:
        """Names the model whose weights are sent; a module is held weakly.

        Args:
            model: The module, or a function that returns what to send at each update: for
                trainers that replace their model (by a copy, or another wrapper) as they go.

        Raises:
            ConfigurationError: It is neither, or a module without weights.
        """
        if isinstance(model, nn.Module):
            device_of(model)
            self._model_ref = weakref.ref(model)
        elif callable(model) and not isinstance(model, type):
            self._model_ref = lambda: model
        else:
            raise ConfigurationError(
                f"a torch module is needed, not {type(model).__name__}",
                remedy="register a function that returns it, or pass it to every update_weights()",
            )

    def register_collector(self, collector: Any) -> None:
        """Has ``collector.increment_version()`` called once every server has new weights.

        Registering a collector twice counts once. Every successful update calls it exactly
        once, from a thread of its own, before any server continues, so that no sample of new
        weights carries the old number; a failed update never does. A collector counts from
        where it stands: register it before the first update if its number is to equal the
        engines' labels. Of one with worker processes, and of a ``RayCollector``, those count that
        make its frames; a Ray actor is registered by its handle. A collector in whose own
        update this sender is asked counts by itself.

        Raises:
            ConfigurationError: It has no ``increment_version``, or its workers collect already:
                register it before its first batch.
        """
        register(self._counters, collector)

    def register_post_hook(self, hook: PostHook) -> None:
        """Has a function called after each update that succeeded, once engines generate again.

        Hooks run in the order of their registration, as often as they were registered, in the
        thread that updated: for :meth:`update_weights_async` that of the background. One that
        raises keeps no other from running: the engines have the weights, so the update stands,
        and the report and the log have a warning. They may register hooks and update in turn, but
        not wait for :meth:`update_weights_async`, whose update begins after them.

        Args:
            hook: Called without arguments, as TorchRL's hooks are; one that needs an argument
                gets the :class:`~weight_update.UpdateReport`.

        Raises:
            ConfigurationError: It can be called in neither way, or is of a collector that
                :meth:`register_collector` refuses.
        """
        counted = counted_by(hook)
        if counted is not None:
            self.register_collector(counted)
        else:
            self._listeners.hooks.add(hook)

    def register_logger(self, logger: Any) -> None:
        """Has the numbers of every update written, of failed ones too, at its version as the step.

        :func:`~weight_update.delivery.metrics.metrics_of` says which. A logger that raises, or
        takes longer than a second, is warned of once and holds nothing up: a slow one gets what
        it missed when it is ready. Registering one twice logs once.

        Args:
            logger: One of ``torchrl.record.loggers``, or whatever has their ``log_scalar``; in a
                trainer of several ranks, register it on one.

        Raises:
            ConfigurationError: It has no ``log_scalar``.
        """
        self._listeners.loggers.add(logger)

    def init_all_workers_group(
        self, model_metadata: Metadata | None = None, vllm_engine: Any = None, **ignored: Any
    ) -> None:
        """Makes the group with all servers now rather than at the first update.

        Args:
            model_metadata: Name to (dtype, shape) that every update must match; None follows
                the registered model, whatever becomes of it.
            vllm_engine: TorchRL's trainers pass the engine that they generate with. It is one of
                the scheme's servers by its ``server_url``, or gets nothing, which is warned of.
            **ignored: Ignored likewise.

        Raises:
            WeightUpdateError: See :meth:`SGLangCollectiveTransport.init_all_workers_group`.
        """
        self._scheme.warn_of_stranger(vllm_engine)
        self._transport.init_all_workers_group(model_metadata, device=self._model_device())

    def update_weights(
        self, weights: Any = None, *, progress: ProgressHook | None = None
    ) -> UpdateReport:
        """Brings the weights to every server; returns when all generate with them.

        Takes at most the scheme's ``timeout`` and 2 s; each step gets a share of it. One update
        runs at a time, of this sender and of each server on the part of this host; another waits
        (``when_busy``). In a multi-process trainer whose ranks hold whole models, one rank alone
        calls it. Where they hold parts of one (FSDP, DTensor, ZeRO-3), every rank does: one talks
        to the servers, and all return the same report or raise the same error.

        Names must be those of the checkpoint that the servers loaded. SGLang answers yes to
        names that it does not know and loads nothing for them; where the server's names can be
        known (``verify``), such names are refused before anything is paused. Of a wrapper with
        parts of its own (a value head, say), pass the inner model. A mapping may hold only some
        of the weights; while a server holds mixed ones, it must hold all that the failed update
        may have touched.

        Args:
            weights: A module, a mapping of names to tensors, a TensorDict, a
                :class:`~weight_update.weights.checkpoint.Checkpoint`, a
                :class:`~weight_update.weights.saved_state_dict.SavedStateDict`, an iterator of
                names and tensors (streamed; see
                :class:`~weight_update.weights.stream.Stream`), or a function that returns one
                of these; None takes the registered model.
            progress: Called at the start of each phase and after each bucket that every server
                confirmed, one call at a time, from other threads. It must be quick: servers are
                paused meanwhile. One that raises, or takes longer than a second, is warned of
                and not called again.

        Returns:
            The report: version, bytes, seconds by phase, state of each server, and how they
            proved what they hold. With a quorum, a server that failed is in it too, and in the
            warnings; it is taken back by a full push once it answers.

        Raises:
            WeightUpdateError: Nothing or not everything was updated; its ``report`` says for
                each server what it holds and whether it is paused. Calling again is the way
                on: a full push heals and resumes servers with mixed weights, and one that was
                restarted on its URL is joined again. By kind: ``ConfigurationError`` and
                ``WeightMismatchError`` (before any server was touched), ``EngineRejected``,
                ``EngineUnreachable``, ``UpdateTimeout``.
        """
        return self._heard(
            lambda: self._transport.update(
                lambda: self._model() if weights is None else weights,
                self._counters.for_caller(),
                progress=progress,
            )
        )

    def update_weights_async(
        self,
        weights: Any = None,
        *,
        snapshot: bool = True,
        progress: ProgressHook | None = None,
    ) -> Future[UpdateReport]:
        """Like :meth:`update_weights`, in the background; the newest weights win.

        Updates run one after the other. One that still waits when another is asked for is not
        run any more: its future gets the newer one's report.

        Args:
            weights: As in :meth:`update_weights`.
            snapshot: Whether the weights are copied now, on their device, so that training may
                go on at once. Without, they must not change until the future is done.
            progress: As in :meth:`update_weights`; called from another thread.

        Returns:
            A future of the report. Leaving the ``with`` block waits for it; :meth:`shutdown`
            cancels one that has not begun, and breaks one that runs.
        """
        taken = self._listeners.loggers.now()
        given = provided(self._model() if weights is None else weights)
        refuse_background(given, self._scheme.options.trainer_ranks)
        held = self._transport.snapshot(given) if snapshot else given
        whole, count = is_whole(given), self._counters.for_caller()

        def push() -> UpdateReport:
            return self._transport.update(lambda: held, count, whole=whole, progress=progress)

        return self._background.submit(lambda: self._heard(push, taken))

    def recover(self, weights: Any = None, *, progress: ProgressHook | None = None) -> UpdateReport:
        """Pushes a whole model now, so that every server ends up clean and serving.

        Servers that do not answer (they may be restarting) are waited for, for at most half of
        the scheme's ``timeout``; held ones are healed and resumed.

        Args:
            weights: A module or checkpoint; None takes the registered model.
            progress: As in :meth:`update_weights`.

        Raises:
            WeightUpdateError: As in :meth:`update_weights`.
        """
        given = None if weights is None else provided(weights)
        if given is not None and not is_whole(given):
            raise ConfigurationError(
                f"a whole model is needed, and a {type(given).__name__} may hold some weights",
                phase="plan",
                remedy="pass the module or a Checkpoint",
            )
        source = self._model if given is None else lambda: given
        return self._heard(
            lambda: self._transport.recover(source, self._counters.for_caller(), progress=progress)
        )

    def add_engine(self, url: str) -> None:
        """Adds a server, or a router with its workers; it takes part from the next update on.

        The next update makes a new group, since a group cannot grow; nothing else is done
        again for the servers that were there. Until then the server serves what it has: give it
        no traffic before, or call :meth:`recover`.

        Raises:
            ConfigurationError: It is no URL, or is in the fleet already.
        """
        self._transport.add_engine(url)

    def remove_engine(self, url: str) -> None:
        """Takes a server out, or a router with its workers, and has it drop the group.

        It is left as it is: one that is held paused stays so.

        Raises:
            ConfigurationError: It is not in the fleet, or is the last of it.
        """
        self._transport.remove_engine(url)

    def flush_cache(self) -> bool:
        """Flushes the prefix cache of every server; False if one did not (the log says why)."""
        return self._transport.flush_cache()

    @property
    def engines(self) -> Mapping[str, EngineOutcome]:
        """What is known of each engine, by URL."""
        return self._transport.engines

    @property
    def version(self) -> int:
        """The last version that was counted; before the first, ``initial_version`` or 0."""
        return self._transport.version

    def shutdown(self) -> None:
        """Gives the group up and forgets collectors, hooks, loggers and model; safe to call twice.

        A background update that has not begun is cancelled. A sender that is used again
        afterwards makes a new group.
        """
        self._background.cancel()
        self._transport.shutdown()
        self._model_ref = None
        self._counters.clear()
        self._listeners.clear()

    def __enter__(self) -> SGLangWeightSender:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            self._background.finish(self._transport.timeout)
        self.shutdown()

    def __getstate__(self) -> dict[str, Any]:
        # A sender that crosses a process is configuration: it registers and connects anew.
        own = ("_background", "_counters", "_listeners")
        kept = {k: v for k, v in self.__dict__.items() if k not in own}
        return {**kept, "_model_ref": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._background, self._counters = Background(), Counters()
        self._listeners = Listeners(self._scheme.listeners)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._scheme!r}, version={self.version})"

    def _heard(self, push: Callable[[], UpdateReport], taken: float | None = None) -> UpdateReport:
        return self._listeners.hear(push, self.version, taken)

    def _model(self) -> Any:
        if self._model_ref is None:
            raise ConfigurationError(
                "No model registered (or the sender was shut down since)",
                phase="plan",
                remedy="call register_model(), or pass weights",
            )
        model = self._model_ref()
        if model is None:
            raise gone_model()
        return model

    def _model_device(self) -> torch.device | None:
        model = None if self._model_ref is None else self._model_ref()
        return device_of(model) if isinstance(model, nn.Module) else None
