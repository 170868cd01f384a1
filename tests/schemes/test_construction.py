"""Schemes, senders and transports as TorchRL's users build them; no engine is needed here.

Pins: arguments checked late or never, keys in logs and pickles (C51), live handles inside
pickles (C78), stale model references (C54), and double-counted collectors (C07).
"""

from __future__ import annotations

import copy
import gc
import inspect
import os
import pickle
import socket
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from tests.integration import kit
from weight_update import (
    SGLangCollectiveTransport,
    SGLangWeightSender,
    SGLangWeightSyncScheme,
    get_model_metadata,
)
from weight_update.errors import (
    ConfigurationError,
    EngineUnreachable,
    WeightMismatchError,
    WeightUpdateError,
)
from weight_update.options import (
    API_KEY_VARIABLE,
    BUCKET_BYTES_VARIABLE,
    FLUSH_VARIABLE,
    MASTER_ADDRESS_VARIABLE,
    PAUSE_MODE_VARIABLE,
)

# Nobody listens on this port, and nobody else can take it meanwhile.
HELD = socket.socket()
HELD.bind(("127.0.0.1", 0))
URL = f"http://127.0.0.1:{HELD.getsockname()[1]}"


def scheme(**more: Any) -> SGLangWeightSyncScheme:
    return SGLangWeightSyncScheme(URL, **more)


def positional(function: Any) -> list[str]:
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD,)
    return [p.name for p in inspect.signature(function).parameters.values() if p.kind in kinds]


# -- signatures ----------------------------------------------------------------------------


def test_the_positional_arguments_of_the_scheme_are_torchrls() -> None:
    assert positional(SGLangWeightSyncScheme) == [
        "server_url",
        "master_address",
        "master_port",
        "num_gpus",
        "strategy",
        "device",
        "flush_cache_on_update",
        "pause_mode",
    ]


def test_the_positional_arguments_of_the_transport_are_torchrls() -> None:
    assert positional(SGLangCollectiveTransport) == [
        "server_url",
        "master_address",
        "master_port",
        "rank",
        "world_size",
        "device",
        "timeout",
        "flush_cache_on_update",
        "pause_mode",
    ]


def test_all_positional_arguments_of_the_scheme_land_where_torchrl_puts_them() -> None:
    made = SGLangWeightSyncScheme(URL, "127.0.0.1", 29500, 4, "state_dict", "cpu", True, "abort")

    assert made.server_url == URL
    assert made.master_address == "127.0.0.1"
    assert made.master_port == 29500
    assert made.num_gpus == 4
    assert made.strategy_name == made.strategy_str == "state_dict"
    assert made.device == "cpu"
    assert made.flush_cache_on_update is True
    assert made.pause_mode == "abort"


def test_all_positional_arguments_of_the_transport_land_where_torchrl_puts_them() -> None:
    made = SGLangCollectiveTransport(
        URL + "/", "127.0.0.1", 29500, 0, 3, "cpu", 12.5, True, "abort"
    )

    assert made.server_url == URL
    assert (made.master_address, made.master_port) == ("127.0.0.1", 29500)
    assert (made.rank, made.world_size) == (0, 3)
    assert made.device == torch.device("cpu")
    assert made.timeout == 12.5
    assert made.flush_cache_on_update is True
    assert made.pause_mode == "abort"


def test_a_scheme_with_a_url_alone_has_torchrls_defaults() -> None:
    made = SGLangWeightSyncScheme(URL + "//")

    assert made.server_url == URL
    assert made.strategy_name == "tensordict"
    assert made.flush_cache_on_update is None
    assert made.pause_mode is None
    assert made.timeout == 300.0


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("server_url", URL),
        ("master_address", "127.0.0.1"),
        ("master_port", 29500),
        ("num_gpus", 2),
        ("device", "cpu"),
        ("flush_cache_on_update", False),
        ("pause_mode", "in_place"),
        ("backend", "gloo"),
        ("bucket_bytes", 1024),
        ("load_format", "tensors"),
        ("dtype", torch.bfloat16),
        ("timeout", 5.0),
        ("tls_verify", False),
        ("ca_file", __file__),
        ("use_proxies", True),
        ("on_failure", "resume"),
    ],
)
def test_every_argument_of_a_scheme_is_kept(argument: str, value: Any) -> None:
    made = SGLangWeightSyncScheme(**({"server_url": URL} | {argument: value}))

    for holder in (made, made.options, made.options.http):
        if hasattr(holder, argument):
            assert getattr(holder, argument) == value
            return
    pytest.fail(f"{argument} is kept nowhere")


