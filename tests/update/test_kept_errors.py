"""What a sender keeps of an update that failed: not the weights."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from tests.update.fakes import house
from weight_update.errors import WeightUpdateError
from weight_update.update.planning import Payload
from weight_update.update.push import Push
from weight_update.weights.extract import extract_weights


@pytest.mark.parametrize("call", ["pause", "apply", "end"])
def test_weights_of_a_failed_update_are_freed_though_the_sender_lives(call: str):
    """A call's error is raised through the frames that hold them, and was kept with the call."""
    home = house(1)
    home.engines[0].fail(call, "refuse")
    weights = {"w": torch.zeros(2)}
    held = weakref.ref(weights["w"])

    def push() -> Push:
        return Push(lambda: Payload(extract_weights(weights)), lambda _: [])

    with pytest.raises(WeightUpdateError):
        home.updater.update(push())
    weights.clear()
    gc.collect()

    assert held() is None
