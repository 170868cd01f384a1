"""What all rows share: checks before any phase, phases around an update, staleness, the timer."""

from __future__ import annotations

import itertools
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from weight_update.delivery.metrics import refit_metrics
from weight_update.errors import (
    TRANSFER_FAILED,
    ConfigurationError,
    EngineUnreachable,
    UpdateTimeout,
    WeightMismatchError,
    WeightUpdateError,
    first_of,
)
from weight_update.options import check_positive
from weight_update.report import EngineState, UpdateReport
from weight_update.synchronizers.buffer_size import check_buffer_size
from weight_update.synchronizers.carriers import (
    Carrier,
    HandingOver,
    Reading,
    is_reachable,
    is_readable,
)
from weight_update.synchronizers.exchange import Exchange
from weight_update.synchronizers.interface import Timer, WeightSynchronizer
from weight_update.synchronizers.kv_scales import check_kv_scales
from weight_update.synchronizers.protocols import Generation, Policy
from weight_update.synchronizers.resolve import asked
from weight_update.update.turns import one_at_a_time

TRANSFER_LABEL = "prepare_for_generation/transfer_and_update_weights"

Step = Callable[[], object]


class DeliverySynchronizer(WeightSynchronizer):
    """A synchronizer whose updates are a delivery's: a row says what happens around them.

    Args:
        policy: The trainer.
        generation: The engines.
        refit_buffer_size_gb: Size of a buffer; None takes a share of the free memory.
        refit_timeout_s: Seconds for one refit; None takes the default, which is finite.

    Attributes:
        policy: As given.
        generation: As given.
        report: Of the last update that succeeded.
    """

    colocated = False
    takes_kv_scales = False
    connects_first = False

    def __init__(
        self,
        policy: Policy,
        generation: Generation,
        refit_buffer_size_gb: float | None = None,
        *,
        refit_timeout_s: float | None = None,
    ) -> None:
        if refit_timeout_s is not None:
            check_positive("refit_timeout_s", refit_timeout_s, number=float)
        self.policy, self.generation = policy, generation
        self.report: UpdateReport | None = None
        self._refit_buffer_size_gb = refit_buffer_size_gb
        self._refit_timeout_s = refit_timeout_s
        self._changes = itertools.count(1)
        self._changed, self._fresh = 0, -1
        self._busy = threading.Lock()
        self._refuse_in_place()
        self._carrier = self._carry()

    @property
    def is_stale(self) -> bool:
        """Whether engines may hold other weights than the policy's last synchronised ones."""
        return self._fresh != self._changed

    def init_communicator(self) -> None:
        """Tells the engines what will come; rows that need a group beforehand make it.

        Raises:
            WeightUpdateError: A side refused, or did not come.
        """
        self._carrier.delivery.refuse_fork()
        asked("prepare_refit_info", self._carrier.announce)
        if self.connects_first:
            self._carrier.connect()

    def sync_weights(
        self, *, timer: Timer | None = None, kv_scales: Mapping[str, float] | None = None
    ) -> dict[str, float] | None:
        """Runs one update between the row's phases; see :class:`WeightSynchronizer`."""
        begun = self._outdate()
        self._object(kv_scales)
        try:
            with self._exclusively(), self._phases(), _timed(timer):
                self.report = report = self._push(kv_scales)
        except WeightUpdateError as error:
            error.report = error.report or self._standing(error)
            raise
        self._fresh = begun
        return refit_metrics(report)

    def shutdown(self) -> None:
        """Gives the group up on both ends; may be repeated."""
        self._outdate()
        self._carrier.delivery.shutdown()

    # -- what a row says --------------------------------------------------------------------

    def _phases(self) -> AbstractContextManager[Any]:
        """What happens before and after an update, and after a failed one all the same."""
        return nullcontext()

    @abstractmethod
    def _exchange(self) -> Exchange:
        """What NeMo-RL's own policy and generation do in this row."""

    def _object(self, kv_scales: Mapping[str, float] | None) -> None:
        """Raises what speaks against a refit, before any phase starts."""
        check_kv_scales(kv_scales)
        if kv_scales is not None and not self.takes_kv_scales:
            raise ConfigurationError(
                f"{type(self).__name__} and its engines do not support kv_scales; got "
                f"{sorted(kv_scales)}",
                phase="plan",
                remedy="leave them out: the engine computes its own, or takes 1.0",
            )
        check_buffer_size(self._refit_buffer_size_gb)
        self._refuse_in_place()
        self._carrier.delivery.refuse_fork()
        self._carrier.check()

    # -- one sync after the other -------------------------------------------------------------

    def _outdate(self) -> int:
        """Makes it stale; a sync that began earlier does not make it fresh any more."""
        self._changed = next(self._changes)
        return self._changed

    @contextmanager
    def _exclusively(self) -> Iterator[None]:
        """Phases of two syncs would undo each other."""
        patience = self._carrier.delivery.timeout
        with one_at_a_time(id(self)):
            if not self._busy.acquire(timeout=patience):
                text = f"another sync was still running after {patience:.1f} s"
                raise UpdateTimeout(text, phase="plan")
            try:
                yield
            finally:
                self._busy.release()

    # -- phases -----------------------------------------------------------------------------

    def _offload(self) -> None:
        asked("policy.offload_before_refit()", self.policy.offload_before_refit)

    def _restore(self) -> None:
        asked("policy.offload_after_refit()", self.policy.offload_after_refit)

    def _prepare(self, tag: str) -> None:
        asked(
            f"generation.prepare_for_generation(tags=[{tag!r}])",
            lambda: self.generation.prepare_for_generation(tags=[tag]),
        )

    def _restoring(self, *steps: Step) -> AbstractContextManager[list[Step]]:
        return restoring(*steps, together=self._carrier.together)

    def _prepare_weights(self) -> None:
        self._prepare("weights")

    def _prepare_kv_cache(self) -> None:
        self._prepare("kv_cache")

    # -- the update -------------------------------------------------------------------------

    def _carry(self) -> Carrier:
        policy, generation, seconds = self.policy, self.generation, self._refit_timeout_s
        if is_readable(policy) and is_reachable(generation):
            return Reading(policy, generation, colocated=self.colocated, timeout_s=seconds)
        return HandingOver(self._exchange())

    def _push(self, kv_scales: Mapping[str, float] | None) -> UpdateReport:
        try:
            return self._carrier.push(self._refit_buffer_size_gb, self._free_bytes, kv_scales)
        except WeightUpdateError as error:
            if error.phase not in ("configure", "plan"):
                error.message = TRANSFER_FAILED + error.message
            if isinstance(error, WeightMismatchError):
                error.remedy = self._remedy_of(error, kv_scales or ())
            raise

    @staticmethod
    def _remedy_of(error: WeightMismatchError, scales: Iterable[str]) -> str:
        if any(name in error.message for name in scales):
            return "leave kv_scales out, or start the engine with a KV cache in fp8"
        return error.remedy

    def _free_bytes(self) -> int:
        free = asked("policy.get_free_memory_bytes()", self.policy.get_free_memory_bytes)
        try:
            return int(min(free) if isinstance(free, (list, tuple)) else free)
        except (TypeError, ValueError, OverflowError) as error:
            raise ConfigurationError(
                f"policy.get_free_memory_bytes() gave {free!r}, which is no number of bytes",
                phase="plan",
                remedy="set refit_buffer_size_gb=",
            ) from error

    def _refuse_in_place(self) -> None:
        mode = getattr(self.generation, "pause_generation_mode", None)
        accepted = getattr(self.generation, "kv_policy", None) in ("keep", "auto")
        if mode == "in_place" and not accepted:
            raise ConfigurationError(
                "pause_generation_mode='in_place' is unsafe for weight refit: entries of the KV "
                "cache that older weights made would be used on",
                phase="plan",
                remedy="use 'retract' or 'abort'",
            )

    def _standing(self, error: WeightUpdateError) -> UpdateReport:
        """What is known of the engines, where no update had begun: some may have fallen silent."""
        delivery = self._carrier.delivery
        engines = dict(delivery.engines)
        silent = error.engines if isinstance(error, (EngineUnreachable, UpdateTimeout)) else ()
        for url in engines.keys() & set(silent):
            lost = EngineState.UNREACHABLE
            engines[url] = replace(engines[url], state=lost, version=None, detail=error.message)
        return UpdateReport(delivery.version, 0, 0, 0, {}, engines)