@pytest.mark.parametrize(
    ("given", "index"),
    [(None, 0), (0, 0), (3, 3), ("cuda:3", 3), ("cuda", 0), (torch.device("cuda:2"), 2)],
)
def test_the_device_of_a_transport_is_a_cuda_index(given: Any, index: int) -> None:
    assert SGLangCollectiveTransport(URL, None, None, 0, 2, given).device == index


def test_the_cpu_is_never_taken_for_a_gpu() -> None:
    made = SGLangCollectiveTransport(URL, None, None, 0, 2, device="cpu")

    assert made.device == torch.device("cpu")


def test_the_world_is_one_more_than_the_gpus_of_the_servers() -> None:
    assert scheme(num_gpus=3).world_size == 4
    assert scheme(num_gpus=3).create_transport().world_size == 4


def test_a_world_that_only_the_servers_know_is_not_guessed() -> None:
    assert scheme().create_transport().world_size is None
    with pytest.raises(ConfigurationError, match="num_gpus is None"):
        _ = scheme().world_size


def test_several_servers_are_updated_by_one_scheme() -> None:
    made = SGLangWeightSyncScheme(["http://a:1/", "http://b:1"])

    assert made.server_url == ["http://a:1", "http://b:1"]
    assert list(made.create_sender().engines) == ["http://a:1", "http://b:1"]


def test_construction_talks_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("nothing is sent before it is asked for")

    monkeypatch.setattr(socket.socket, "connect", forbidden)
    monkeypatch.setattr(socket.socket, "bind", forbidden)

    sender = scheme(num_gpus=1).create_sender()
    sender.register_model(nn.Linear(1, 1))

    assert sender.version == 0


# -- bad arguments -------------------------------------------------------------------------

BAD = [
    {"strategy": "tensors"},
    {"strategy": None},
    {"backend": "mpi"},
    {"pause_mode": "retarct"},
    {"load_format": "zip"},
    {"on_failure": "retry"},
    {"num_gpus": 0},
    {"num_gpus": -1},
    {"bucket_bytes": 0},
    {"bucket_bytes": -5},
    {"timeout": 0},
    {"timeout": -1},
    {"master_port": 70000},
    {"master_address": "0.0.0.0"},
    {"master_address": "no-such-host.invalid"},
    {"dtype": torch.int32},
    {"device": "gpu"},
]


@pytest.mark.parametrize("bad", BAD, ids=str)
def test_a_bad_argument_is_refused_at_construction_by_name(bad: dict[str, Any]) -> None:
    ((argument, value),) = bad.items()

    with pytest.raises(ConfigurationError) as caught:
        scheme(**bad)

    assert isinstance(caught.value, ValueError)
    assert f"{argument}={value!r}" in str(caught.value)


@pytest.mark.parametrize(
    "url", ["a:30000", "", "ftp://a", "http://", [], ["http://a", "http://a/"]]
)
@pytest.mark.parametrize("kind", [SGLangWeightSyncScheme, SGLangCollectiveTransport])
def test_a_bad_url_is_refused_at_construction(kind: type, url: Any) -> None:
    with pytest.raises(ConfigurationError, match="server_url"):
        kind(url)


@pytest.mark.parametrize("world_size", [0, 1, -2, 2.0, True, "2"])
def test_a_world_without_a_server_is_refused(world_size: Any) -> None:
    with pytest.raises(ConfigurationError, match="world_size="):
        SGLangCollectiveTransport(URL, None, None, 0, world_size)


@pytest.mark.parametrize("device", ["cuda", "cuda:1", torch.device("cuda")])
def test_cuda_is_refused_where_there_is_none(monkeypatch: pytest.MonkeyPatch, device: Any) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    with pytest.raises(ConfigurationError, match="sees no GPU") as caught:
        scheme(device=device)

    assert "device='cpu'" in caught.value.remedy


