"""Who talks to the engines, of the ranks of a trainer."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch

from weight_update.delivery import ranks
from weight_update.report import UpdateReport
from weight_update.update.planning import Payload
from weight_update.waiting import Deadline
from weight_update.weights.extract import extract_weights

REPORT = UpdateReport(version=1, bytes=0, tensors=0, buckets=0, seconds={}, engines={})
WHOLE = {"w": torch.ones(1)}


@pytest.mark.parametrize(("rank", "warned"), [(0, False), (1, True)])
def test_a_rank_beside_the_first_that_pushes_a_whole_model_is_warned_once(
    rank: int, warned: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Under DDP each rank holds the whole model: if all call, all push."""
    monkeypatch.setattr(ranks, "open_channel", lambda: SimpleNamespace(rank=rank, ranks=2))
    updates = ranks.Ranks()
    with caplog.at_level(logging.WARNING, "weight_update"):
        for _ in range(2):
            updates.update(
                lambda: WHOLE,
                lambda given: Payload(extract_weights(given)),
                lambda read, check_readers=None: REPORT,
                lambda report: None,
                Deadline(5),
                ("http://a:1",),
            )
    said = [
        record for record in caplog.records if "updates the engines by itself" in record.message
    ]
    assert len(said) == warned
