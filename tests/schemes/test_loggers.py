"""TorchRL's loggers get the numbers of every update; what they wrote is read back from disk."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torchrl.record.loggers.common import Logger
from torchrl.record.loggers.csv import CSVLogger
from torchrl.record.loggers.tensorboard import TensorboardLogger
from torchrl.record.loggers.wandb import WandbLogger

from tests.integration import kit
from tests.schemes.told import MadeUp, failure, made_up, report_of
from tests.schemes.wandb_file import rows_of
from weight_update import ConfigurationError, EngineRejected, SGLangWeightSender
from weight_update.delivery.metrics import PREFIX

WAIT = 30.0
Series = dict[str, list[tuple[int, float]]]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine writes late: tests read what was logged once it is."""
    be_patient(monkeypatch, WAIT)


def be_patient(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    monkeypatch.setattr("weight_update.schemes.loggers._PATIENCE_SECONDS", seconds)


def run(sender: SGLangWeightSender, transport: MadeUp) -> None:
    """Success, failure, success: versions 1, 1, 2."""
    sender.update_weights({})
    transport.ends = [failure(report_of(1, ["old"]))]
    with pytest.raises(EngineRejected):
        sender.update_weights({})
    sender.update_weights({})


# -- what is read back ---------------------------------------------------------------------


def log_csv(folder: Path, drive: Callable[[Logger], None]) -> Series:
    drive(CSVLogger("run", log_dir=str(folder)))
    scalars = folder / "run" / "scalars"
    rows = {
        str(file.relative_to(scalars).with_suffix("")): file.read_text().split()
        for file in scalars.rglob("*.csv")
    }
    return {
        name: [(int(step), float(value)) for step, value in (line.split(",") for line in lines)]
        for name, lines in rows.items()
    }


def log_tensorboard(folder: Path, drive: Callable[[Logger], None]) -> Series:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = TensorboardLogger("run", log_dir=str(folder))
    drive(logger)
    logger.experiment.close()
    events = EventAccumulator(logger.log_dir)
    events.Reload()
    return {
        name: [(event.step, event.value) for event in events.Scalars(name)]
        for name in events.Tags()["scalars"]
    }


def log_wandb(folder: Path, drive: Callable[[Logger], None]) -> Series:
    logger = WandbLogger("run", offline=True, save_dir=str(folder), project="tests")
    drive(logger)
    logger.experiment.finish()
    (file,) = folder.rglob("*.wandb")
    series = Series()
    for row in kit.wait_for(lambda: rows_of(file), WAIT):
        for name, value in row.items():  # TorchRL gives each group of names a step of its own
            step = f"{name.rpartition('/')[0]}/step"
            if step in row and step != name:
                series.setdefault(name, []).append((row[step], value))
    return series


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """W&B talks to nobody, and writes nowhere else."""
    monkeypatch.setenv("WANDB_MODE", "offline")  # TorchRL's logger sets it too, and leaves it
    monkeypatch.setenv("WANDB_SILENT", "true")
    for name in ("WANDB_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path))


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("read", [log_csv, log_tensorboard, log_wandb], ids=lambda f: f.__name__)
def test_each_logger_has_every_update_at_the_step_of_its_version(
    read: Callable[[Path, Callable[[Logger], None]], Series], tmp_path: Path
) -> None:
    def drive(logger: Logger) -> None:
        sender, transport = made_up()
        sender.register_logger(logger)
        run(sender, transport)

    series = read(tmp_path, drive)

    def logged(name: str) -> list[tuple[int, float]]:
        return series[f"{PREFIX}/{name}"]

    assert logged("seconds/transfer") == [(1, 0.5), (2, 0.5)]
    assert logged("seconds/total") == [(1, 1.0), (2, 1.0)]
    assert logged("gigabytes_per_second") == [(1, 4.0), (2, 4.0)]
    assert logged("bytes") == [(1, 2e9), (2, 2e9)]
    # Of the one that failed, between them, at the version that the engines kept:
    assert logged("failures") == [(1, 0.0), (1, 1.0), (2, 1.0)]
    assert logged("updates") == [(1, 1.0), (1, 1.0), (2, 2.0)]
    assert logged("engines/new") == [(1, 1.0), (1, 0.0), (2, 1.0)]
    assert logged("engines/old") == [(1, 0.0), (1, 1.0), (2, 0.0)]
    assert logged("staleness/versions") == [(1, 0.0), (1, 1.0), (2, 0.0)]
    assert logged("failed_seconds") == [(1, 1.0)]
    assert [step for step, _ in logged("staleness/seconds")] == [1, 1, 2]


# -- any logger ----------------------------------------------------------------------------


class Remembering(Logger):  # type: ignore[misc]
    """Remembers what it was given; a logger of one's own."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, float, int | None]] = []
        super().__init__("run", "")

    def _create_experiment(self) -> None:
        return None

    def log_scalar(self, name: str, value: float, step: int | None = None) -> None:
        self.rows.append((name, value, step))

    def log_video(self, *given: Any, **named: Any) -> None: ...

    def log_hparams(self, cfg: Any) -> None: ...

    def log_histogram(self, *given: Any, **named: Any) -> None: ...

    def __repr__(self) -> str:
        return "Remembering()"

    def steps(self) -> list[int | None]:
        return [step for name, _, step in self.rows if name == f"{PREFIX}/version"]


class Scalars:
    """The least that a logger is."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, float, int]] = []

    def log_scalar(self, name: str, value: float, step: int) -> None:
        self.rows.append((name, value, step))


@pytest.mark.parametrize("kind", [Remembering, Scalars])
def test_whatever_logs_scalars_is_a_logger(kind: Callable[[], Any]) -> None:
    sender, transport = made_up()
    logger = kind()
    sender.register_logger(logger)

    run(sender, transport)

    assert [row[1:] for row in logger.rows if row[0] == f"{PREFIX}/failures"] == [
        (0.0, 1),
        (1.0, 1),
        (1.0, 2),
    ]


@pytest.mark.parametrize("thing", [None, "csv", object(), print])
def test_what_logs_no_scalars_is_refused(thing: Any) -> None:
    sender, _ = made_up()

    with pytest.raises(ConfigurationError, match="log_scalar"):
        sender.register_logger(thing)


def test_a_class_of_loggers_is_none() -> None:
    sender, _ = made_up()

    with pytest.raises(ConfigurationError, match="CSVLogger is a class"):
        sender.register_logger(CSVLogger)


def test_a_logger_that_is_registered_twice_logs_once() -> None:
    sender, _ = made_up()
    logger = Remembering()
    sender.register_logger(logger)
    sender.register_logger(logger)

    sender.update_weights({})

    assert logger.steps() == [1]


def test_all_kinds_of_updates_are_logged_in_their_order() -> None:
    sender, _ = made_up()
    logger = Remembering()
    sender.register_logger(logger)

    sender.update_weights({})
    sender.update_weights_async({}).result(WAIT)
    sender.recover()

    assert logger.steps() == [1, 2, 3]


def test_a_logger_that_comes_later_is_told_of_what_was_before() -> None:
    sender, transport = made_up()
    run(sender, transport)
    logger = Remembering()
    sender.register_logger(logger)

    sender.update_weights({})

    found = {name: value for name, value, _ in logger.rows}
    assert found[f"{PREFIX}/updates"] == 3.0
    assert found[f"{PREFIX}/failures"] == 1.0
    assert f"{PREFIX}/staleness/replaced_seconds" in found


def test_weights_that_wait_in_the_background_are_as_old_as_the_call_that_took_them() -> None:
    sender, transport = made_up()
    logger = Remembering()
    sender.register_logger(logger)
    began, go_on = threading.Event(), threading.Event()
    transport.during = lambda: (began.set(), go_on.wait(WAIT))

    first = sender.update_weights_async({})
    assert began.wait(WAIT)
    asked = time.monotonic()
    second = sender.update_weights_async({})
    time.sleep(0.05)  # the age under test
    go_on.set()
    first.result(WAIT), second.result(WAIT)
    upper = time.monotonic() - asked

    ages = [value for name, value, _ in logger.rows if name == f"{PREFIX}/staleness/seconds"]
    assert 0.05 <= ages[1] <= upper + 0.001


def test_an_error_without_a_report_is_not_logged() -> None:
    """Nothing was tried: the arguments were wrong."""
    sender, transport = made_up()
    logger = Remembering()
    sender.register_logger(logger)
    transport.ends = [ConfigurationError("no")]

    with pytest.raises(ConfigurationError):
        sender.update_weights({})

    assert logger.rows == []


def test_hooks_are_done_when_an_update_is_logged() -> None:
    sender, _ = made_up()
    logger = Remembering()
    sender.register_logger(logger)
    sender.register_post_hook(lambda: 1 / 0)

    sender.update_weights({})

    assert (f"{PREFIX}/warnings", 1.0, 1) in logger.rows


# -- bad loggers ---------------------------------------------------------------------------


class Broken(Scalars):
    def log_scalar(self, name: str, value: float, step: int) -> None:
        raise OSError("disk full")


class Hanging(Scalars):
    """Does not return before it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = threading.Event()

    def log_scalar(self, name: str, value: float, step: int) -> None:
        assert self.go_on.wait(WAIT)
        super().log_scalar(name, value, step)


def test_a_logger_that_raises_is_warned_of_once_and_breaks_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sender, transport = made_up()
    good = Remembering()
    sender.register_logger(Broken())
    sender.register_logger(good)

    with caplog.at_level(logging.WARNING, "weight_update"):
        run(sender, transport)

    assert good.steps() == [1, 1, 2]
    (record,) = caplog.records
    for words in ("Broken", "OSError", "disk full"):
        assert words in record.getMessage()


def test_a_logger_that_hangs_is_warned_of_once_and_gets_the_rest_when_it_wakes(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    be_patient(monkeypatch, 0.01)
    sender, transport = made_up()
    hanging, good = Hanging(), Remembering()
    sender.register_logger(hanging)
    sender.register_logger(good)

    with caplog.at_level(logging.WARNING, "weight_update"):
        run(sender, transport)
    assert hanging.rows == []
    warned = [r.getMessage() for r in caplog.records if "Hanging" in r.getMessage()]
    hanging.go_on.set()
    be_patient(monkeypatch, WAIT)
    sender.shutdown()  # waits for what is not written yet

    assert len(warned) == 1
    assert "did not return" in warned[0]
    assert [step for name, _, step in hanging.rows if name.endswith("/version")] == [1, 1, 2]
    assert good.steps() == [1, 1, 2]


def test_a_logger_that_never_wakes_keeps_no_more_than_the_newest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    be_patient(monkeypatch, 0.01)
    monkeypatch.setattr("weight_update.schemes.loggers._BACKLOG", 3)
    sender, _ = made_up()
    hanging = Hanging()
    sender.register_logger(hanging)

    for _ in range(10):
        sender.update_weights({})
    hanging.go_on.set()
    be_patient(monkeypatch, WAIT)
    sender.shutdown()

    steps = [step for name, _, step in hanging.rows if name.endswith("/version")]
    assert steps[-3:] == [8, 9, 10]
    assert len(steps) <= 4  # and the one that it had begun


def test_shutdown_forgets_loggers() -> None:
    sender, _ = made_up()
    logger = Remembering()
    sender.register_logger(logger)

    sender.shutdown()
    sender.update_weights({})

    assert logger.rows == []


def test_no_thread_is_left_once_everything_is_written() -> None:
    sender, transport = made_up()
    before = set(threading.enumerate())
    sender.register_logger(Remembering())
    run(sender, transport)
    sender.shutdown()

    for thread in set(threading.enumerate()) - before:
        thread.join(WAIT)
        assert not thread.is_alive()
