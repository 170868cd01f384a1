"""Updates by disk: written before the pause, loaded by one request, and true whatever fails."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from tests.integration import kit
from weight_update import EngineState, UpdateReport, WeightUpdateError
from weight_update.errors import ConfigurationError
from weight_update.reference_engine import ReferenceEngine
from weight_update.reference_engine.faults import Fault
from weight_update.report import Progress
from weight_update.weights.checkpoint import INDEX, Checkpoint
from weight_update.weights.stream import Stream

LOAD = "/update_weights_from_disk"
OLD, NEW, MIXED, UNREACHABLE = EngineState
HALF_WAY = "Failed to update weights: x.\nRolling back to original weights."
NOT_BEGUN = "Failed to get weights iterator: x."


@pytest.fixture(scope="module")
def started() -> Iterator[list[ReferenceEngine]]:
    """Two engines of their own: the model that they show moves."""
    engines = [ReferenceEngine(kit.llama(0), wait=False) for _ in range(2)]
    for engine in engines:
        engine.wait_until_ready()
    yield engines
    for engine in engines:
        engine.stop()


@pytest.fixture
def two(started: list[ReferenceEngine]) -> Iterator[list[ReferenceEngine]]:
    yield started
    for engine in started:
        kit.revive(engine)


@pytest.fixture
def one(two: list[ReferenceEngine]) -> ReferenceEngine:
    return two[0]


def sender_of(engines: Any, directory: Path, **options: Any) -> Any:
    return kit.make_sender(engines, **{"transport": "disk", "directory": directory, **options})


def shown(engine: ReferenceEngine) -> Path:
    """The folder of the model that an engine shows."""
    return Path(engine.call("GET", "/model_info")["model_path"])


def versions(directory: Path) -> list[Path]:
    return list(directory.glob("weight-update-*/version-*"))


# -- what an update does -------------------------------------------------------------------


def test_update_after_update_arrives_and_is_proven(one: ReferenceEngine, tmp_path: Path) -> None:
    with sender_of(one, tmp_path) as sender:
        for seed in (1, 0, 1):
            report = sender.update_weights(kit.llama(seed))
            assert kit.served(one) == kit.tokens_of(seed)
            assert kit.label(one) == str(report.version)
            assert report.verification == "checksum"


def test_the_report_names_the_way_and_the_place(one: ReferenceEngine, tmp_path: Path) -> None:
    with sender_of(one, tmp_path) as sender:
        report: UpdateReport = sender.update_weights(kit.llama(1))
    assert report.route is not None
    assert (report.route.way, report.route.bucket_bytes) == ("disk", report.bytes)
    assert f"by disk, in buckets of 90.75 kB (safetensors in {tmp_path})" in str(report)


def test_one_request_loads_and_no_group_or_session_is_made(
    one: ReferenceEngine, tmp_path: Path
) -> None:
    log = kit.Log(one)
    with sender_of(one, tmp_path) as sender:
        report = sender.update_weights(kit.llama(1))
        (body,) = log.bodies(one, LOAD)
    assert body == {
        "model_path": str(shown(one)),
        "load_format": "auto",
        "flush_cache": True,
        "abort_all_requests": False,
    }
    assert report.buckets == 1
    for path in (kit.INIT, kit.LEAVE, kit.BEGIN, kit.UPDATE, kit.END):
        assert log.count(one, path) == 0, path


@pytest.mark.parametrize("mode", ["retract", "abort"])
def test_the_request_brings_the_flush(mode: str, one: ReferenceEngine, tmp_path: Path) -> None:
    log = kit.Log(one)
    with sender_of(one, tmp_path, pause_mode=mode) as sender:
        sender.update_weights(kit.llama(1))
    assert [body["flush_cache"] for body in log.bodies(one, LOAD)] == [True]
    assert log.count(one, kit.FLUSH) == 0


def test_everything_is_written_before_the_pause(one: ReferenceEngine, tmp_path: Path) -> None:
    there: dict[str, bool] = {}

    def look(now: Progress) -> None:
        indices = [folder / INDEX for folder in versions(tmp_path)]
        there.setdefault(now.phase, any(index.is_file() for index in indices))

    with sender_of(one, tmp_path) as sender:
        sender.update_weights(kit.llama(1), progress=look)
    assert there["plan"] is False
    assert there["pause"] is True


def test_engines_read_the_same_folder(two: list[ReferenceEngine], tmp_path: Path) -> None:
    with sender_of(two, tmp_path) as sender:
        sender.update_weights(kit.llama(1))
        assert len({shown(engine) for engine in two}) == 1
    assert [kit.served(engine) for engine in two] == [kit.tokens_of(1)] * 2


def test_files_have_the_size_that_was_asked_for(one: ReferenceEngine, tmp_path: Path) -> None:
    with sender_of(one, tmp_path, bucket_bytes=20_000) as sender:
        report = sender.update_weights(kit.llama(1))
        sizes = [file.stat().st_size for file in shown(one).glob("*.safetensors")]
    assert report.buckets == 1
    assert len(sizes) > 2
    assert kit.served(one) == kit.tokens_of(1)


# -- what stays ----------------------------------------------------------------------------


def test_the_folder_that_an_engine_shows_is_a_whole_checkpoint(
    one: ReferenceEngine, tmp_path: Path
) -> None:
    with sender_of(one, tmp_path) as sender:
        for _ in range(2):
            sender.update_weights(kit.llama(1))
            folder = shown(one)
            assert json.loads((folder / "config.json").read_text())["model_type"] == "llama"
            assert len(Checkpoint(str(folder)).weights) == 21
            assert versions(tmp_path) == [folder]


def test_nothing_of_a_sender_is_left(one: ReferenceEngine, tmp_path: Path) -> None:
    with sender_of(one, tmp_path) as sender:
        sender.update_weights(kit.llama(1))
    assert list(tmp_path.iterdir()) == []


def test_a_later_sender_knows_the_model_although_its_folder_is_gone(
    one: ReferenceEngine, tmp_path: Path
) -> None:
    kit.push(one, kit.llama(0))
    with sender_of(one, tmp_path) as sender:
        sender.update_weights(kit.llama(1))
    assert not shown(one).exists()
    with kit.make_sender(one) as sender:
        report = sender.update_weights(kit.llama(0))
        member = sender._transport._updater.roster.members[0]
    assert report.warnings == ()
    assert member.engine.intake.shapes


def test_a_failed_update_leaves_the_folder_that_is_served(
    one: ReferenceEngine, tmp_path: Path
) -> None:
    with sender_of(one, tmp_path) as sender:
        sender.update_weights(kit.llama(1))
        served = shown(one)
        one.inject(Fault(LOAD, "refuse", message=NOT_BEGUN, times=1))
        with pytest.raises(WeightUpdateError):
            sender.update_weights(kit.llama(0))
        assert shown(one) == served
        assert served.is_dir()
        sender.update_weights(kit.llama(0))
        assert versions(tmp_path) == [shown(one)]


# -- which way -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def replicas() -> Iterator[ReferenceEngine]:
    with ReferenceEngine(kit.llama(0), shows={"dp_size": 2}) as engine:
        yield engine


def test_replicas_are_updated_by_disk_without_being_told(
    replicas: ReferenceEngine, tmp_path: Path
) -> None:
    with kit.make_sender(replicas, directory=tmp_path) as sender:
        report = sender.update_weights(kit.llama(1))
    assert report.route is not None
    assert report.route.way == "disk"
    assert "2 data-parallel replicas, which cannot join a group" in report.route.reasons[0]
    assert kit.served(replicas) == kit.tokens_of(1)


def test_a_fleet_with_replicas_goes_by_disk_as_a_whole(
    replicas: ReferenceEngine, one: ReferenceEngine, tmp_path: Path
) -> None:
    with kit.make_sender([one, replicas], directory=tmp_path) as sender:
        report = sender.update_weights(kit.llama(1))
    assert report.route is not None
    told = [text for text in report.route.reasons if "cannot join a group" in text]
    assert len(told) == 1, report.route.reasons
    assert replicas.url in told[0]
    assert [kit.served(engine) for engine in (one, replicas)] == [kit.tokens_of(1)] * 2


def test_replicas_refuse_a_broadcast(replicas: ReferenceEngine) -> None:
    log = kit.Log(replicas)
    with (
        kit.make_sender(replicas, transport="broadcast") as sender,
        pytest.raises(ConfigurationError, match=r"2 data-parallel replicas.*transport='disk'"),
    ):
        sender.update_weights(kit.llama(1))
    assert log.count(replicas, kit.PAUSE) == 0


def test_without_a_directory_an_engine_elsewhere_is_refused(
    one: ReferenceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weight_update.transports.disk.is_here", lambda _: False)
    log = kit.Log(one)
    with (
        kit.make_sender(one, transport="disk") as sender,
        pytest.raises(ConfigurationError, match="on another host") as caught,
    ):
        sender.update_weights(kit.llama(1))
    assert (caught.value.phase, caught.value.engine) == ("connect", one.url)
    assert "directory=" in caught.value.remedy
    assert log.count(one, kit.PAUSE) == 0


def test_without_a_directory_an_engine_of_this_host_reads_a_folder_of_it(
    one: ReferenceEngine,
) -> None:
    with kit.make_sender(one, transport="disk") as sender:
        sender.update_weights(kit.llama(1))
        folder = shown(one)
        assert f"-{os.getpid()}-" in folder.parent.name
    assert kit.served(one) == kit.tokens_of(1)
    assert not folder.parent.exists()


def test_the_directory_may_come_from_the_environment(
    one: ReferenceEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEIGHT_UPDATE_DIRECTORY", f" {tmp_path} ")
    with kit.make_sender(one, transport="disk") as sender:
        sender.update_weights(kit.llama(1))
        assert tmp_path in shown(one).parents


# -- what can be sent ----------------------------------------------------------------------


def test_a_checkpoint_goes_by_disk(one: ReferenceEngine, tmp_path: Path) -> None:
    source, directory = tmp_path / "source", tmp_path / "pushed"
    directory.mkdir()
    kit.llama(1).save_pretrained(source)
    with sender_of(one, directory) as sender:
        sender.update_weights(Checkpoint(str(source)))
    assert kit.served(one) == kit.tokens_of(1)


def test_some_weights_alone_go_by_disk(one: ReferenceEngine, tmp_path: Path) -> None:
    name, changed = "model.norm.weight", torch.full((32,), 0.5)
    with sender_of(one, tmp_path) as sender:
        sender.update_weights(kit.llama(1))
        sender.update_weights({name: changed})
        with safe_open(next(shown(one).glob("*.safetensors")), "pt") as tensors:
            assert list(tensors.keys()) == [name]
    rows = one.call("POST", "/get_weights_by_name", {"name": name, "truncate_size": 1})
    assert rows == [0.5]


def test_a_stream_goes_by_disk_a_bucket_at_a_time(one: ReferenceEngine, tmp_path: Path) -> None:
    log = kit.Log(one)
    with sender_of(one, tmp_path, bucket_bytes=20_000) as sender:
        report = sender.update_weights(Stream(kit.llama(1).state_dict().items(), whole=True))
        assert len(versions(tmp_path)) == 1
    assert report.buckets == log.count(one, LOAD) > 2
    assert kit.served(one) == kit.tokens_of(1)


def test_names_and_dtypes_are_those_of_the_engine(one: ReferenceEngine, tmp_path: Path) -> None:
    renamed = {
        f"policy.{name}": value.double() for name, value in kit.llama(1).state_dict().items()
    }
    options: dict[str, Any] = {"name_map": {r"^policy\.": ""}, "dtype": "engine"}
    with sender_of(one, tmp_path, **options) as sender:
        sender.update_weights(renamed)
        with safe_open(next(shown(one).glob("*.safetensors")), "pt") as tensors:
            assert tensors.get_tensor("model.norm.weight").dtype == torch.float32
    assert kit.served(one) == kit.tokens_of(1)


# -- what fails ----------------------------------------------------------------------------

FAULTS = [
    ("it could not begin", Fault(LOAD, "refuse", message=NOT_BEGUN), OLD, "weights iterator"),
    ("a page that nobody found", Fault(LOAD, "non_json", status=404), MIXED, "404"),
    ("it failed half-way", Fault(LOAD, "refuse", message=HALF_WAY), MIXED, "Rolling back"),
    (
        "one replica has it",
        Fault(LOAD, "refuse", message=f"Succeeded to update model weights. | {NOT_BEGUN}"),
        MIXED,
        "Succeeded",
    ),
    ("other words", Fault(LOAD, "refuse", message="something"), MIXED, "something"),
    ("a no with a yes", Fault(LOAD, "success_false", message="something"), MIXED, "something"),
    ("a page", Fault(LOAD, "non_json", status=200), MIXED, "html"),
    ("a gateway", Fault(LOAD, "non_json", status=502), MIXED, "502"),
    ("a loader that trips", Fault(LOAD, "refuse", when="after_load", tensors=3), MIXED, "injected"),
    ("a lie", Fault(LOAD, "lie"), MIXED, "does not hold what was sent"),
]


@pytest.mark.parametrize(
    ("fault", "state", "words"), [row[1:] for row in FAULTS], ids=[row[0] for row in FAULTS]
)
def test_what_an_engine_holds_after_a_failure_is_told_and_healed(
    fault: Fault, state: EngineState, words: str, one: ReferenceEngine, tmp_path: Path
) -> None:
    kit.push(one, kit.llama(0))
    with sender_of(one, tmp_path) as sender:
        one.inject(fault)
        with pytest.raises(WeightUpdateError) as caught:
            sender.update_weights(kit.llama(1))
        one.clear_faults()
        outcome = caught.value.report.engines[one.url]
        assert outcome.state is state, outcome
        assert words in str(caught.value)
        assert kit.is_paused(one) is outcome.paused is (state is MIXED)
        if state is OLD:
            assert kit.served(one) == kit.tokens_of(0)
        sender.update_weights(kit.llama(1))
        assert kit.served(one) == kit.tokens_of(1)
        assert versions(tmp_path) == [shown(one)]


def test_a_refused_flush_is_asked_for_again(one: ReferenceEngine, tmp_path: Path) -> None:
    """The weights are there; each replica says so in a text that all share."""
    text = "Weights were updated, but the cache was not flushed because ..."
    log = kit.Log(one)
    with sender_of(one, tmp_path, pause_mode="abort") as sender:
        one.inject(Fault(LOAD, "refuse", when="before_answer", message=f"{text} | {text}", times=1))
        report = sender.update_weights(kit.llama(1))
    assert report.engines[one.url].state is NEW
    assert log.count(one, kit.FLUSH) == 1
    assert kit.served(one) == kit.tokens_of(1)


def test_an_engine_that_does_not_see_the_folder_says_so_and_serves_on(
    one: ReferenceEngine, tmp_path: Path
) -> None:
    kit.push(one, kit.llama(0))
    one.inject(Fault(LOAD, "refuse", message=NOT_BEGUN, times=1))
    with sender_of(one, tmp_path) as sender, pytest.raises(WeightUpdateError) as caught:
        sender.update_weights(kit.llama(1))
    assert "must see" in caught.value.remedy
    assert "directory=" in caught.value.remedy


def test_an_engine_that_dies_while_it_loads_is_unreachable_and_taken_back(
    one: ReferenceEngine, tmp_path: Path
) -> None:
    """As a real one does when loading fails twice."""
    with sender_of(one, tmp_path) as sender:
        one.inject(Fault(LOAD, "die", when="after_load", tensors=3, times=1))
        with pytest.raises(WeightUpdateError) as caught:
            sender.update_weights(kit.llama(1))
        assert caught.value.report.engines[one.url].state is UNREACHABLE
        one.restart()
        sender.update_weights(kit.llama(1))
        assert kit.served(one) == kit.tokens_of(1)


def test_an_engine_that_hangs_is_given_up_at_the_deadline_and_healed(
    one: ReferenceEngine, tmp_path: Path
) -> None:
    with sender_of(one, tmp_path) as sender:
        sender.update_weights(kit.llama(0))
        one.inject(Fault(LOAD, "hang", times=1))
        with kit.timeout_of(sender, 3.0), pytest.raises(WeightUpdateError) as caught:
            sender.update_weights(kit.llama(1))
        assert caught.value.report.engines[one.url].state is MIXED
        sender.update_weights(kit.llama(1))
        assert kit.served(one) == kit.tokens_of(1)


def test_with_a_quorum_the_others_take_it(two: list[ReferenceEngine], tmp_path: Path) -> None:
    with sender_of(two, tmp_path, quorum=1) as sender:
        sender.update_weights(kit.llama(0))
        two[1].inject(Fault(LOAD, "refuse", message=HALF_WAY, times=1))
        report = sender.update_weights(kit.llama(1))
        assert [report.engines[engine.url].state for engine in two] == [NEW, MIXED]
        report = sender.update_weights(kit.llama(1))
        assert [report.engines[engine.url].state for engine in two] == [NEW, NEW]
    assert [kit.served(engine) for engine in two] == [kit.tokens_of(1)] * 2


def test_what_a_slow_engine_still_reads_stays_although_a_quorum_has_the_version(
    two: list[ReferenceEngine], tmp_path: Path
) -> None:
    """A real server that finds a file gone loads the folder once more, and ends if that fails."""
    quick, slow = two
    with sender_of(two, tmp_path, quorum=1) as sender:
        sender.update_weights(kit.llama(0))
        log = kit.Log(slow)
        slow.inject(Fault(LOAD, "slow", seconds=4.0, times=1))
        with kit.timeout_of(sender, 3.0):
            report = sender.update_weights(kit.llama(1))
        assert report.engines[quick.url].state is NEW
        assert report.engines[slow.url].state is not NEW
        (told,) = log.bodies(slow, LOAD)
        assert Path(told["model_path"]).is_dir()
        kit.wait_for(lambda: shown(slow) == Path(told["model_path"]))  # it has loaded it
        sender.update_weights(kit.llama(0))
        assert [kit.served(engine) for engine in two] == [kit.tokens_of(0)] * 2
        assert versions(tmp_path) == [shown(quick)]


def test_an_engine_that_was_taken_out_while_it_read_keeps_no_version(
    two: list[ReferenceEngine], tmp_path: Path
) -> None:
    quick, gone = two
    with sender_of(two, tmp_path, quorum=1) as sender:
        sender.update_weights(kit.llama(0))
        gone.inject(Fault(LOAD, "hang", times=1))
        with kit.timeout_of(sender, 3.0):
            sender.update_weights(kit.llama(1))
        sender.remove_engine(gone.url)
        for _ in range(2):
            sender.update_weights(kit.llama(0))
        assert versions(tmp_path) == [shown(quick)]
