"""SGLang servers as a generation: what it refuses, its memory, and NeMo-RL's own calls."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import pytest

from tests.integration import kit
from tests.integration.kit import BEGIN, CONTINUE, END, FLUSH, PAUSE
from weight_update import ConfigurationError, WeightUpdateError
from weight_update.errors import EngineRejected, UpdateTimeout
from weight_update.options import MASTER_ADDRESS_VARIABLE, PAUSE_MODE_VARIABLE
from weight_update.reference_engine import Fault, ReferenceEngine
from weight_update.synchronizers.facades import served
from weight_update.synchronizers.facades.served import Occupation
from weight_update.synchronizers.facades.sglang import SGLangGeneration
from weight_update.waiting import Deadline, spawn

RELEASE, RESUME = "/release_memory_occupation", "/resume_memory_occupation"
WEIGHTS, KV, ALL = ["weights"], ["kv_cache", "cuda_graph"], ["weights", "kv_cache", "cuda_graph"]
URL = "http://127.0.0.1:1"


def generation(engines: Any, **options: Any) -> SGLangGeneration:
    """A generation of one engine or several, with memory to free."""
    urls = engines.url if isinstance(engines, ReferenceEngine) else [e.url for e in engines]
    return SGLangGeneration(urls, **{"timeout": 60.0, "needs_offload": True, **options})


def phases(log: kit.Log, engine: ReferenceEngine) -> list[tuple[str, list[str]]]:
    """What was asked of an engine's memory, in order."""
    records = log.records(engine)
    return [(r["path"], r["json"]["tags"]) for r in records if r["path"] in (RELEASE, RESUME)]


@pytest.fixture(scope="module")
def saver() -> Iterator[ReferenceEngine]:
    """An engine that ends over every mistake with its memory, and wants keys."""
    with ReferenceEngine(
        kit.llama(0), memory_saver=True, api_key="usual", admin_api_key="admin"
    ) as engine:
        yield engine


# ---- what it refuses

MISTAKES = [
    pytest.param([], {}, "server_url is empty", id="no engine"),
    pytest.param([URL, f"{URL}/"], {}, "twice", id="one twice"),
    pytest.param(["http://localhost:1", URL], {}, "twice", id="one under two names"),
    pytest.param("127.0.0.1:1", {}, "scheme", id="no URL"),
    pytest.param([5], {}, "not a int", id="no engine at all"),
    pytest.param(URL, {"kv_policy": "drop"}, "kv_policy='drop'", id="an unknown policy"),
    pytest.param(URL, {"pause_generation_mode": "x"}, "pause_generation_mode='x'", id="no mode"),
    pytest.param(URL, {"needs_offload": 1}, "needs_offload=1", id="no flag"),
    pytest.param(URL, {"timeout": 0}, "timeout=0", id="no time"),
    pytest.param(None, {}, "engines=None must be a URL", id="nothing"),
    pytest.param(5, {}, "engines=5 must be a URL", id="a number"),
    pytest.param(URL, {"quantization": "fp8"}, "must be a mapping", id="no settings"),
    pytest.param(URL, {"quantization": {"scheme": "fp7"}}, "must be one of", id="unknown scheme"),
    pytest.param(URL, {"name_map": 5}, "name_map=5", id="no map"),
    pytest.param(URL, {"master_address": "0.0.0.0"}, "cannot be reached", id="no address"),
]


@pytest.mark.parametrize(("engines", "options", "words"), MISTAKES)
def test_a_mistake_is_refused_at_once(engines: Any, options: dict[str, Any], words: str):
    with pytest.raises(ConfigurationError, match=words):
        SGLangGeneration(engines, **options)


def test_an_unknown_keyword_is_a_type_error():
    with pytest.raises(TypeError, match=r"tineout; besides its own, .* timeout"):
        SGLangGeneration(URL, tineout=5)


def test_a_flush_that_cannot_be_is_refused():
    with pytest.raises(ConfigurationError, match="in_place"):
        SGLangGeneration(URL, pause_generation_mode="in_place")


@pytest.mark.parametrize("kv_policy", ["keep", "auto"])
def test_who_wants_no_flush_may_let_requests_stand_still(kv_policy: Any):
    made = SGLangGeneration(URL, pause_generation_mode="in_place", kv_policy=kv_policy)

    assert made.pause_generation_mode == "in_place"