@pytest.mark.parametrize(
    ("arguments", "variable"),
    [
        ({"pause_mode": "retract"}, None),
        ({}, None),
        ({}, "in_place"),
        ({"pause_mode": "in_place"}, "abort"),
    ],
)
@pytest.mark.parametrize("kind", [SGLangWeightSyncScheme, SGLangCollectiveTransport])
def test_a_forced_flush_without_abort_is_refused_as_torchrl_refuses_it(
    monkeypatch: pytest.MonkeyPatch, kind: type, arguments: dict[str, Any], variable: str | None
) -> None:
    if variable:
        monkeypatch.setenv(PAUSE_MODE_VARIABLE, variable)

    with pytest.raises(ValueError, match="pause_mode='abort'"):
        kind(URL, flush_cache_on_update=True, **arguments)


# -- environment ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        (PAUSE_MODE_VARIABLE, "retarct"),
        (FLUSH_VARIABLE, "maybe"),
        (BUCKET_BYTES_VARIABLE, "1GB"),
        (MASTER_ADDRESS_VARIABLE, "0.0.0.0"),
    ],
)
def test_a_variable_that_cannot_be_read_is_refused_at_construction(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)

    with pytest.raises(ConfigurationError) as caught:
        scheme()

    assert f"{variable}={value!r}" in str(caught.value)


def test_variables_are_trimmed_and_read_in_any_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PAUSE_MODE_VARIABLE, " ABORT ")
    monkeypatch.setenv(FLUSH_VARIABLE, " Off\n")
    monkeypatch.setenv(BUCKET_BYTES_VARIABLE, " 4096 ")
    monkeypatch.setenv(MASTER_ADDRESS_VARIABLE, " 127.0.0.1 ")

    made = scheme()

    assert made.create_transport().pause_mode == "abort"
    assert made.options.flush_wanted() is False
    assert made.options.bucket_bytes == 4096
    assert made.master_address == "127.0.0.1"


def test_arguments_win_over_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PAUSE_MODE_VARIABLE, "abort")
    monkeypatch.setenv(BUCKET_BYTES_VARIABLE, "4096")
    monkeypatch.setenv(MASTER_ADDRESS_VARIABLE, "127.0.0.2")
    monkeypatch.setenv(API_KEY_VARIABLE, "from-env")

    made = scheme(pause_mode="in_place", bucket_bytes=1, master_address="127.0.0.1", api_key="k")

    assert made.create_transport().pause_mode == "in_place"
    assert (made.options.bucket_bytes, made.master_address) == (1, "127.0.0.1")
    assert made.options.http.api_key == "k"


def test_nothing_is_written_to_the_environment() -> None:
    before = dict(os.environ)
    sender = scheme(device="cpu", num_gpus=1, timeout=1.0).create_sender()

    with pytest.raises(WeightUpdateError):
        sender.update_weights({"w": torch.ones(1)})

    assert dict(os.environ) == before


# -- secrets (C51) -------------------------------------------------------------------------


def secretive() -> SGLangWeightSyncScheme:
    return scheme(api_key="hunter2", admin_api_key="hunter3")


@pytest.mark.parametrize(
    "made",
    [
        secretive,
        lambda: secretive().options,
        lambda: secretive().create_sender(),
        lambda: secretive().create_transport(),
    ],
    ids=["scheme", "options", "sender", "transport"],
)
@pytest.mark.parametrize("show", [repr, str, "{}".format])
def test_keys_are_never_shown(made: Any, show: Any) -> None:
    assert "hunter" not in show(made())


def test_keys_are_in_no_error_of_an_update() -> None:
    sender = secretive().create_sender()

    with pytest.raises(EngineUnreachable) as caught:
        sender.update_weights({"w": torch.ones(1)})

    assert "hunter" not in str(caught.value)
    assert b"hunter" not in pickle.dumps(caught.value)


# -- pickle and copy (C78) -----------------------------------------------------------------

REBUILD = pytest.mark.parametrize(
    "rebuild", [lambda x: pickle.loads(pickle.dumps(x)), copy.deepcopy], ids=["pickle", "deepcopy"]
)


def configured() -> SGLangWeightSyncScheme:
    return SGLangWeightSyncScheme(
        ["http://a:1", "http://b:1"],
        "127.0.0.1",
        29500,
        2,
        "state_dict",
        "cpu",
        pause_mode="abort",
        dtype=torch.bfloat16,
        api_key="k",
        bucket_bytes=99,
    )


