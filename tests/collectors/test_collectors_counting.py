"""One update, one count: whichever way a program updates, and however often it registered."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torchrl.collectors import Collector, WeightUpdaterBase
from torchrl.envs.llm.transforms import PolicyVersion

from tests.collectors import worlds
from tests.integration import kit
from tests.integration.kit import UPDATE
from weight_update import ConfigurationError, SGLangWeightSyncScheme, WeightUpdateError
from weight_update.collectors.counting import Counters
from weight_update.collectors.remote_counting import register
from weight_update.reference_engine import Fault, ReferenceEngine

Update = Callable[[], Any]


class Desk:
    """Makes what a program has: a scheme, senders, collectors; and ends it."""

    def __init__(self, engine: ReferenceEngine) -> None:
        self.scheme = SGLangWeightSyncScheme(engine.url, timeout=60.0)
        self.scheme.register_model(kit.llama(1))
        self.senders: list[Any] = []
        self.collectors: list[Any] = []

    def sender(self, *collectors: Any) -> Any:
        self.senders.append(self.scheme.create_sender())
        self.senders[-1].register_model(kit.llama(1))
        for collector in collectors:
            self.senders[-1].register_collector(collector)
        return self.senders[-1]

    def collector(self, **options: Any) -> Any:
        world = {"frames_per_batch": 4, "total_frames": 400, "track_policy_version": True}
        made = Collector(worlds.Idle(), worlds.client(), **{**world, **options})
        self.collectors.append(made)
        return made

    def driver(self) -> Any:
        return self.collector(weight_sync_schemes={"policy": self.scheme})

    def close(self) -> None:
        for one in (*self.senders, *self.collectors, self.scheme):
            one.shutdown()


@pytest.fixture
def desk(engine: ReferenceEngine) -> Iterator[Desk]:
    made = Desk(engine)
    yield made
    made.close()


class Asks(WeightUpdaterBase):
    """A weight updater of the kind that TorchRL had before schemes."""

    def __init__(self, update: Update) -> None:
        self.update = update

    def _push_weights(self, **_: Any) -> None:
        self.update()

    def _sync_weights_with_worker(self, **_: Any) -> None:
        raise NotImplementedError


def version_of(collector: Any) -> int:
    return int(collector.policy_version)


# ---- every way to update


def collector_drives_the_scheme(desk: Desk) -> Update:
    return desk.driver().update_policy_weights_


def sender_counts(desk: Desk) -> Update:
    return desk.sender(desk.collector()).update_weights


def registered_twice(desk: Desk) -> Update:
    collector = desk.collector()
    return desk.sender(collector, collector).update_weights


def post_hook_counts(desk: Desk) -> Update:
    sender = desk.sender()
    sender.register_post_hook(desk.collector().increment_version)
    return sender.update_weights


def post_hook_counts_as_the_sender_does(desk: Desk) -> Update:
    collector = desk.collector()
    sender = desk.sender(collector)
    sender.register_post_hook(collector.increment_version)
    return sender.update_weights


def post_hook_counts_the_tracker(desk: Desk) -> Update:
    collector = desk.collector()
    sender = desk.sender(collector)
    sender.register_post_hook(collector.policy_version_tracker.increment_version)
    return sender.update_weights


def driver_that_a_sender_of_its_scheme_counts(desk: Desk) -> Update:
    driver = desk.driver()
    desk.sender(driver)
    return driver.update_policy_weights_


def sender_that_counts_the_driver_of_its_scheme(desk: Desk) -> Update:
    return desk.sender(desk.driver()).update_weights


def one_of_two_senders(desk: Desk) -> Update:
    collector = desk.collector()
    desk.sender(collector)
    return desk.sender(collector).update_weights


def updater_asks_the_sender_that_counts(desk: Desk) -> Update:
    sender = desk.sender()
    collector = desk.collector(weight_updater=Asks(sender.update_weights))
    sender.register_collector(collector)
    return collector.update_policy_weights_


def updater_asks_for_a_background_update(desk: Desk) -> Update:
    sender = desk.sender()
    collector = desk.collector(
        weight_updater=Asks(lambda: sender.update_weights_async().result(60))
    )
    sender.register_collector(collector)
    return collector.update_policy_weights_


def updaters_hook_counts(desk: Desk) -> Update:
    updater = Asks(desk.sender().update_weights)
    updater.register_post_hook(desk.collector().increment_version)
    return updater.push_weights


def updaters_hook_counts_as_the_sender_does(desk: Desk) -> Update:
    collector = desk.collector()
    updater = Asks(desk.sender(collector).update_weights)
    updater.register_post_hook(collector.increment_version)
    return updater.push_weights


def updater_counts_for_its_collectors(desk: Desk) -> Update:
    collector = desk.collector()
    updater = Asks(desk.sender(collector).update_weights)
    updater.register_collector(collector)
    updater.register_post_hook(updater.increment_version)
    return updater.push_weights


WAYS: list[Callable[[Desk], Update]] = [
    collector_drives_the_scheme,
    sender_counts,
    registered_twice,
    post_hook_counts,
    post_hook_counts_as_the_sender_does,
    post_hook_counts_the_tracker,
    driver_that_a_sender_of_its_scheme_counts,
    sender_that_counts_the_driver_of_its_scheme,
    one_of_two_senders,
    updater_asks_the_sender_that_counts,
    updater_asks_for_a_background_update,
    updaters_hook_counts,
    updaters_hook_counts_as_the_sender_does,
    updater_counts_for_its_collectors,
]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_an_update_counts_once_and_a_failed_one_never(
    way: Callable[[Desk], Update], desk: Desk, engine: ReferenceEngine
) -> None:
    update = way(desk)
    (collector,) = desk.collectors
    update()
    assert version_of(collector) == 1
    engine.inject(Fault(UPDATE, "refuse", times=1))
    with pytest.raises(WeightUpdateError, match="injected fault"):
        update()
    assert version_of(collector) == 1
    update()
    assert version_of(collector) == 2
    frames = next(iter(collector))["next", "policy_version"]
    assert set(frames.flatten().tolist()) == {2}


# ---- who shares a number


class Sharing:
    """A collector by its face: TorchRL lets a tracker into one environment only."""

    def __init__(self, tracker: Any) -> None:
        self.policy_version_tracker = tracker

    def increment_version(self) -> None:
        self.policy_version_tracker.increment_version()


def test_collectors_that_share_a_tracker_count_it_once() -> None:
    tracker = PolicyVersion("int")
    counters = Counters()
    for _ in range(2):
        register(counters, Sharing(tracker))
    assert counters.count(1) == []
    assert tracker.version == 1


def test_a_tracker_of_a_collector_that_counts_itself_is_left_to_it() -> None:
    tracker = PolicyVersion("int")
    counters = Counters()
    register(counters, Sharing(tracker))
    counters.count(1, [Sharing(tracker)])
    assert tracker.version == 0


def test_collectors_without_a_tracker_all_count() -> None:
    counted: list[int] = []
    counters = Counters()
    for index in range(2):
        one = Sharing(None)
        one.increment_version = lambda index=index: counted.append(index)  # type: ignore[method-assign]
        register(counters, one)
    counters.count(1)
    assert sorted(counted) == [0, 1]


def test_versions_that_are_no_numbers_change_once(desk: Desk) -> None:
    collector = desk.collector(track_policy_version=PolicyVersion("uuid"))
    sender = desk.sender(collector, collector)
    seen = [collector.policy_version]
    for _ in range(2):
        sender.update_weights()
        seen.append(collector.policy_version)
    assert len(set(seen)) == 3
    assert len(collector.policy_version_tracker.version_history) == 3


# ---- what goes wrong while it counts


def test_a_collector_that_cannot_count_is_warned_of_and_others_count(desk: Desk) -> None:
    class Broken:
        def increment_version(self) -> None:
            raise KeyError("no tracker")

    collector = desk.collector()
    report = desk.sender(Broken(), collector).update_weights()
    (warning,) = report.warnings
    assert "Broken.increment_version() failed (KeyError: 'no tracker') at version" in warning
    assert version_of(collector) == 1


def test_a_collector_that_hangs_keeps_no_other_from_counting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("weight_update.collectors.counting._COUNT_SECONDS", 2.0)
    let_go = threading.Event()
    tracker = PolicyVersion("int")
    stuck = Sharing(None)
    stuck.increment_version = let_go.wait  # type: ignore[method-assign]
    counters = Counters()
    register(counters, stuck)
    register(counters, Sharing(tracker))
    (warning,) = counters.count(7)
    let_go.set()
    assert "did not return within" in warning
    assert tracker.version == 1


def test_what_cannot_count_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="has no increment_version"):
        register(Counters(), object())


def test_a_class_is_no_collector() -> None:
    with pytest.raises(ConfigurationError, match="Collector is a class"):
        register(Counters(), Collector)


def test_a_collector_that_tracks_no_version_is_warned_of_when_it_is_registered(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    collector = desk.collector(track_policy_version=False)
    with caplog.at_level(logging.WARNING, "weight_update"):
        desk.sender(collector)
    assert "track_policy_version=True" in caplog.text
