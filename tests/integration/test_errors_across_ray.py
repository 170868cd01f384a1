"""What an update raises in an actor of Ray is what its driver catches."""

from __future__ import annotations

from typing import Any

import pytest

from weight_update import EngineOutcome, EngineState, UpdateReport, WeightUpdateError, errors

exceptions = pytest.importorskip("ray.exceptions")

URL = "http://127.0.0.1:30000"
KINDS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, WeightUpdateError)
]


def across_ray(error: WeightUpdateError) -> Any:
    """What ``ray.get()`` raises when a method raised this."""
    failed = exceptions.RayTaskError("update_weights", "traceback", error)
    told = exceptions.RayError.from_bytes(failed.to_bytes())
    return told.as_instanceof_cause()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_an_error_keeps_its_kind_and_what_it_knows(kind: type[WeightUpdateError]) -> None:
    raised = kind("it said no", engine=URL, phase="pause")
    outcome = EngineOutcome(URL, EngineState.OLD, "1", False)
    raised.report = UpdateReport(1, 0, 0, 0, {}, {URL: outcome})
    with pytest.raises(kind) as caught:
        raise across_ray(raised)
    error = caught.value
    assert (error.engine, error.phase, error.report) == (URL, "pause", raised.report)
