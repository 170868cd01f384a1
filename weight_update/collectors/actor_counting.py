"""Actors of Ray that count: each is called, and not waited for while it makes a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any

# An actor that makes a batch answers when it is done; it counts before it makes the next one.
_BUSY_SECONDS = 0.25

_DEAD = ["is gone"]


class Actors:
    """The actors that make the frames of one collector.

    Args:
        handles: Who they are now.
        call: Has one count a version, and returns Ray's reference.
        owner: What they belong to, for warnings.
    """

    def __init__(
        self,
        handles: Callable[[], Sequence[Any]],
        call: Callable[[Any, int], Any],
        owner: str,
    ) -> None:
        self._handles = handles
        self._call = call
        self._owner = owner
        self._busy: dict[Any, tuple[int, Any]] = {}
        self._dead: list[Any] = []
        self._one_at_a_time = Lock()

    def count(self, version: int, seconds: float) -> list[str]:
        """Tells all actors; one that is busy counts when it is done with its batch.

        One that is dead for good is told of once.

        Args:
            version: The version that the engines have now.
            seconds: The most that is waited; busy ones are waited for much less.

        Returns:
            What went wrong, now or with a version that was told before, in words.
        """
        with self._one_at_a_time:
            living = [(i, h) for i, h in enumerate(self._handles()) if h not in self._dead]
            self._busy |= {self._call(handle, version): (i, handle) for i, handle in living}
            answered = _answered(list(self._busy), min(seconds, _BUSY_SECONDS))
            outcomes = [(*self._busy.pop(ref), _outcome(ref)) for ref in answered]
            self._dead += [handle for _, handle, words in outcomes if words == _DEAD]
        return [f"actor {i} of {self._owner} {w}" for i, _, words in outcomes for w in words]

    def close(self) -> None:
        """Nothing is told any more."""
        self._handles, self._busy = tuple, {}


def _answered(references: list[Any], seconds: float) -> list[Any]:
    """Those of Ray's references that have an answer, by then at the latest."""
    import ray

    if not references:
        return []
    done, _ = ray.wait(references, num_returns=len(references), timeout=seconds, fetch_local=False)
    return list(done)


def _outcome(reference: Any) -> list[str]:
    import ray
    from ray import exceptions

    try:
        told = ray.get(reference)
    except exceptions.ActorDiedError:
        return _DEAD
    except exceptions.RayActorError:  # Ray may be starting it again
        return ["does not answer"]
    except Exception as error:  # noqa: BLE001 - whatever the actor raised; the engines are updated
        return [f"failed ({type(error).__name__}: {error})"]
    return told if isinstance(told, list) else []
