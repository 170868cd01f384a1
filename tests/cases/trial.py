"""One update with a fault in its way, and what every failed update must keep to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.integration import kit
from tests.integration.kit import CONTINUE, PAUSE
from weight_update import EngineState, SGLangWeightSender, WeightUpdateError
from weight_update.reference_engine import Fault, ReferenceEngine

OLD, NEW, MIXED = EngineState.OLD, EngineState.NEW, EngineState.MIXED
UNREACHABLE = EngineState.UNREACHABLE

#: 2 s are promised past the deadline; the rest is for a busy machine.
SLACK = 15.0


def once(path: str, kind: str, **fields: Any) -> Fault:
    """A fault that strikes one call."""
    return Fault(path, kind, times=1, **fields)  # type: ignore[arg-type]


class Trial:
    """Engines on model A and a sender that is about to bring model B.

    Args:
        engines: The fleet.
        options: Of the scheme.

    Attributes:
        before: The seed of the model that the engines served before the update that fails.
    """

    def __init__(self, engines: Sequence[ReferenceEngine], **options: Any) -> None:
        self.engines = list(engines)
        for engine in engines:
            kit.relabel(engine, "default")
        self.sender: SGLangWeightSender = kit.make_sender(engines, **options)
        self.sender.update_weights(kit.llama(0))
        self.version = self.sender.version
        self.before = 0
        self.log = kit.Log(*engines)

    def fail(self, seconds: float = 60.0) -> WeightUpdateError:
        """Update to model B, which must fail within a deadline, and check what is said."""
        model = kit.llama(1)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        with (
            kit.takes_at_most(seconds + SLACK),
            kit.timeout_of(self.sender, seconds),
            pytest.raises(WeightUpdateError) as caught,
        ):
            self.sender.update_weights(model)
        assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
        self.check_truth(caught.value)
        return caught.value

    def check_truth(self, error: WeightUpdateError) -> None:
        """Compare the report with what each engine shows and generates."""
        report = error.report
        assert report is not None
        assert report.version == self.sender.version
        assert {str(o.state) for o in report.engines.values()} <= {s.value for s in EngineState}
        for engine in self.engines:
            outcome = report.engines[engine.url]
            assert f"{engine.url} {outcome.state}" in str(error)
            if outcome.state is UNREACHABLE:
                continue
            late = "may still take effect" in outcome.detail
            assert late or outcome.paused == kit.is_paused(engine), error
            assert outcome.version in (None, kit.label(engine)), error
            if not outcome.paused and outcome.state in (OLD, NEW):
                seed = self.before if outcome.state is OLD else 1
                assert kit.served(engine) == kit.tokens_of(seed), error

    def states(self, error: WeightUpdateError) -> list[EngineState]:
        """The state of each engine, in order."""
        assert error.report is not None
        return [error.report.engines[engine.url].state for engine in self.engines]

    def resumes(self) -> list[int]:
        """How often each engine was resumed."""
        return [self.log.count(engine, CONTINUE) for engine in self.engines]

    def pauses(self) -> list[int]:
        """How often each engine was paused."""
        return [self.log.count(engine, PAUSE) for engine in self.engines]

    def heal(self) -> None:
        """The next update succeeds everywhere, and counts."""
        version = self.sender.version
        report = self.sender.update_weights(kit.llama(1))
        assert report.version == self.sender.version > version
        self.check_new()
        self.sender.shutdown()

    def check_new(self) -> None:
        """Every engine serves model B under the sender's version."""
        for engine in self.engines:
            assert self.sender.engines[engine.url].state is NEW
            assert not kit.is_paused(engine)
            assert kit.served(engine) == kit.tokens_of(1)
            assert kit.label(engine) == str(self.sender.version)
        self.before = 1
