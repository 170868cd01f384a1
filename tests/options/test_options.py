"""Options: read once, checked at once, and every refusal names the argument and the way out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weight_update import options
from weight_update.errors import ConfigurationError
from weight_update.options import HttpOptions, UpdateOptions, parse_device, parse_server_urls

BIG = 1 << 40


def refusal(**arguments: Any) -> ConfigurationError:
    with pytest.raises(ConfigurationError) as caught:
        UpdateOptions(**arguments)
    return caught.value


# -- arguments -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("backend", "mpi"),
        ("backend", None),
        ("on_failure", "ignore"),
        ("load_format", "safetensors"),
        ("timeout", 0),
        ("timeout", -1.0),
        ("timeout", float("nan")),
        ("timeout", float("inf")),
        ("timeout", None),
        ("timeout", "10"),
        ("timeout", True),
        ("num_gpus", 0),
        ("num_gpus", -2),
        ("num_gpus", 1.0),
        ("num_gpus", True),
        ("bucket_bytes", 0),
        ("bucket_bytes", -1),
        ("bucket_bytes", 1.5),
        ("bucket_bytes", "1GB"),
        ("master_port", 0),
        ("master_port", -1),
        ("master_port", 65536),
        ("master_port", "29500"),
        ("master_port", True),
        ("dtype", "bfloat16"),
        ("dtype", torch.int64),
        ("device", 1.5),
        ("device", True),
        ("device", "gpu"),
        ("device", "cuda:x"),
        ("device", -1),
    ],
)
def test_a_value_that_cannot_work_is_refused_with_the_name_of_its_argument(
    argument: str, value: Any
) -> None:
    error = refusal(**{argument: value})

    assert f"{argument}={value!r}" in str(error)
    assert isinstance(error, ValueError)
    assert isinstance(error, RuntimeError)


@pytest.mark.parametrize(
    ("argument", "accepted"),
    [
        ("backend", ["auto", "nccl", "gloo"]),
        ("on_failure", ["hold", "resume"]),
        ("load_format", ["auto", "flattened_bucket", "tensors"]),
    ],
)
def test_a_refused_choice_lists_what_is_accepted(argument: str, accepted: list[str]) -> None:
    text = str(refusal(**{argument: "x"}))

    assert all(repr(choice) in text for choice in accepted)


@pytest.mark.parametrize(
    "arguments",
    [
        {"timeout": 1},
        {"timeout": 0.5},
        {"num_gpus": 8},
        {"bucket_bytes": BIG},
        {"master_port": 1},
        {"master_port": 65535},
        {"dtype": torch.bfloat16},
        {"device": "cpu"},
        {"device": torch.device("cpu")},
        {"device": "mps"},
    ],
)
def test_values_at_the_edge_of_what_works_are_taken(arguments: dict[str, Any]) -> None:
    taken = UpdateOptions(**arguments)

    assert {name: getattr(taken, name) for name in arguments} == arguments


def test_the_defaults_are_those_of_the_documentation() -> None:
    defaults = UpdateOptions()

    assert defaults.timeout == 300.0
    assert (defaults.backend, defaults.load_format, defaults.on_failure) == (
        "auto",
        "auto",
        "hold",
    )
    assert defaults.http == HttpOptions(tls_verify=True, use_proxies=False)


def test_nccl_without_cuda_is_refused_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    error = refusal(backend="nccl")

    assert "backend='nccl' needs CUDA" in str(error)
    assert "gloo" in error.remedy


def test_options_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        UpdateOptions().timeout = 1.0  # type: ignore[misc]


# -- pause mode and flush ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argument", "variable", "effective"),
    [
        (None, None, "retract"),
        (None, "", "retract"),
        (None, "  ", "retract"),
        (None, "abort", "abort"),
        (None, " In_Place\n", "in_place"),
        ("abort", "in_place", "abort"),
        ("abort", "nonsense", "abort"),
    ],
)
def test_the_pause_mode_is_the_argument_else_the_variable_else_retract(
    monkeypatch: pytest.MonkeyPatch, argument: Any, variable: str | None, effective: str
) -> None:
    if variable is not None:
        monkeypatch.setenv(options.PAUSE_MODE_VARIABLE, variable)

    assert UpdateOptions(pause_mode=argument).effective_pause_mode() == effective


def test_the_variable_is_read_anew_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    made = UpdateOptions()
    monkeypatch.setenv(options.PAUSE_MODE_VARIABLE, "abort")
    assert made.effective_pause_mode() == "abort"

    monkeypatch.setenv(options.PAUSE_MODE_VARIABLE, "in_place")
    assert made.effective_pause_mode() == "in_place"


@pytest.mark.parametrize("value", ["retarct", "1", "abort,retract", "in-place"])
def test_an_unknown_pause_mode_in_the_variable_is_refused_by_its_name(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv(options.PAUSE_MODE_VARIABLE, value)

    with pytest.raises(ConfigurationError) as caught:
        UpdateOptions().effective_pause_mode()

    for words in (options.PAUSE_MODE_VARIABLE, value, "'abort'", "'retract'", "'in_place'"):
        assert words in str(caught.value)


def test_an_unknown_pause_mode_argument_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="pause_mode='retarct'"):
        UpdateOptions(pause_mode="retarct").effective_pause_mode()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("mode", "variable"),
    [("retract", None), ("in_place", "abort"), (None, None), (None, "in_place")],
)
def test_a_forced_flush_needs_abort_as_the_effective_mode(
    monkeypatch: pytest.MonkeyPatch, mode: Any, variable: str | None
) -> None:
    if variable:
        monkeypatch.setenv(options.PAUSE_MODE_VARIABLE, variable)

    error = refusal(flush_cache_on_update=True, pause_mode=mode)

    assert "pause_mode='abort'" in str(error)
    assert "flush_cache_on_update=None" in error.remedy


@pytest.mark.parametrize(("mode", "variable"), [("abort", "retract"), (None, " ABORT ")])
def test_a_forced_flush_is_taken_under_abort(
    monkeypatch: pytest.MonkeyPatch, mode: Any, variable: str
) -> None:
    monkeypatch.setenv(options.PAUSE_MODE_VARIABLE, variable)

    assert UpdateOptions(flush_cache_on_update=True, pause_mode=mode).flush_wanted() is True


@pytest.mark.parametrize(
    ("argument", "variable", "wanted"),
    [
        (None, None, True),
        (False, None, False),
        (None, "", True),
        (False, " ", False),
        (False, "yes", True),
        (None, "off", False),
    ],
)
def test_whether_a_flush_is_wanted_is_the_variable_else_the_argument_else_yes(
    monkeypatch: pytest.MonkeyPatch, argument: bool | None, variable: str | None, wanted: bool
) -> None:
    if variable is not None:
        monkeypatch.setenv(options.FLUSH_VARIABLE, variable)

    assert UpdateOptions(flush_cache_on_update=argument).flush_wanted() is wanted


# -- environment ---------------------------------------------------------------------------

TRUE, FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
PADDING = st.text(" \t\n", max_size=3)


@given(
    word=st.sampled_from([*TRUE, *FALSE]),
    upper=st.lists(st.booleans(), min_size=5, max_size=5),
    before=PADDING,
    after=PADDING,
)
def test_a_flag_is_read_in_any_case_and_with_any_space_around(
    word: str, upper: list[bool], before: str, after: str
) -> None:
    spelled = "".join(c.upper() if up else c for c, up in zip(word, upper, strict=False))

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLAG", f"{before}{spelled}{after}")
        assert options.read_flag("FLAG") is (word in TRUE)


@given(st.text(st.characters(codec="ascii", exclude_categories=["C"]), max_size=8))
def test_any_other_text_of_a_flag_is_empty_or_refused(text: str) -> None:
    word = text.strip().lower()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLAG", text)
        if word in (*TRUE, *FALSE):
            assert options.read_flag("FLAG") is (word in TRUE)
        elif not word:
            assert options.read_flag("FLAG") is None
        else:
            with pytest.raises(ConfigurationError, match="FLAG="):
                options.read_flag("FLAG")


def test_a_refused_flag_lists_the_accepted_spellings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLAG", "ja")

    with pytest.raises(ConfigurationError) as caught:
        options.read_flag("FLAG")

    assert "accepted: 1, true, yes, on, 0, false, no, off" in str(caught.value)


@pytest.mark.parametrize(
    ("value", "size"), [("", None), ("  ", None), ("1", 1), (" 1048576 ", 1 << 20)]
)
def test_the_bucket_size_of_the_environment_is_a_number_of_bytes(
    monkeypatch: pytest.MonkeyPatch, value: str, size: int | None
) -> None:
    monkeypatch.setenv(options.BUCKET_BYTES_VARIABLE, value)

    assert options.read_bucket_bytes() == size


@pytest.mark.parametrize("value", ["0", "-1", "1.5", "1e6", "1GB", "two", "0x10", "1_000", "²"])
def test_any_other_bucket_size_of_the_environment_is_refused(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv(options.BUCKET_BYTES_VARIABLE, value)

    with pytest.raises(ConfigurationError, match=options.BUCKET_BYTES_VARIABLE):
        options.read_bucket_bytes()


@pytest.mark.parametrize(
    ("argument", "variable", "key"),
    [
        (None, None, None),
        (None, " from-env\n", "from-env"),
        (" given ", "from-env", "given"),
        ("", "from-env", None),
        (None, "", None),
    ],
)
def test_a_key_is_the_argument_else_the_variable_trimmed(
    monkeypatch: pytest.MonkeyPatch, argument: str | None, variable: str | None, key: str | None
) -> None:
    if variable is not None:
        monkeypatch.setenv(options.API_KEY_VARIABLE, variable)

    assert options.read_secret("api_key", argument, options.API_KEY_VARIABLE) == key


@pytest.mark.parametrize("key", ["secret\r\nX-Evil: 1", "sec\0ret", 7, b"secret"])
def test_a_key_that_no_header_can_carry_is_refused_without_showing_it(key: Any) -> None:
    with pytest.raises(ConfigurationError, match="api_key") as caught:
        options.read_secret("api_key", key, options.API_KEY_VARIABLE)

    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("key", ["schlüssel", "key-☃"])
def test_a_key_that_is_not_ascii_is_refused_without_showing_it(key: str) -> None:
    """A header that cannot be encoded would fail inside the HTTP library, after a pause."""
    with pytest.raises(ConfigurationError, match="api_key") as caught:
        options.read_secret("api_key", key, options.API_KEY_VARIABLE)

    assert key not in str(caught.value)


@pytest.mark.parametrize(
    ("keys", "control", "ordinary"),
    [
        ({}, None, None),
        ({"api_key": "a"}, "a", "a"),
        ({"admin_api_key": "b"}, "b", "b"),
        ({"api_key": "a", "admin_api_key": "b"}, "b", "a"),
    ],
)
def test_control_routes_get_the_admin_key_and_others_the_ordinary_one(
    keys: dict[str, str], control: str | None, ordinary: str | None
) -> None:
    http = HttpOptions(**keys)

    assert http.key_for(control=True) == control
    assert http.key_for(control=False) == ordinary


def test_keys_are_never_shown() -> None:
    made = UpdateOptions(http=HttpOptions(api_key="hunter2", admin_api_key="hunter3"))

    assert "hunter" not in repr(made)
    assert "hunter" not in str(made)


# -- URLs ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "parsed"),
    [
        ("http://a:30000", ("http://a:30000",)),
        ("http://a:30000///", ("http://a:30000",)),
        (" https://a/base/ ", ("https://a/base",)),
        ("http://[::1]:30000/", ("http://[::1]:30000",)),
        ("HTTP://a:1", ("HTTP://a:1",)),
        (["http://a:1", "http://b:1/"], ("http://a:1", "http://b:1")),
    ],
)
def test_urls_lose_their_trailing_slashes(given: Any, parsed: tuple[str, ...]) -> None:
    assert parse_server_urls(given) == parsed


@pytest.mark.parametrize(
    "url",
    [
        "",
        "   ",
        "a:30000",
        "127.0.0.1:30000",
        "localhost",
        "/path",
        "http://",
        "http:///path",
        "ftp://a:1",
        "tcp://a:1",
        "http://a:1?x=1",
        "http://a:port",
        "http://a:70000",
        "http://[::1",
        "http://a:1#frag",
        None,
        3,
        b"http://a:1",
    ],
)
def test_what_is_no_url_of_a_server_is_refused_by_its_argument(url: Any) -> None:
    with pytest.raises(ConfigurationError, match="server_url"):
        parse_server_urls([url])


def test_a_url_without_a_scheme_is_refused_with_an_example() -> None:
    with pytest.raises(ConfigurationError, match="scheme") as caught:
        parse_server_urls("127.0.0.1:30000")

    assert "'http://host:30000'" in caught.value.remedy


def test_no_url_at_all_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="server_url is empty"):
        parse_server_urls([])


@pytest.mark.parametrize(
    "urls", [["http://a:1", "http://a:1/"], ["http://b:2", "http://a:1", "http://b:2"]]
)
def test_an_engine_that_is_named_twice_is_refused(urls: list[str]) -> None:
    with pytest.raises(ConfigurationError, match="twice"):
        parse_server_urls(urls)


@pytest.mark.parametrize("given", [None, 7])
def test_something_else_than_text_or_a_sequence_is_refused(given: Any) -> None:
    with pytest.raises(ConfigurationError, match="server_url"):
        parse_server_urls(given)


@pytest.mark.parametrize(
    "url", ["http://user:hunter2@a:1", "user:hunter2@a:1", "http://u:hunter2@a:port"]
)
def test_credentials_in_a_url_are_refused_and_not_shown(url: str) -> None:
    with pytest.raises(ConfigurationError, match="carries credentials") as caught:
        parse_server_urls(url)

    assert "hunter2" not in str(caught.value)
    assert "api_key" in caught.value.remedy


@given(
    scheme=st.sampled_from(["http", "https"]),
    host=st.from_regex(r"[a-z][a-z0-9]{0,8}(\.[a-z][a-z0-9]{0,8})?", fullmatch=True),
    port=st.none() | st.integers(1, 65535),
    slashes=st.integers(0, 3),
)
def test_every_plain_url_is_taken_as_it_is(
    scheme: str, host: str, port: int | None, slashes: int
) -> None:
    url = f"{scheme}://{host}" + (f":{port}" if port else "")

    assert parse_server_urls(url + "/" * slashes) == (url,)


@given(st.text(max_size=30))
def test_any_text_is_parsed_or_refused_by_the_librarys_own_error(text: str) -> None:
    try:
        (url,) = parse_server_urls(text)
    except ConfigurationError:
        return
    assert url.lower().startswith(("http://", "https://"))


# -- devices -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "parsed"),
    [
        (None, None),
        (0, torch.device("cuda", 0)),
        (3, torch.device("cuda", 3)),
        ("cuda", torch.device("cuda", 0)),
        ("cuda:3", torch.device("cuda", 3)),
        (torch.device("cuda:2"), torch.device("cuda", 2)),
        (torch.device("cuda"), torch.device("cuda", 0)),
        ("cpu", torch.device("cpu")),
        ("mps", torch.device("mps")),
    ],
)
def test_a_device_is_an_index_a_text_or_a_torch_device(given: Any, parsed: Any) -> None:
    assert parse_device(given) == parsed


def test_a_cuda_device_is_refused_where_torch_sees_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    with pytest.raises(ConfigurationError, match="device='cuda:1' asks for CUDA") as caught:
        options.check_device_exists(torch.device("cuda", 1))

    assert "device='cpu'" in caught.value.remedy


def test_a_cuda_index_beyond_the_last_is_refused_with_the_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)

    options.check_device_exists(torch.device("cuda", 1))
    with pytest.raises(ConfigurationError, match="sees 2 GPU"):
        options.check_device_exists(torch.device("cuda", 2))


@pytest.mark.parametrize("device", [None, torch.device("cpu"), torch.device("mps")])
def test_other_devices_are_never_looked_up_in_cuda(
    monkeypatch: pytest.MonkeyPatch, device: torch.device | None
) -> None:
    def forbidden() -> bool:
        raise AssertionError("no CUDA call for another device")

    monkeypatch.setattr(torch.cuda, "is_available", forbidden)
    monkeypatch.setattr(torch.cuda, "device_count", forbidden)

    options.check_device_exists(device)


@pytest.mark.parametrize("transport", ["broadcast", "ipc", "disk"])
def test_an_adapter_by_itself_takes_no_way_of_whole_weights(transport):
    with pytest.raises(ConfigurationError, match=f"transport='{transport}' carries whole weights"):
        options.UpdateOptions(lora="adapter", transport=transport)
