"""What NeMo-RL's policy and generation do in each step of a refit; rows say how."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from weight_update.errors import Phase, WeightUpdateError
from weight_update.synchronizers.resolve import PATIENCE_SECONDS, resolve
from weight_update.waiting import Deadline

# Workers give up by themselves, and say why; only then does the driver.
_MARGIN_SECONDS = 30.0
_MARGIN_SHARE = 0.1


@dataclass(frozen=True)
class Refit:
    """What one refit is to do.

    Attributes:
        buffer_bytes: How large a buffer may be.
        kv_scales: Scales of an fp8 KV cache, by name, where there are some.
    """

    buffer_bytes: int
    kv_scales: Mapping[str, float] | None = None


class Exchange(ABC):
    """What a row's two sides do in each step; but for the transfer there may be nothing to do.

    Args:
        policy: Sends.
        generation: Receives.
        timeout_s: Seconds that workers have for one transfer; None takes 300.

    Attributes:
        holds: Whether generation can be paused, so that mixed weights are not used.
        takes_buffer: Whether the policy is told how large a buffer may be.
        sends: The policy's method that sends.
        receives: The generation's method without which nothing arrives.
        mode: What becomes of requests in flight.
    """

    holds = False
    takes_buffer = True
    sends = ""
    receives = ""
    mode: Any = "abort"

    def __init__(self, policy: Any, generation: Any, timeout_s: float | None = None) -> None:
        self.policy, self.generation = policy, generation
        self.timeout_s = PATIENCE_SECONDS if timeout_s is None else timeout_s
        self.info: Any = None

    @property
    def patience(self) -> float:
        """Seconds until the driver gives up a transfer."""
        return self.timeout_s + min(_MARGIN_SECONDS, _MARGIN_SHARE * self.timeout_s + 1.0)

    def announce(self) -> None:
        """Tells the generation what the policy will send."""
        self.info = self.wait(self.policy.prepare_refit_info(), "configure")
        self.wait(self.generation.prepare_refit_info(self.info), "configure")

    def check(self) -> None:
        """Raises what speaks against a refit; called before any phase starts."""

    def recover(self) -> None:
        """Has the generation replace what died, if it does such."""

    def look(self) -> bool:
        """Learns who is there; whether that changed, so that a connection is due."""
        return False

    def connect(self, *, again: bool) -> None:
        """Makes the connection, if the row has one and it is due.

        Args:
            again: The one before was given up.
        """

    def pause(self) -> None:
        """Pauses generation."""

    def begin(self) -> None:
        """Opens the update."""

    @abstractmethod
    def transfer(self, refit: Refit, deadline: Deadline) -> None:
        """Has the policy send and the generation receive; raises unless all came."""

    def end(self) -> None:
        """Ends the update."""

    def invalidate(self) -> bool:
        """Empties the KV cache; whether that was done."""
        return True

    def resume(self) -> None:
        """Continues generation."""

    def choose(self, absent_shards: Iterable[int], *, force: bool) -> bool:
        """Says which engines the next connection spans; whether one has to be made."""
        return False

    def wait(self, value: Any, phase: Phase) -> Any:
        """Waits for workers as long as they may take."""
        return resolve(value, Deadline(self.patience), phase)


def verdicts_of(results: Any) -> list[Any]:
    """What each worker said, however the answers were grouped.

    Example:
        >>> verdicts_of([[True, None], [False]]), verdicts_of(True)
        ([True, None, False], [True])
    """
    if not isinstance(results, (list, tuple)):
        return [results]
    return [verdict for result in results for verdict in verdicts_of(result)]


def checked(results: Any) -> None:
    """Raises unless receivers say that they received.

    Raises:
        WeightUpdateError: One says no, or none says anything.

    Example:
        >>> checked([None, True])
        >>> checked([None])
        Traceback (most recent call last):
        weight_update.errors.WeightUpdateError: transfer: no worker said that it received ...
    """
    told = verdicts_of(results)
    verdicts = [result for result in told if result is not None]
    if not verdicts:
        raise WeightUpdateError("no worker said that it received the weights", phase="transfer")
    if not all(verdicts):
        raise WeightUpdateError(
            f"{sum(not verdict for verdict in verdicts)} of {len(told)} workers did not receive "
            "the weights",
            phase="transfer",
            remedy="look at the logs of the generation's workers",
        )