@REBUILD
def test_a_scheme_crosses_processes_as_its_configuration(rebuild: Any) -> None:
    made = configured()

    twin = rebuild(made)

    assert twin.options == made.options
    assert twin.server_url == made.server_url
    assert twin.strategy_name == twin.strategy_str == "state_dict"
    assert twin.world_size == 3


@REBUILD
def test_a_transport_crosses_processes_as_its_configuration(rebuild: Any) -> None:
    made = configured().create_transport()

    twin = rebuild(made)

    assert twin.server_url == made.server_url
    assert (twin.rank, twin.world_size, twin.pause_mode) == (0, 3, "abort")
    assert (twin.master_address, twin.master_port) == ("127.0.0.1", 29500)
    assert not twin.check_connection()


@REBUILD
def test_a_sender_crosses_processes_without_model_collectors_or_connection(rebuild: Any) -> None:
    model = nn.Linear(1, 1)
    sender = configured().create_sender()
    sender.register_model(model)
    sender.register_collector(kit.Collector())
    assert sender.engines

    twin = rebuild(sender)

    assert list(twin.engines) == list(sender.engines)
    assert twin.version == 0
    with pytest.raises(WeightUpdateError, match="No model registered"):
        twin.update_weights()


# -- life ----------------------------------------------------------------------------------


def test_everything_can_be_shut_down_twice() -> None:
    made = scheme(timeout=1.0)
    sender, transport = made.create_sender(), made.create_transport()
    assert sender.engines

    for item in (sender, transport, made):
        item.shutdown()
        item.shutdown()


def test_a_sender_as_a_context_is_shut_down_at_its_end() -> None:
    with scheme().create_sender() as sender:
        sender.register_model(nn.Linear(1, 1))

    with pytest.raises(WeightUpdateError, match="No model registered"):
        sender.update_weights()


def test_an_error_inside_the_context_comes_through() -> None:
    with pytest.raises(KeyError), scheme().create_sender():
        raise KeyError("mine")


def test_the_parts_of_a_scheme_are_of_the_classes_that_torchrl_names() -> None:
    made = scheme()

    assert isinstance(made.create_sender(), SGLangWeightSender)
    assert isinstance(made.create_transport(anything=1), SGLangCollectiveTransport)
    assert made.create_transport().rank == 0
    assert made.create_receiver(1, two=2) is None


def test_no_warning_is_given_by_ordinary_use() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with scheme(num_gpus=1).create_sender() as sender:
            sender.register_model(nn.Linear(1, 1))


# -- models and collectors -----------------------------------------------------------------


def test_a_model_is_held_weakly() -> None:
    model = nn.Linear(1, 1)
    sender = scheme().create_sender()

    sender.register_model(model)

    assert sender._model_ref() is model
    del model
    gc.collect()
    with pytest.raises(WeightUpdateError, match="Model reference is no longer valid") as caught:
        sender.update_weights()
    assert "register it again" in caught.value.remedy


def test_an_update_without_a_model_says_how_to_give_one() -> None:
    with pytest.raises(RuntimeError, match="No model registered") as caught:
        scheme().create_sender().update_weights()

    assert "register_model()" in caught.value.remedy


@pytest.mark.parametrize("model", [None, 3, {"w": torch.ones(1)}, nn.Linear])
def test_what_is_no_model_is_not_registered(model: Any) -> None:
    with pytest.raises(ConfigurationError, match="torch module"):
        scheme().create_sender().register_model(model)


@pytest.mark.parametrize("source", [nn.ReLU(), {}])
def test_a_source_without_weights_is_refused_before_any_engine_is_asked(source: Any) -> None:
    with pytest.raises(ConfigurationError, match="no weights to send") as caught:
        scheme().create_sender().update_weights(source)

    assert not isinstance(caught.value, EngineUnreachable)


def test_a_model_on_the_meta_device_is_refused_before_any_engine_is_asked() -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 2)

    with pytest.raises(ConfigurationError, match="meta device"):
        scheme().create_sender().update_weights(model)


def test_a_collector_that_is_registered_twice_counts_once() -> None:
    sender, collector = scheme().create_sender(), kit.Collector()
    sender.register_collector(collector)
    sender.register_collector(collector)

    sender._counters.count(1)

    assert collector.version == 1