class ColocatedSynchronizer(DeliverySynchronizer):
    """Trainer and engines share GPUs: each lends the other memory while it is needed.

    Offload the trainer, prepare weights, update, restore the trainer, prepare the KV cache. The
    last two run after a failure too.
    """

    colocated = True

    @contextmanager
    def _phases(self) -> Iterator[None]:
        with self._restoring(self._restore) as later:
            self._carrier.together(self._offload)
            self._carrier.recover()
            later.append(self._prepare_kv_cache)
            self._carrier.together(self._prepare_weights)
            yield


def _alone(step: Step) -> None:
    step()


@contextmanager
def restoring(*steps: Step, together: Callable[[Step], object] = _alone) -> Iterator[list[Step]]:
    """Runs all steps afterwards, in order, whatever happened and whichever of them fails.

    Gives the list of steps, which may grow meanwhile. What went wrong first is raised, and the
    others are noted on it; an interrupt comes before all.

    Args:
        steps: What is run.
        together: Runs a step where nothing went wrong: with the trainer's other ranks. They have
            failed as well otherwise, or never come.

    Example:
        >>> with restoring(lambda: print("restored")) as later:
        ...     later.append(lambda: print("prepared"))
        restored
        prepared
    """
    later = list(steps)
    try:
        yield later
    except BaseException as error:
        first = first_of([error, *_troubles(later, _alone)])
        if first is not error:
            raise first from error
        raise
    troubles = _troubles(later, together)
    if troubles:
        raise first_of(troubles)


def _troubles(steps: list[Step], together: Callable[[Step], object]) -> list[BaseException]:
    found: list[BaseException] = []
    for step in steps:
        try:
            (_alone if found else together)(step)
        except BaseException as error:  # noqa: BLE001 - raised when all steps have run
            found.append(error)
    return found


def _timed(timer: Timer | None) -> AbstractContextManager[Any]:
    return nullcontext() if timer is None else timer.time(TRANSFER_LABEL)
