"""What a release can do is told from its routes; its number decides only where they cannot."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weight_update.engines.sglang.capabilities import (
    PROBED_ROUTES,
    SGLangCapabilities,
    read_capabilities,
    read_layout,
    release_number,
    running_requests,
)
from weight_update.errors import ConfigurationError
from weight_update.options import PauseMode

URL = "http://a:1"
UNKNOWN: dict[str, bool | None] = dict.fromkeys(PROBED_ROUTES)


def capabilities(release: str, **routes: bool | None) -> SGLangCapabilities:
    named = {f"/{name}": there for name, there in routes.items()}
    return read_capabilities(release, UNKNOWN | named, url=URL)


# -- release numbers -----------------------------------------------------------------------

NUMBERS = st.integers(0, 9999)


@given(
    major=NUMBERS, minor=NUMBERS, patch=NUMBERS, tail=st.sampled_from(["", "rc1", ".post1", "+g"])
)
def test_a_release_number_is_its_three_leading_numbers(
    major: int, minor: int, patch: int, tail: str
) -> None:
    assert release_number(f"{major}.{minor}.{patch}{tail}") == (major, minor, patch)
    assert release_number(f"v{major}.{minor}{tail if tail != 'rc1' else ''}") == (major, minor, 0)


@given(st.text(max_size=20))
def test_any_text_has_a_release_number_or_none(text: str) -> None:
    number = release_number(text)

    assert number is None or (len(number) == 3 and all(part >= 0 for part in number))


@pytest.mark.parametrize("text", ["", "dev", "main-abc", "1", "v", "release 0.5.9", ".5.9"])
def test_a_text_that_does_not_begin_with_a_number_has_none(text: str) -> None:
    assert release_number(text) is None


def test_releases_are_ordered_as_numbers_and_not_as_text() -> None:
    texts = ["0.4.10", "0.5.6", "0.5.9", "0.5.10", "0.5.23", "0.10.0", "1.0"]

    numbers = [release_number(text) for text in texts]
    assert numbers == sorted(numbers, key=lambda number: number or ())


# -- capabilities --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("release", "sessions", "flush_under_retract", "brackets_ipv6"),
    [
        ("0.5.6", False, True, True),
        ("0.5.9", False, True, True),
        ("0.5.9.post1", False, True, True),
        ("0.5.10", False, False, False),
        ("0.5.12", False, False, False),
        ("0.5.19", False, False, False),
        ("0.5.21", True, True, False),
        ("0.5.23", True, True, False),
        ("0.6.0", True, True, False),
    ],
)
def test_each_release_has_its_capabilities_when_routes_do_not_tell(
    release: str, sessions: bool, flush_under_retract: bool, brackets_ipv6: bool
) -> None:
    found = capabilities(release)

    assert found.release == release
    assert found.sessions is sessions
    assert found.live_loads is not sessions
    assert found.flush_under_retract is flush_under_retract
    assert found.brackets_ipv6 is brackets_ipv6


@pytest.mark.parametrize(("there", "release"), [(True, "0.5.12"), (False, "0.5.23"), (True, "")])
def test_a_route_that_is_there_or_not_wins_over_the_release(there: bool, release: str) -> None:
    assert capabilities(release, begin_weight_update=there).sessions is there


@pytest.mark.parametrize(
    ("old", "new", "route"),
    [
        (True, True, "/get_load"),
        (True, False, "/get_load"),
        (False, True, "/v1/loads"),
        (False, False, None),
        (None, True, "/get_load"),
        (False, None, "/v1/loads"),
    ],
)
def test_loads_are_asked_where_they_are(
    old: bool | None, new: bool | None, route: str | None
) -> None:
    routes = UNKNOWN | {"/get_load": old, "/v1/loads": new}

    assert read_capabilities("0.5.12", routes, url=URL).loads_route == route


@pytest.mark.parametrize(
    ("release", "routes"),
    [
        ("0.4.6.post1", {}),
        ("0.5.3", {}),
        ("0.5.5", {}),
        ("0.5.9", {"pause_generation": False}),
        ("", {"model_info": False}),
    ],
)
def test_a_release_without_pause_modes_is_refused_at_connect(
    release: str, routes: dict[str, bool]
) -> None:
    with pytest.raises(ConfigurationError, match="pause modes") as caught:
        capabilities(release, **routes)

    assert caught.value.engine == URL
    assert caught.value.phase == "connect"
    assert "0.5.6" in caught.value.remedy
    assert (release or "unknown") in str(caught.value)


def test_another_kind_of_server_is_told_apart_from_an_old_release() -> None:
    with pytest.raises(ConfigurationError, match="no SGLang server answers here"):
        capabilities("", pause_generation=False)


def test_a_release_that_is_not_told_is_judged_by_its_routes() -> None:
    found = capabilities("", pause_generation=True, model_info=True, begin_weight_update=True)

    assert found.sessions
    assert found.flush_under_retract
    assert not found.brackets_ipv6


# -- layout --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("info", "ranks"),
    [
        ({}, None),
        ({"tp_size": 2}, 2),
        ({"tp_size": 8, "dp_size": 8, "enable_dp_attention": True}, 8),
        ({"tp_size": 1, "pp_size": 1, "dp_size": 1}, 1),
        ({"tp_size": 2, "pp_size": 3, "dp_size": 4}, 24),
        ({"dp_size": 4}, None),
        ({"tp_size": None}, None),
        ({"tp_size": "2"}, None),
        ({"tp_size": True}, None),
        ({"tp_size": 0}, None),
    ],
)
def test_the_ranks_of_a_server_are_those_of_all_its_replicas_and_stages(
    info: dict[str, Any], ranks: int | None
) -> None:
    assert read_layout(info).ranks == ranks


@pytest.mark.parametrize(
    ("info", "words"),
    [
        ({"pp_size": 2}, "runs 2 pipeline stages"),
        ({"dp_size": 2}, "runs 2 data-parallel replicas"),
        ({"dp_size": 4, "enable_dp_attention": False}, "runs 4 data-parallel replicas"),
        ({"pp_size": 2, "dp_size": 2, "enable_dp_attention": True}, "runs 2 pipeline stages"),
    ],
)
def test_a_layout_that_cannot_join_a_group_says_why(info: dict[str, Any], words: str) -> None:
    assert words in (read_layout(info).offline or "")


@pytest.mark.parametrize(
    "info",
    [{}, {"pp_size": 1, "dp_size": 1}, {"dp_size": 8, "enable_dp_attention": True}],
)
def test_a_layout_that_joins_a_group_has_nothing_to_say(info: dict[str, Any]) -> None:
    assert read_layout(info).offline is None


@pytest.mark.parametrize(
    ("info", "refused"),
    [
        ({}, set()),
        ({"dp_size": 2}, set()),
        ({"pp_size": 2}, {"retract", "in_place"}),
        ({"disaggregation_mode": "decode"}, {"retract", "in_place"}),
    ],
    ids=["plain", "replicas", "stages", "disaggregated"],
)
def test_a_layout_refuses_pause_modes_that_do_not_stop_it(
    info: dict[str, Any], refused: set[str]
) -> None:
    """Seen on 0.5.23: under `retract`, pipeline stages run on, and no flush succeeds."""
    layout = read_layout(info)

    assert {mode for mode in get_args(PauseMode) if layout.objection(mode)} == refused


@pytest.mark.parametrize(
    ("mode", "split"), [(None, False), ("null", False), ("prefill", True), ("decode", True)]
)
def test_prefill_and_decode_servers_are_disaggregated(mode: str | None, split: bool) -> None:
    assert read_layout({"disaggregation_mode": mode}).disaggregated is split


# -- loads ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loads", "running"),
    [
        ([], 0),
        ([{"num_running_reqs": 3}], 3),
        ([{"num_running_reqs": 0, "num_reqs": 9}], 0),
        ([{"num_reqs": 5, "num_waiting_reqs": 2}], 3),
        ([{"num_reqs": 5}], 5),
        ([{"num_reqs": 1, "num_waiting_reqs": 2}], 0),
        ({"loads": [{"num_running_reqs": 1}, {"num_running_reqs": 4}]}, 5),
        ({"loads": [], "timestamp": 1}, 0),
        ({"loads": [{"num_running_reqs": 1}, {"dp_rank": 1}]}, None),
        ({"loads": [3]}, None),
        ({"loads": {}}, None),
        ({"message": "busy"}, None),
        ([{"num_reqs": "5"}], None),
        ([{"num_reqs": 5, "num_waiting_reqs": None}], None),
        ("html", None),
        (None, None),
        (3, None),
    ],
)
def test_running_requests_are_summed_over_ranks_or_unknown(loads: Any, running: int | None) -> None:
    assert running_requests(loads) == running


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["loads", "num_reqs", "num_running_reqs"]), inner)
    ),
    max_leaves=8,
)


@given(JSON)
def test_any_json_answer_is_a_count_or_unknown(loads: Any) -> None:
    running = running_requests(loads)

    assert running is None or isinstance(running, int)
