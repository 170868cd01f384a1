"""Which way is taken, and which other one where NCCL cannot connect the two ends."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from weight_update.errors import (
    ConfigurationError,
    EngineRejected,
    EngineUnreachable,
    UpdateTimeout,
    WeightUpdateError,
)
from weight_update.facts import Intake
from weight_update.options import UpdateOptions, Way
from weight_update.update.fleet import Fleet, Member
from weight_update.update.ways import (
    Course,
    Ends,
    choose_way,
    compared_settings,
    detours,
    nccl_settings,
    words_of,
)

from .fakes import FakeEngine, FakeGroup, FakePacker

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
DUPLICATE = (
    "the communicator was not built: NCCL error in: NCCLUtils.cpp:94, invalid usage\n"
    "Last error:\nDuplicate GPU detected : rank 1 and rank 0 both on CUDA device 19000"
)
BROKEN = (
    "Failed to receive weights: NCCL error in: NCCLUtils.cpp:94, internal error, NCCL version "
    "2.28.9 Last error: ring 0 does not contain rank 1"
)


def ends() -> Ends:
    return Ends(lambda *_: FakeGroup(), lambda _: FakePacker())


def ways(*names: Way) -> dict[Way, Ends]:
    return {name: ends() for name in names}


ALL = ways("broadcast", "ipc", "disk")


def fleet(*offline: str | None) -> Fleet:
    members = []
    for index, reason in enumerate(offline):
        engine = FakeEngine(f"http://engine{index}:1")
        engine.intake = Intake(offline=reason)
        members.append(Member(engine))
    return Fleet(members)


def test_bytes_are_broadcast_where_nothing_speaks_against_it() -> None:
    assert choose_way(fleet(None, None), UpdateOptions(), ALL) == ("broadcast", ())


def test_engines_that_join_no_group_read_a_disk_and_the_reason_names_them() -> None:
    way, reasons = choose_way(fleet(None, "it has 2 pipeline stages"), UpdateOptions(), ALL)

    assert (way, reasons) == ("disk", ("disk: http://engine1:1 it has 2 pipeline stages",))


@pytest.mark.parametrize("asked", ["broadcast", "ipc", "disk"])
def test_the_way_that_was_asked_for_is_taken(asked: Any) -> None:
    assert choose_way(fleet(None), UpdateOptions(transport=asked), ALL) == (asked, ())


def test_a_broadcast_that_cannot_reach_an_engine_is_refused_with_a_way_out() -> None:
    with pytest.raises(ConfigurationError, match=r"2 stages.*transport='disk'") as caught:
        choose_way(fleet(None, "2 stages"), UpdateOptions(transport="broadcast"), ALL)

    assert caught.value.engine == "http://engine1:1"


def test_a_way_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="transport='ipc' is not there"):
        choose_way(fleet(None), UpdateOptions(transport="ipc"), ways("broadcast"))


def refused(words: str) -> EngineRejected:
    return EngineRejected(words, engine="http://engine0:1", phase="transfer")


# What was tried, why it failed, what the user asked for, and what is tried next.
DETOURS: dict[str, tuple[Course, WeightUpdateError, dict[str, Any], list[tuple[str, str]]]] = {
    "one GPU for both": (
        *(Course("broadcast", GPU), WeightUpdateError(DUPLICATE, phase="transfer"), {}),
        [("ipc", "cuda"), ("broadcast", "cpu")],
    ),
    "one GPU for both, a broadcast asked for": (
        *(Course("broadcast", GPU), WeightUpdateError(DUPLICATE, phase="transfer")),
        *({"transport": "broadcast"}, [("broadcast", "cpu")]),
    ),
    "the engine says that NCCL failed": (
        *(Course("broadcast", GPU), refused(BROKEN), {}),
        [("broadcast", "cpu")],
    ),
    "a transfer that hangs": (
        *(Course("broadcast", GPU), UpdateTimeout("no answer", phase="transfer"), {}),
        [("broadcast", "cpu")],
    ),
    "an engine that is lost": (
        *(Course("broadcast", GPU), EngineUnreachable("reset", phase="transfer"), {}, []),
    ),
    "an engine without memory": (
        *(Course("broadcast", GPU), refused("Failed to receive weights: CUDA out of memory")),
        *({}, []),
    ),
    "an engine that does not pause": (
        *(Course("broadcast", GPU), UpdateTimeout("no answer", phase="pause"), {}, []),
    ),
    "gloo fails": (Course("broadcast", CPU), refused(BROKEN), {}, []),
    "ipc fails": (Course("ipc", GPU), refused(BROKEN), {}, []),
}


@pytest.mark.parametrize("case", DETOURS)
def test_another_course_is_taken_where_nccl_failed_and_only_there(case: str) -> None:
    course, failure, asked, expected = DETOURS[case]

    found = detours(course, failure, UpdateOptions(**asked), ALL)

    assert [(other.way, other.device.type) for other in found] == expected


@pytest.mark.parametrize("words", [DUPLICATE, BROKEN], ids=["one GPU", "a broken ring"])
def test_who_asked_for_nccl_gets_its_error(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    failure = WeightUpdateError(words, phase="transfer")

    assert detours(Course("broadcast", GPU), failure, UpdateOptions(backend="nccl"), ALL) == []


def test_the_other_course_says_why_in_nccls_words_and_warns() -> None:
    course = Course("broadcast", GPU, ("asked for",))

    (gloo,) = detours(course, refused(BROKEN), UpdateOptions(), ALL, "NCCL settings: none here")

    assert gloo.reasons == (
        "asked for",
        "gloo, since NCCL failed: ring 0 does not contain rank 1",
    )
    (warning,) = gloo.warnings
    for words in ("many times slower", "ring 0 does not", "none here", "NCCL_P2P_DISABLE"):
        assert words in warning


def test_the_words_of_nccl_are_the_last_ones_in_one_line() -> None:
    failure = WeightUpdateError(DUPLICATE)

    assert (
        words_of(failure) == "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 19000"
    )


def test_only_settings_that_decide_the_connection_are_shown() -> None:
    environment = {
        **{"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "CUDA_VISIBLE_DEVICES": "2"},
        **{"NCCL_DEBUG": "INFO", "API_KEY": "secret", "MY_NCCL_P2P_DISABLE": "1"},
    }

    assert nccl_settings(environment) == {
        "CUDA_VISIBLE_DEVICES": "2",
        "NCCL_P2P_DISABLE": "1",
        "NCCL_SHM_DISABLE": "1",
    }


def test_both_ends_settings_are_told() -> None:
    engines = [Intake(nccl={"NCCL_NVLS_ENABLE": "0", "NCCL_CUMEM_ENABLE": "0"}), Intake()]

    told = compared_settings({"NCCL_P2P_DISABLE": "1"}, engines)

    assert told == (
        "NCCL settings: NCCL_P2P_DISABLE=1 here; engines set NCCL_CUMEM_ENABLE=0, "
        "NCCL_NVLS_ENABLE=0 unless their environment does"
    )
