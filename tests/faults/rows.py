"""What the tables of faults on real connections share: a row, states, deadlines, vLLM's routes."""

from __future__ import annotations

from dataclasses import dataclass

from weight_update import EngineState

OLD, NEW, MIXED = EngineState.OLD, EngineState.NEW, EngineState.MIXED
GONE = EngineState.UNREACHABLE

INIT, PAUSE, START = "/init_weight_transfer_engine", "/pause", "/start_weight_update"
UPDATE, FINISH, FLUSH = "/update_weights", "/finish_weight_update", "/reset_prefix_cache"
STAMP, RESUME = "/update_weight_version", "/resume"

SHORT = 3.0  # the deadline where it is waited for
SLACK = 20.0  # 2 s are promised; the rest is for a busy machine


@dataclass(frozen=True)
class Row:
    """One fault, and what it leaves behind.

    Attributes:
        path: The route that is struck.
        kind: How; see ``tests.vllm_fake.faults`` and ``weight_update.reference_engine.faults``.
        when: Before the call does anything, inside, or after it did all.
        state: What the struck server then holds.
        other: What the server beside it then holds.
        after: Calls of that route that pass first.
        struck: The kind of the server that fails.
    """

    path: str
    kind: str
    when: str
    state: EngineState
    other: EngineState
    after: int = 0
    struck: str = "vllm"

    @property
    def limit(self) -> float:
        """The deadline of the update that fails."""
        return SHORT if self.kind in ("hang", "stop") else 60.0

    def __str__(self) -> str:
        call = f"{self.path.strip('/')}{f' {self.after + 1}' if self.after else ''}"
        return f"{self.struck} {self.kind} {self.when} {call}".replace(" ", "-")
