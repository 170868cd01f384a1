"""Engines that are Ray actors: real ones, of a local cluster, around the reference engine."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.integration import kit
from weight_update import (
    ConfigurationError,
    EngineRejected,
    EngineState,
    EngineUnreachable,
    UpdateTimeout,
    WeightUpdateError,
)
from weight_update.engines.sglang import actor
from weight_update.reference_engine import ReferenceEngine
from weight_update.synchronizers import (
    SGLangGeneration,
    TorchPolicy,
    create_weight_synchronizer,
)
from weight_update.waiting import Deadline

from . import ray_cluster, ray_engines
from .ray_engines import EngineWithoutSessions, OwnEngine, RoutedEngine, ServerStarter

ray = pytest.importorskip("ray")

PATIENCE = 60.0
STEPS = (
    *("pause_generation", "begin_weight_update", "update_weights_from_tensor"),
    *("end_weight_update", "update_weight_version", "continue_generation"),
)
Start = Callable[..., Any]


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """A cluster of this machine alone; actors run where tests cannot be imported."""
    ray.cloudpickle.register_pickle_by_value(ray_engines)
    with ray_cluster.cluster(ray, 2):
        yield
    ray.cloudpickle.unregister_pickle_by_value(ray_engines)


@pytest.fixture(scope="module")
def older() -> Iterator[ReferenceEngine]:
    """An engine of a release without sessions."""
    with ReferenceEngine(kit.llama(0), release="0.5.9") as engine:
        yield engine


@pytest.fixture
def start(cluster: None) -> Iterator[Start]:
    """Starts actors, which end with the test."""
    started: list[Any] = []

    def start(kind: type, *arguments: Any) -> Any:
        handle = ray.remote(kind).options(num_cpus=0).remote(*arguments)
        started.append(handle)
        return handle

    yield start
    for handle in started:
        ray.kill(handle)


def asked(handle: Any, method: str, *arguments: Any) -> Any:
    return ray.get(getattr(handle, method).remote(*arguments), timeout=PATIENCE)


def synchronizer(
    engines: Any, model: Any, *, colocated: bool = True, timeout: float = PATIENCE, **options: Any
) -> Any:
    generation = SGLangGeneration(engines, timeout=timeout, **options)
    return create_weight_synchronizer(TorchPolicy(model), generation, "sglang", colocated)


def states(error: WeightUpdateError) -> set[EngineState]:
    assert error.report is not None
    return {outcome.state for outcome in error.report.engines.values()}


# ---- what works


@pytest.mark.parametrize("colocated", [True, False], ids=["colocated", "disaggregated"])
def test_weights_reach_an_engine_that_is_an_actor(
    colocated: bool, start: Start, engine: ReferenceEngine
) -> None:
    handle = start(RoutedEngine, engine.url)
    trained = [kit.llama(0)]
    sync = synchronizer(handle, lambda: trained[0], colocated=colocated)
    sync.init_communicator()
    for seed in (1, 2):
        trained[0] = kit.llama(seed)
        sync.sync_weights()
        assert kit.served(engine) == kit.tokens_of(seed)
    (name,) = sync.report.engines
    assert name == actor.name_of(handle)
    assert sync.report.engines[name].verified == "checksum"
    sync.shutdown()


def test_the_methods_are_called_in_the_order_of_the_one_procedure(
    start: Start, engine: ReferenceEngine
) -> None:
    handle = start(RoutedEngine, engine.url)
    sync = synchronizer(handle, kit.llama(1))
    sync.sync_weights()
    asked(handle, "calls")
    sync.sync_weights()
    called = [name for name in asked(handle, "calls") if name in STEPS]
    assert [n for i, n in enumerate(called) if i == 0 or called[i - 1] != n] == list(STEPS)


def test_an_actor_and_a_server_stand_side_by_side(start: Start, two: list[ReferenceEngine]) -> None:
    sync = synchronizer([start(RoutedEngine, two[0].url), two[1].url], kit.llama(1))
    sync.sync_weights()
    assert [kit.served(engine) for engine in two] == [kit.tokens_of(1)] * 2
    sync.shutdown()


def test_an_actor_may_hold_its_engine_itself(start: Start, tmp_path: Path) -> None:
    kit.llama(0).save_pretrained(tmp_path)
    handle = start(OwnEngine, str(tmp_path))
    sync = synchronizer(handle, kit.llama(1))
    assert asked(handle, "generate", kit.PROMPT, kit.TOKENS) == kit.tokens_of(0)
    sync.sync_weights()
    assert asked(handle, "generate", kit.PROMPT, kit.TOKENS) == kit.tokens_of(1)
    sync.shutdown()


def test_an_actor_that_only_tells_where_its_server_is_stands_for_the_url(
    start: Start, engine: ReferenceEngine
) -> None:
    sync = synchronizer(start(ServerStarter, engine.url), kit.llama(1))
    sync.sync_weights()
    assert list(sync.report.engines) == [engine.url]
    assert kit.served(engine) == kit.tokens_of(1)
    sync.shutdown()


def test_what_an_actor_has_no_method_for_its_release_is_taken_not_to_have(
    start: Start, older: ReferenceEngine
) -> None:
    handle = start(EngineWithoutSessions, older.url)
    sync = synchronizer(handle, kit.llama(1), pause_generation_mode="abort")
    sync.sync_weights()
    assert kit.served(older) == kit.tokens_of(1)
    sync.shutdown()


# ---- what does not


def test_a_pause_mode_that_a_method_does_not_take_is_not_left_out(
    start: Start, older: ReferenceEngine
) -> None:
    before = kit.served(older)
    handle = start(EngineWithoutSessions, older.url)
    sync = synchronizer(handle, kit.llama(2), pause_generation_mode="retract")
    with pytest.raises(EngineRejected, match="takes no 'mode'"):
        sync.sync_weights()
    assert kit.served(older) == before


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("pause_generation", {EngineState.OLD}),
        ("begin_weight_update", {EngineState.OLD}),
        ("update_weights_from_tensor", {EngineState.MIXED}),
        ("end_weight_update", {EngineState.NEW}),  # it is ended anew, and has everything
    ],
)
def test_an_exception_of_the_actor_is_told_in_its_words_and_the_next_refit_heals(
    method: str, expected: set[EngineState], start: Start, engine: ReferenceEngine
) -> None:
    handle = start(RoutedEngine, engine.url)
    sync = synchronizer(handle, kit.llama(1))
    sync.sync_weights()
    asked(handle, "break_next", method, "raise")
    with pytest.raises(EngineRejected, match=f"the scheduler is gone in {method}") as caught:
        sync.sync_weights()
    assert caught.value.engine == actor.name_of(handle)
    assert states(caught.value) <= expected | {EngineState.OLD}
    assert sync.is_stale
    sync.sync_weights()
    assert kit.served(engine) == kit.tokens_of(1)


def test_what_the_server_behind_an_actor_refused_is_told_in_the_servers_words(
    start: Start, engine: ReferenceEngine
) -> None:
    sync = synchronizer(start(RoutedEngine, engine.url), kit.llama(1))
    sync.sync_weights()
    engine.inject(kit.Fault("/begin_weight_update", "refuse", times=1, status=400))
    with pytest.raises(EngineRejected, match="injected fault"):
        sync.sync_weights()
    sync.sync_weights()
    assert kit.served(engine) == kit.tokens_of(1)


def test_an_actor_that_dies_in_the_middle_is_unreachable(
    start: Start, engine: ReferenceEngine
) -> None:
    handle = start(RoutedEngine, engine.url)
    sync = synchronizer(handle, kit.llama(1))
    sync.sync_weights()
    asked(handle, "break_next", "update_weights_from_tensor", "die")
    with pytest.raises(EngineUnreachable) as caught:
        sync.sync_weights()
    assert (caught.value.phase, caught.value.engine) == ("transfer", actor.name_of(handle))
    assert states(caught.value) == {EngineState.UNREACHABLE}


def test_an_actor_that_hangs_is_waited_for_until_the_deadline(
    start: Start, engine: ReferenceEngine
) -> None:
    handle = start(RoutedEngine, engine.url)
    sync = synchronizer(handle, kit.llama(1), timeout=8.0)
    sync.sync_weights()
    asked(handle, "break_next", "pause_generation", "40")
    with pytest.raises(UpdateTimeout, match=r"pause: .*no answer"):
        sync.sync_weights()


def test_an_actor_without_an_engine_is_refused(start: Start) -> None:
    handle = start(SimpleNamespace)
    with pytest.raises(ConfigurationError, match="no SGLang server answers here"):
        synchronizer(handle, kit.llama(1)).sync_weights()


# ---- without a cluster


def test_nothing_of_ray_is_imported_without_a_handle() -> None:
    program = (
        "import sys\n"
        "from weight_update.engines.sglang import actor\n"
        "from weight_update.synchronizers import SGLangGeneration\n"
        "SGLangGeneration('http://127.0.0.1:1')\n"
        "assert not actor.is_actor(object())\n"
        "assert 'ray' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


ANSWERS: list[tuple[Any, int, Any]] = [
    (None, 200, {"success": True}),
    (True, 200, {"success": True}),
    (False, 400, {"success": False}),
    ((True, "Success"), 200, {"success": True, "message": "Success"}),
    ((False, "no", 3), 400, {"success": False, "message": "no"}),
    ({"status": "ok"}, 200, {"status": "ok"}),
    ({"success": False, "message": "no"}, 400, {"success": False, "message": "no"}),
    ("Cache flushed.", 200, {"success": True, "message": "Cache flushed."}),
    (SimpleNamespace(success=False), 400, {"success": False, "message": ""}),
    (SimpleNamespace(success=True, message="ok"), 200, {"success": True, "message": "ok"}),
    ([0.5, 0.25], 200, [0.5, 0.25]),
]


@pytest.mark.parametrize(("returned", "status", "body"), ANSWERS, ids=str)
def test_what_a_method_returns_is_read_as_the_servers_answer(
    returned: Any, status: int, body: Any
) -> None:
    assert actor.answer_of(returned) == (status, body)


class Handle:
    """Stands for an actor: methods that note their arguments, or raise as Ray does."""

    def __init__(self, *takes: str) -> None:
        self.given: dict[str, Any] = {}
        self.takes = takes
        self.update_weights_from_tensor = self

    def remote(self, **given: Any) -> None:
        unknown = [name for name in given if name not in self.takes]
        if unknown:
            raise TypeError(f"got an unexpected keyword argument '{unknown[0]}'")
        self.given = given


PAYLOAD = {"serialized_named_tensors": ["p"], "flush_cache": False, "abort_all_requests": False}
FLAT = {**PAYLOAD, "load_format": "flattened_bucket"}
PLAIN = {**PAYLOAD, "load_format": None}
ARGUMENTS: list[tuple[dict[str, Any], tuple[str, ...], dict[str, Any] | str]] = [
    (FLAT, tuple(FLAT), FLAT),
    (
        FLAT,
        ("named_tensors", "load_format", "flush_cache"),
        {"named_tensors": ["p"], "load_format": "flattened_bucket", "flush_cache": False},
    ),
    (PLAIN, tuple(PAYLOAD), PAYLOAD),
    (PLAIN, ("named_tensors", "flush_cache"), "takes no 'serialized_named_tensors'"),
    (FLAT, ("serialized_named_tensors", "flush_cache"), "takes no 'load_format'"),
    (FLAT, ("serialized_named_tensors", "load_format"), "takes no 'flush_cache'"),
]


@pytest.mark.parametrize(("body", "takes", "expected"), ARGUMENTS)
def test_an_argument_is_left_out_only_where_that_changes_nothing(
    body: dict[str, Any], takes: tuple[str, ...], expected: dict[str, Any] | str
) -> None:
    handle = Handle(*takes)
    calls = actor.ActorCalls(handle)
    calls._answer = lambda *_: (200, {})  # type: ignore[method-assign]
    response = calls.call(
        "POST", "/update_weights_from_tensor", phase="transfer", deadline=Deadline(5.0), body=body
    )
    if isinstance(expected, dict):
        assert (response.status_code, handle.given) == (200, expected)
    else:
        assert response.status_code == 422
        assert expected in response.json()["message"]