@pytest.mark.parametrize(
    ("transport", "colocated"), [("disk", True), ("broadcast", True), ("ipc", False)]
)
def test_a_transport_that_does_not_go_with_the_placement_is_refused(
    transport: Any, colocated: bool
):
    made = SGLangGeneration(URL, transport=transport)

    with pytest.raises(ConfigurationError, match=f"'{transport}' does not go with colocated="):
        made.delivery(colocated=colocated, timeout_s=None, policy=None)


def test_settings_come_from_the_environment_too(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(PAUSE_MODE_VARIABLE, "abort")
    monkeypatch.setenv(MASTER_ADDRESS_VARIABLE, "127.0.0.1")
    made = SGLangGeneration(URL)

    assert (made.pause_generation_mode, made.options.master_address) == ("abort", "127.0.0.1")


def test_a_deadline_of_the_factory_wins():
    made = SGLangGeneration(URL, timeout=60.0)

    assert made.delivery(colocated=False, timeout_s=7.0, policy=None).timeout == 7.0
    assert made.delivery(colocated=False, timeout_s=None, policy=None).timeout == 60.0


def test_its_configuration_says_how_weights_are_quantised():
    made = SGLangGeneration(URL, quantization={"scheme": "mxfp8", "group": 32})

    assert made.sglang_cfg["sglang_cfg"]["quantization"] == {"scheme": "mxfp8", "group": 32}
    assert SGLangGeneration(URL).cfg["sglang_cfg"]["quantization"] == {"scheme": "bf16"}


# ---- memory


def test_memory_is_freed_at_once_and_comes_back_weights_first(two: list[ReferenceEngine]):
    log, made = kit.Log(*two), generation(two)

    made.finish_generation()
    made.prepare_for_generation(tags=["weights"])
    made.prepare_for_generation(tags=["kv_cache"])

    for engine in two:
        assert phases(log, engine) == [(RELEASE, ALL), (RESUME, WEIGHTS), (RESUME, KV)]


@pytest.mark.parametrize("tags", [None, ["kv_cache", "weights"]])
def test_weights_come_first_in_whatever_order_they_are_named(
    engine: ReferenceEngine, tags: list[str] | None
):
    log, made = kit.Log(engine), generation(engine)

    made.finish_generation()
    made.prepare_for_generation(tags=tags)

    assert phases(log, engine) == [(RELEASE, ALL), (RESUME, WEIGHTS), (RESUME, KV)]


def test_every_call_may_be_repeated(engine: ReferenceEngine):
    log, made = kit.Log(engine), generation(engine)

    for _ in range(2):
        made.prepare_for_generation()
    for _ in range(2):
        made.finish_generation()
    for tag in ("weights", "weights", "kv_cache", "kv_cache"):
        made.prepare_for_generation(tags=[tag])

    assert phases(log, engine) == [(RELEASE, ALL), (RESUME, WEIGHTS), (RESUME, KV)]


def test_what_is_freed_already_is_not_freed_again(engine: ReferenceEngine):
    log, made = kit.Log(engine), generation(engine)

    made.finish_generation()
    made.prepare_for_generation(tags=["weights"])
    made.finish_generation()
    made.prepare_for_generation()

    again = [(RELEASE, WEIGHTS), (RESUME, WEIGHTS), (RESUME, KV)]
    assert phases(log, engine) == [(RELEASE, ALL), (RESUME, WEIGHTS), *again]


def test_without_offload_no_server_is_asked(engine: ReferenceEngine):
    log, made = kit.Log(engine), generation(engine, needs_offload=False)

    made.finish_generation()
    made.prepare_for_generation()

    assert log.records(engine) == []


def test_an_unknown_part_is_refused_before_anything_is_asked(engine: ReferenceEngine):
    log, made = kit.Log(engine), generation(engine)
    made.finish_generation()

    with pytest.raises(ConfigurationError, match="tag='wieghts'"):
        made.prepare_for_generation(tags=["wieghts"])

    assert phases(log, engine) == [(RELEASE, ALL)]
    made.prepare_for_generation()


def test_a_server_that_started_anew_has_freed_nothing(engine: ReferenceEngine):
    log, made = kit.Log(engine), generation(engine)
    made.finish_generation()

    engine.restart()
    made.prepare_for_generation()
    assert phases(log, engine) == [(RELEASE, ALL)]
    assert kit.served(engine) == kit.tokens_of(0)

    made.finish_generation()
    made.prepare_for_generation()
    assert kit.served(engine) == kit.tokens_of(0)


@contextmanager
def request_of(engine: ReferenceEngine, tokens: int) -> Iterator[Future[Any]]:
    """A request that runs."""
    request = spawn(engine.generate, kit.PROMPT, tokens)
    kit.wait_for(lambda: kit.running(engine) == 1)
    yield request


def test_memory_is_freed_once_no_request_runs(saver: ReferenceEngine):
    made = generation(saver, api_key="usual", admin_api_key="admin")

    with request_of(saver, 300) as request:
        made.finish_generation()  # the engine would end, were it busy
        assert len(request.result(30)["output_ids"]) == 300

    made.prepare_for_generation()
    assert saver.process.poll() is None


def stay_busy(engine: ReferenceEngine) -> None:
    """Have an engine say that it is not idle, for as long as it is asked."""
    engine.inject(Fault(FLUSH, "refuse", status=400, message="Flush cache failed."))


def test_a_server_that_stays_busy_keeps_its_memory(engine: ReferenceEngine):
    stay_busy(engine)
    log, made = kit.Log(engine), generation(engine, timeout=4.0)

    with pytest.raises(UpdateTimeout, match="finish or abort") as caught:
        made.finish_generation()

    assert caught.value.engine == engine.url
    assert phases(log, engine) == []


def test_a_server_that_refuses_keeps_its_memory_and_the_others_free_theirs(
    two: list[ReferenceEngine],
):
    refuses, frees = two
    refuses.inject(Fault(RELEASE, "refuse", times=1, status=400, message="not now"))
    log, made = kit.Log(*two), generation(two)

    with pytest.raises(EngineRejected, match="not now") as caught:
        made.finish_generation()
    made.prepare_for_generation()

    assert caught.value.engine == refuses.url
    assert phases(log, refuses) == [(RELEASE, ALL)]
    assert phases(log, frees) == [(RELEASE, ALL), (RESUME, WEIGHTS), (RESUME, KV)]


def test_all_servers_that_fail_are_named(two: list[ReferenceEngine]):
    for engine in two:
        engine.inject(Fault(RELEASE, "refuse", times=1, status=400, message="not now"))

    with pytest.raises(EngineRejected) as caught:
        generation(two).finish_generation()

    told = [str(caught.value), *caught.value.__notes__]
    assert all(any(engine.url in text for text in told) for engine in two)


class Scripted:
    """An engine that notes what it is told, and does not answer in time where it is told so."""

    url = URL

    def __init__(self, *late: str) -> None:
        self.told: list[Any] = []
        self._late = late

    def start_of(self, _: Deadline) -> str:
        return "the only one"

    def await_idle(self, _: Deadline) -> None:
        """It is idle."""

    def release(self, parts: Any, _: Deadline) -> None:
        self._note("release", list(parts))

    def resume(self, part: Any, _: Deadline) -> None:
        self._note("resume", part)

    def flush(self, _: Deadline) -> None:
        """Nothing is cached."""

    def close(self) -> None:
        """Nothing is open."""

    def _note(self, call: str, what: Any) -> None:
        self.told.append((call, what))
        if call in self._late:
            raise UpdateTimeout("no answer")


def test_a_server_that_was_told_and_did_not_answer_in_time_will_have_freed_its_memory():
    engine = Scripted("release")
    occupation = Occupation(engine)

    with pytest.raises(UpdateTimeout):
        occupation.release(Deadline(5.0))
    occupation.release(Deadline(5.0))
    occupation.resume(["weights"], Deadline(5.0))

    assert engine.told == [("release", ["weights", "kv_cache"]), ("resume", "weights")]


def test_a_server_that_was_told_to_take_memory_back_is_not_told_twice():
    engine = Scripted("resume")
    occupation = Occupation(engine)
    occupation.release(Deadline(5.0))

    for part in ("weights", "kv_cache"):
        with pytest.raises(UpdateTimeout):
            occupation.resume(["weights", "kv_cache"], Deadline(5.0))
        assert engine.told[-1] == ("resume", part)
    occupation.resume(["weights", "kv_cache"], Deadline(5.0))

    assert len(engine.told) == 3


def test_a_call_that_does_not_come_back_is_given_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(served, "_LATE_SECONDS", 0.0)
    never = threading.Event()

    with pytest.raises(UpdateTimeout, match="did not come back"):
        served.on_all([1, 2], lambda _, __: never.wait(), Deadline(0.05))

    never.set()


def test_a_server_without_a_memory_saver_is_told_of(
    engine: ReferenceEngine, saver: ReferenceEngine, caplog: pytest.LogCaptureFixture
):
    for one in (engine, saver):
        made = generation(one, api_key="usual", admin_api_key="admin")
        made.finish_generation()
        made.prepare_for_generation()

    warned = [record.getMessage() for record in caplog.records]
    assert len(warned) == 1
    assert f"{engine.url} has no memory saver" in warned[0]


# ---- what NeMo-RL's policies and synchronizers call


def test_all_engines_are_new_until_they_are_known(two: list[ReferenceEngine]):
    made = generation(two)

    engines, lock, new, counts, offsets = made.get_updatable_engines_and_lock()
    assert (engines, new, counts, offsets) == ([e.url for e in two], 2, [1, 1], [0, 1])
    assert lock is made.rollout_engine_lock
    with lock:
        pass

    made.clear_updatable_num_new_engines()
    assert made.get_updatable_engines_and_lock()[2] == 0


def test_an_engine_that_started_anew_is_new(two: list[ReferenceEngine]):
    made = generation(two)
    made.get_updatable_engines_and_lock()
    made.clear_updatable_num_new_engines()

    two[1].restart()

    assert made.get_updatable_engines_and_lock()[2] == 1
    assert made.get_updatable_engines_and_lock()[2] == 1  # until it is said to be known
    made.clear_updatable_num_new_engines()
    assert made.get_updatable_engines_and_lock()[2] == 0


def test_the_calls_around_a_refit_reach_every_engine_in_order(two: list[ReferenceEngine]):
    log, made = kit.Log(*two), generation(two)

    made.pause_generation(mode="retract")
    paused = [kit.is_paused(engine) for engine in two]
    made.begin_weight_update()
    made.end_weight_update()
    flushed = made.invalidate_kv_cache()
    made.continue_generation()

    assert (paused, flushed) == ([True, True], True)
    assert [kit.is_paused(engine) for engine in two] == [False, False]
    for engine in two:
        assert log.steps(engine) == [PAUSE, BEGIN, END, FLUSH, CONTINUE]


def test_a_pause_takes_its_own_mode_where_none_is_given(engine: ReferenceEngine):
    log, made = kit.Log(engine), generation(engine, pause_generation_mode="abort")

    made.pause_generation()
    made.continue_generation()

    assert log.bodies(engine, PAUSE) == [{"mode": "abort"}]


def test_an_unknown_pause_mode_is_refused(engine: ReferenceEngine):
    with pytest.raises(ConfigurationError, match="mode='freeze'"):
        generation(engine).pause_generation(mode="freeze")  # type: ignore[arg-type]


def test_ending_what_was_not_begun_asks_nothing(engine: ReferenceEngine):
    log = kit.Log(engine)

    generation(engine).end_weight_update()

    assert log.records(engine) == []


def test_an_update_that_a_dead_trainer_left_open_is_closed_first(engine: ReferenceEngine):
    engine.call("POST", BEGIN, {})
    log, made = kit.Log(engine), generation(engine)

    made.begin_weight_update()
    made.end_weight_update()

    assert log.steps(engine) == [BEGIN, END, BEGIN, END]


def test_a_cache_that_cannot_be_flushed_is_a_no_and_the_log_says_why(
    engine: ReferenceEngine, caplog: pytest.LogCaptureFixture
):
    stay_busy(engine)

    assert generation(engine, timeout=4.0).invalidate_kv_cache() is False

    assert "Flush cache failed" in caplog.text


def test_it_may_be_used_again_after_a_shutdown(engine: ReferenceEngine):
    log, made = kit.Log(engine), generation(engine)
    made.finish_generation()

    made.shutdown()
    made.prepare_for_generation()

    assert phases(log, engine) == [(RELEASE, ALL), (RESUME, WEIGHTS), (RESUME, KV)]


def test_an_engine_that_is_gone_is_named():
    made = SGLangGeneration(URL, timeout=5.0)

    with pytest.raises(WeightUpdateError) as caught:
        made.pause_generation()

    assert caught.value.engine == URL


def test_it_notes_what_a_policy_will_send():
    made = SGLangGeneration(URL)

    made.prepare_refit_info({"a": ((1,), "float32")})

    assert made.refit_info == {"a": ((1,), "float32")}
