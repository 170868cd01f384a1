"""Which of its memory an engine has given up, as SGLang keeps count of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

EVERYTHING = ("weights", "kv_cache", "cuda_graph")


class Occupation:
    """What is freed and taken back between rollouts.

    Without a memory saver it is only counted: nothing is freed, and everything works on.

    Args:
        saver: Whether memory is really freed.
        forget: Loses the weights.

    Example:
        >>> memory = Occupation(True, forget=lambda: None)
        >>> memory.release(["kv_cache"])
        >>> memory.need("weights")
        >>> memory.need("kv_cache")
        Traceback (most recent call last):
        RuntimeError: an illegal memory access was encountered: kv_cache is not there
        >>> memory.resume(["weights"])
        Traceback (most recent call last):
        KeyError: 'weights'
    """

    def __init__(self, saver: bool, forget: Callable[[], None]) -> None:
        self._saver = saver
        self._forget = forget
        self._released: set[str] = set()

    def release(self, tags: Sequence[str]) -> None:
        """Free what ``tags`` name, or everything; unknown ones are no error."""
        self._released.update(tags or EVERYTHING)
        if self._saver and "weights" in self._released:
            self._forget()

    def resume(self, tags: Sequence[str]) -> None:
        """Take back what ``tags`` name, or everything; what was not freed is an error."""
        for tag in tags or EVERYTHING:
            self._released.remove(tag)

    def need(self, *tags: str) -> None:
        """Raise if memory that is about to be used is not there."""
        gone = self._released.intersection(tags) if self._saver else set()
        if gone:
            names = ", ".join(sorted(gone))
            raise RuntimeError(f"an illegal memory access was encountered: {names} is not there")
