"""The fake has the traps that were observed on vLLM 0.32.0."""

from __future__ import annotations

import pytest
import torch

from .engine import EngineDead, FakeEngine
from .releases import RELEASES
from .weights import checkpoint, signature

OLD, NEW = signature(checkpoint(0)), signature(checkpoint(1))
Q = "model.layers.0.self_attn.q_proj.weight"
INFO = {"master_address": "", "master_port": 0, "rank_offset": 1, "world_size": 2}
INIT = INFO | {"group_name": "g", "packed": False}


class Loopback:
    """A wire that brings what was put in it."""

    def __init__(self, _: object = None) -> None:
        self.sent: list[torch.Tensor] = []

    def receive(self, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
        return self.sent.pop(0).reshape(shape).to(dtype)

    def close(self) -> None:
        self.sent = []


@pytest.fixture
def wire() -> Loopback:
    return Loopback()


@pytest.fixture
def engine(wire: Loopback) -> FakeEngine:
    made = FakeEngine(checkpoint(0), RELEASES["0.32.0"], lambda _: wire)
    made.init_transfer(INIT)
    made.pause("abort")
    return made


def send(engine: FakeEngine, wire: Loopback, weights: dict[str, torch.Tensor]) -> None:
    if engine._wire is None:
        engine.init_transfer(INIT)
    wire.sent = list(weights.values())
    names, values = list(weights), list(weights.values())
    shapes = [list(value.shape) for value in values]
    dtypes = [str(value.dtype).removeprefix("torch.") for value in values]
    engine.update({"names": names, "dtype_names": dtypes, "shapes": shapes})


def served(engine: FakeEngine) -> str:
    engine.resume()
    return engine.generate()[0]


def test_a_whole_update_is_served(engine: FakeEngine, wire: Loopback) -> None:
    engine.start()
    send(engine, wire, checkpoint(1))
    engine.finish()

    assert served(engine) == NEW


def test_a_request_that_runs_in_an_open_update_kills_the_engine(engine: FakeEngine) -> None:
    engine.start()

    with pytest.raises(EngineDead):
        served(engine)
    assert engine.dead


@pytest.mark.parametrize(
    "bad",
    [{"model.layers.9.x": torch.ones(1)}, {Q: torch.ones(3, 3)}],
    ids=["unknown name", "wrong shape"],
)
def test_a_failed_update_closes_the_session_and_leaves_the_weights_away(
    engine: FakeEngine, wire: Loopback, bad: dict[str, torch.Tensor]
) -> None:
    engine.start()
    with pytest.raises((ValueError, RuntimeError)):
        send(engine, wire, bad)

    with pytest.raises(RuntimeError, match="without a matching start"):
        engine.finish()
    with pytest.raises(EngineDead):
        served(engine)


@pytest.mark.parametrize(
    "bad",
    [{"model.layers.9.x": torch.ones(1)}, {Q: torch.ones(3, 3)}],
    ids=["unknown name", "wrong shape"],
)
def test_an_empty_update_puts_old_weights_back_and_the_next_full_one_works(
    engine: FakeEngine, wire: Loopback, bad: dict[str, torch.Tensor]
) -> None:
    engine.start()
    with pytest.raises((ValueError, RuntimeError)):
        send(engine, wire, bad)
    engine.start()
    engine.finish()

    assert served(engine) == OLD
    engine.pause("abort")
    engine.start()
    send(engine, wire, checkpoint(1))
    engine.finish()
    assert served(engine) == NEW


def test_an_empty_update_leaves_what_was_loaded_before_the_failure(
    engine: FakeEngine, wire: Loopback
) -> None:
    bad = {"lm_head.weight": checkpoint(1)["lm_head.weight"], "nowhere": torch.ones(1)}
    engine.start()
    with pytest.raises(ValueError, match="no module"):
        send(engine, wire, bad)
    engine.start()
    engine.finish()

    assert served(engine) not in (OLD, NEW)


def test_a_wrong_shape_poisons_a_full_update_that_follows_at_once(
    engine: FakeEngine, wire: Loopback
) -> None:
    engine.start()
    with pytest.raises(RuntimeError, match="exceeds dimension size"):
        send(engine, wire, {Q: torch.ones(3, 3)})
    engine.start()

    with pytest.raises(RuntimeError):
        send(engine, wire, checkpoint(1))


def test_part_of_a_fused_module_corrupts_without_a_word(engine: FakeEngine, wire: Loopback) -> None:
    engine.start()
    send(engine, wire, {Q: checkpoint(0)[Q]})
    engine.finish()

    assert served(engine) not in (OLD, NEW)


@pytest.mark.parametrize(
    ("clear", "text"), [(True, NEW), (False, f"{NEW} after {OLD}")], ids=["cleared", "kept"]
)
def test_a_prefix_of_older_weights_shows(
    engine: FakeEngine, wire: Loopback, clear: bool, text: str
) -> None:
    assert served(engine) == OLD
    engine.pause("keep", clear_cache=clear)
    engine.start()
    send(engine, wire, checkpoint(1))
    engine.finish()

    assert served(engine) == text


def test_memory_that_sleeps_is_no_place_to_generate(engine: FakeEngine) -> None:
    engine.sleep(1, "abort")

    assert not engine.wake_up(["weights"])
    assert engine.paused
    with pytest.raises(EngineDead):
        served(engine)


def test_the_last_tag_that_wakes_up_resumes(engine: FakeEngine) -> None:
    engine.sleep(1, "abort")
    engine.wake_up(["weights"])

    assert engine.wake_up(["kv_cache"])
    assert engine.generate() == (OLD, "length")


@pytest.mark.parametrize("extra", [{"flush": True}, {"packed": True}], ids=str)
def test_unknown_keys_are_errors(engine: FakeEngine, extra: dict[str, bool]) -> None:
    info = {"names": [], "dtype_names": [], "shapes": []} | extra
    engine.start()

    with pytest.raises(ValueError, match="unexpected keyword"):
        engine.update(info)