def test_equal_collectors_are_still_two() -> None:
    class Equal(kit.Collector):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = None

    sender, collectors = scheme().create_sender(), [Equal(), Equal()]
    for collector in collectors:
        sender.register_collector(collector)

    sender._counters.count(1)

    assert [collector.version for collector in collectors] == [1, 1]


def test_a_collector_that_fails_to_count_does_not_stop_the_next_and_is_told() -> None:
    class Broken:
        def increment_version(self) -> None:
            raise OSError("disk full")

    sender, good = scheme().create_sender(), kit.Collector()
    sender.register_collector(Broken())
    sender.register_collector(good)

    (warning,) = sender._counters.count(4)

    assert good.version == 1
    for words in ("Broken", "version 4", "OSError", "disk full"):
        assert words in warning


@pytest.mark.parametrize("collector", [None, object(), type("C", (), {"increment_version": 3})()])
def test_what_cannot_count_is_no_collector(collector: Any) -> None:
    with pytest.raises(ConfigurationError, match="increment_version"):
        scheme().create_sender().register_collector(collector)


# -- the transport's own rules -------------------------------------------------------------


def test_only_rank_zero_makes_the_group_and_sends() -> None:
    made = SGLangCollectiveTransport(URL, None, None, 1, 2)

    with pytest.raises(RuntimeError, match="Only rank 0"):
        made.init_all_workers_group({})
    with pytest.raises(RuntimeError, match=r"only.*from rank 0"):
        made.send_weights("policy", {"w": torch.ones(1)})


def test_sending_without_a_group_is_refused_before_any_cuda_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = SGLangCollectiveTransport(URL, None, None, 0, 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: pytest.fail("a CUDA call"))

    with pytest.raises(RuntimeError, match="Communication group not initialized"):
        made.send_weights("policy", {"w": torch.ones(1)})


def test_sending_without_metadata_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    made = SGLangCollectiveTransport(URL, None, None, 0, 2)
    monkeypatch.setattr(SGLangCollectiveTransport, "check_connection", lambda self: True)

    with pytest.raises(RuntimeError, match="Model metadata not set"):
        made.send_weights("policy", {"w": torch.ones(1)})


@pytest.mark.parametrize(
    "weights",
    [
        {},
        {"other": torch.ones(1)},
        {"weight": torch.ones(2, 2)},
        {"weight": torch.ones(1, 1).half()},
    ],
    ids=["empty", "missing", "shape", "dtype"],
)
def test_weights_that_differ_from_the_metadata_are_refused_before_any_engine_is_asked(
    monkeypatch: pytest.MonkeyPatch, weights: dict[str, torch.Tensor]
) -> None:
    made = SGLangCollectiveTransport(URL, None, None, 0, 2)
    made._metadata = get_model_metadata(nn.Linear(1, 1, bias=False))
    monkeypatch.setattr(SGLangCollectiveTransport, "check_connection", lambda self: True)

    with pytest.raises(ValueError, match=r"weight") as caught:
        made.send_weights("policy", weights)

    assert isinstance(caught.value, (WeightMismatchError, ConfigurationError))


def test_an_engine_that_is_not_there_is_named_and_nothing_counts() -> None:
    sender, collector = scheme(device="cpu").create_sender(), kit.Collector()
    sender.register_collector(collector)

    with pytest.raises(EngineUnreachable) as caught:
        sender.update_weights({"w": torch.ones(1)})

    assert caught.value.engine == URL
    assert list(caught.value.report.engines) == [URL]
    assert (sender.version, collector.version) == (0, 0)


def test_a_flush_of_an_engine_that_is_not_there_is_false_and_the_log_says_why(caplog: Any) -> None:
    with caplog.at_level("WARNING", logger="weight_update"):
        assert scheme(timeout=2.0).create_sender().flush_cache() is False

    assert URL in caplog.text


def test_a_receiver_is_the_servers_business() -> None:
    made = SGLangCollectiveTransport(URL, None, None, 0, 2)

    assert made.receive_weights(timeout=1, weights=None, model=None, strategy=None) is None
    assert (
        made.setup_connection_and_weights_on_receiver(
            worker_idx=0, weights=None, model=None, strategy=None
        )
        is None
    )
