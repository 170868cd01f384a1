"""A tiny transfer shows that a course works; where NCCL fails, another is taken and kept."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from weight_update.errors import (
    ConfigurationError,
    EngineRejected,
    UpdateTimeout,
    WeightUpdateError,
)
from weight_update.facts import Intake
from weight_update.options import UpdateOptions, Way
from weight_update.update import wire as wire_module
from weight_update.update.updater import Updater
from weight_update.update.ways import Ends
from weight_update.waiting import Deadline

from .fakes import FakeEngine, FakeGroup, FakePacker, House, refused

DUPLICATE = "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 19000"
RING = "ring 0 does not contain rank 1"


class Link(FakeGroup):
    """A group that NCCL connects, or not: then its bytes never leave, as those of a real one."""

    def __init__(self, device: torch.device, trouble: str) -> None:
        super().__init__()
        self.device = device
        self.trouble = trouble
        self.backend = "nccl" if device.type == "cuda" else "gloo"
        self.sent: list[torch.device] = []

    def broadcast(self, tensors: list[torch.Tensor]) -> None:
        self.sent += [tensor.device for tensor in tensors]

    def moving(self) -> bool:
        if self.trouble == "hangs":
            return not self.given_up
        if self.trouble:
            raise WeightUpdateError(
                f"the communicator was not built: NCCL error\nLast error:\n{self.trouble}",
                phase="transfer",
            )
        return False


class LinkedEngine(FakeEngine):
    """Its answer to an update tells that NCCL failed, once the trainer's end was given up."""

    trouble: Trouble

    def _enter(self, call: str) -> None:
        super()._enter(call)
        link = self.trouble.links[-1] if call == "apply" else None
        if link is None or not link.trouble:
            return
        patience = Deadline(20.0)
        while not (link.given_up or patience.expired()):
            patience.sleep(0.005)
        raise EngineRejected(
            f"Failed to receive weights: NCCL error Last error: {link.trouble}",
            engine=self.url,
            phase="transfer",
        )


@dataclass
class Trouble:
    """What NCCL says, for now; what was opened meanwhile, and the links that came of it."""

    words: str
    opened: list[tuple[Way, str]] = field(default_factory=list)
    links: list[Link] = field(default_factory=list)

    def open_broadcast(self, _: Any, __: Any, ___: int, device: torch.device) -> Link:
        self.opened.append(("broadcast", device.type))
        self.links.append(Link(device, self.words if device.type == "cuda" else ""))
        return self.links[-1]

    def open_ipc(self, _: Any, __: Any, ___: int, device: torch.device) -> Link:
        self.opened.append(("ipc", device.type))
        self.links.append(Link(device, ""))
        return self.links[-1]


@dataclass
class Home(House):
    """Engines whose links have a trouble as long as NCCL carries the bytes."""

    trouble: Trouble = field(default_factory=lambda: Trouble(""))

    @property
    def opened(self) -> list[tuple[Way, str]]:
        return self.trouble.opened

    @property
    def links(self) -> list[Link]:
        return self.trouble.links


def home(words: str, *, engines: int = 1, ipc: str | None = "works", **options: Any) -> Home:
    """``ipc``: works, or why it is refused; None leaves the way out."""
    trouble = Trouble(words)
    fakes = [LinkedEngine(f"http://engine{index}:1") for index in range(engines)]
    for fake in fakes:
        fake.trouble = trouble

    def open_ipc(*given: Any) -> Link:
        if ipc != "works":
            raise ConfigurationError(str(ipc), phase="connect")
        return trouble.open_ipc(*given)

    ways: dict[Way, Ends] = {"broadcast": Ends(trouble.open_broadcast, lambda _: FakePacker())}
    if ipc is not None:
        ways["ipc"] = Ends(open_ipc, lambda _: FakePacker())
    given = {"device": "cuda:0", "bucket_bytes": 8, "timeout": 20.0, **options}
    updater = Updater([f.url for f in fakes], _by_url(fakes), ways, UpdateOptions(**given))
    return Home(list(fakes), updater, [], trouble=trouble)


def _by_url(fakes: list[LinkedEngine]) -> Callable[[str], LinkedEngine]:
    return {fake.url: fake for fake in fakes}.__getitem__


@pytest.fixture(autouse=True)
def _a_gpu_to_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fakes allocate nothing, so a GPU can be named without having one."""
    monkeypatch.setattr(wire_module, "check_device_exists", lambda _: None)


def applied(fleet: Home) -> int:
    return sum(call == "apply" for call in fleet.engines[0].calls)


def test_a_working_link_is_tried_once_and_the_cost_of_a_request_is_measured() -> None:
    fleet = home("")

    report = fleet.push()

    assert fleet.opened == [("broadcast", "cuda")]
    assert (report.route.way, report.route.backend, report.warnings) == ("broadcast", "nccl", ())
    assert applied(fleet) == 4 + 4  # four tiny ones, four buckets
    seconds = fleet.updater._wire.request_seconds
    assert seconds is not None
    assert seconds > 0


def test_the_trial_leaves_version_and_label_alone_and_flushes_nothing() -> None:
    fleet = home("")

    fleet.updater.connect(torch.device("cpu"))

    engine = fleet.engines[0]
    assert (fleet.updater.version, engine.shown, engine.paused, engine.open) == (
        *(0, "default"),
        *(False, False),
    )
    assert not {"flush", "stamp"} & set(engine.calls)
    assert set(engine.buckets) == {engine.harmless_name}


def test_a_new_group_of_the_same_engines_measures_nothing_again() -> None:
    fleet = home("")
    fleet.push()
    seconds = fleet.updater._wire.request_seconds
    fleet.links[-1].given_up = True

    fleet.push()

    assert fleet.opened == [("broadcast", "cuda")] * 2
    assert applied(fleet) == 8 + 1 + 4  # NCCL builds its communicator anew
    assert fleet.updater._wire.request_seconds == seconds


def test_gloo_on_the_cpu_is_not_tried() -> None:
    fleet = home("", device="cpu")

    fleet.push()

    assert applied(fleet) == 4


def test_ipc_is_tried_before_an_update_relies_on_it() -> None:
    fleet = home("", transport="ipc", device="cpu")

    fleet.push()

    assert fleet.opened == [("ipc", "cpu")]
    assert applied(fleet) == 4 + 4


def test_one_gpu_for_trainer_and_engine_ends_up_on_ipc_with_the_reason() -> None:
    fleet = home(DUPLICATE)

    report = fleet.push()

    assert fleet.opened == [("broadcast", "cuda"), ("ipc", "cuda")]
    assert report.route.way == "ipc"
    assert report.route.reasons == (
        f"ipc, since trainer and engine share a GPU, which NCCL refuses: {DUPLICATE}",
    )
    assert report.warnings == ()
    assert report.engines[fleet.engines[0].url].state == "new"


@pytest.mark.parametrize("ipc", [None, "the engine is on another host"], ids=["not there", "far"])
def test_without_ipc_one_gpu_for_both_ends_up_on_gloo(ipc: str | None) -> None:
    fleet = home(DUPLICATE, ipc=ipc)

    report = fleet.push()

    assert fleet.opened[-1] == ("broadcast", "cpu")
    assert (report.route.way, report.route.backend) == ("broadcast", "gloo")
    assert report.route.reasons == (f"gloo, since NCCL failed: {DUPLICATE}",)


@pytest.mark.parametrize("engines", [1, 2])
def test_a_link_that_nccl_cannot_make_goes_through_the_hosts_memory_and_warns(
    engines: int,
) -> None:
    fleet = home(RING, engines=engines)

    report = fleet.push()

    assert fleet.opened == [("broadcast", "cuda"), ("broadcast", "cpu")]
    assert fleet.links[0].given_up
    assert (report.version, report.route.backend) == (1, "gloo")
    assert report.route.reasons == (f"gloo, since NCCL failed: {RING}",)
    (warning,) = report.warnings
    assert RING in warning
    assert "many times slower" in warning
    for engine in fleet.engines:
        assert report.engines[engine.url].state == "new"
        assert not engine.paused


def test_what_was_found_is_kept_for_the_same_engines_and_warned_of_at_each_update() -> None:
    fleet = home(RING)
    first = fleet.push()
    fleet.links[-1].given_up = True

    second = fleet.push()

    assert fleet.opened == [("broadcast", "cuda"), ("broadcast", "cpu"), ("broadcast", "cpu")]
    assert second.warnings == first.warnings
    assert second.route == first.route


def test_engines_that_restarted_are_tried_again() -> None:
    fleet = home(RING)
    fleet.push()
    fleet.trouble.words = ""
    fleet.engines[0].instance, fleet.engines[0].shown = "second", "default"

    report = fleet.push()

    assert fleet.opened[-1] == ("broadcast", "cuda")
    assert (report.route.backend, report.warnings) == ("nccl", ())


def test_a_trial_that_hangs_is_given_up_in_time_and_counts_as_a_failure() -> None:
    fleet = home("hangs", timeout=4.0)

    report = fleet.push()

    assert fleet.opened == [("broadcast", "cuda"), ("broadcast", "cpu")]
    assert fleet.links[0].given_up
    assert report.route.backend == "gloo"


def test_who_asked_for_nccl_gets_its_words_and_what_to_look_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(os.environ, "NCCL_P2P_DISABLE", "1")
    fleet = home(RING, backend="nccl")
    fleet.engines[0].intake = Intake(nccl={"NCCL_CUMEM_ENABLE": "0"})

    with pytest.raises(WeightUpdateError, match=RING) as caught:
        fleet.push()

    assert fleet.opened == [("broadcast", "cuda")]
    for words in ("NCCL_P2P_DISABLE=1 here", "NCCL_CUMEM_ENABLE=0", "CUDA_VISIBLE_DEVICES"):
        assert words in str(caught.value)
    assert not fleet.updater.connected
    assert not fleet.engines[0].paused
    assert os.environ["NCCL_P2P_DISABLE"] == "1"


def test_an_engine_that_refuses_for_another_reason_is_no_matter_of_the_link() -> None:
    fleet = home("")
    fleet.engines[0].faults["apply"] = [refused(fleet.engines[0].url)]

    with pytest.raises(EngineRejected, match="refused"):
        fleet.push()

    assert fleet.opened == [("broadcast", "cuda")]


def test_an_engine_that_does_not_answer_after_the_failure_is_not_asked_to_join_again() -> None:
    fleet = home(RING)
    fleet.engines[0].faults["observe"] = [
        None,
        *(UpdateTimeout("stuck", phase="plan") for _ in range(9)),
    ]

    with pytest.raises(WeightUpdateError, match=RING):
        fleet.push()

    assert fleet.opened == [("broadcast", "cuda")]


def test_the_first_failure_is_raised_where_nothing_else_works_either() -> None:
    fleet = home(RING)
    fleet.engines[0].faults["join"] = [None, refused(fleet.engines[0].url)]

    with pytest.raises(WeightUpdateError, match=RING) as caught:
        fleet.push()

    assert any("nor did broadcast work" in note for note in caught.value.__notes__)
