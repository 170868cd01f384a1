"""What TorchRL's users may rely on before any server is asked: values, defaults, error texts.

TorchRL's own tests of its SGLang updater describe this behaviour. Where ours differs, the test
says so, and why.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from weight_update import (
    SGLangCollectiveTransport,
    SGLangWeightSyncScheme,
    get_model_metadata,
    get_sglang_model_metadata,
)
from weight_update.options import FLUSH_VARIABLE, PAUSE_MODE_VARIABLE

URL = "http://127.0.0.1:9"  # nobody listens there


def transport(**more: Any) -> SGLangCollectiveTransport:
    return SGLangCollectiveTransport(URL, "127.0.0.1", 29500, 0, 2, **more)


def scheme(**more: Any) -> SGLangWeightSyncScheme:
    return SGLangWeightSyncScheme(URL, **more)


# -- the pause mode: argument, then environment, then retract ------------------------------

MODES = [
    # argument, variable, effective
    (None, None, "retract"),
    (None, "retract", "retract"),
    (None, "in_place", "in_place"),
    (None, "abort", "abort"),
    ("abort", None, "abort"),
    ("abort", "in_place", "abort"),
    ("retract", "abort", "retract"),
    ("in_place", "nonsense", "in_place"),
    (None, "", "retract"),  # ours: an empty variable is an unset one; TorchRL refuses it
    (None, " Abort\n", "abort"),  # ours: trimmed, in any case; TorchRL refuses it
]


@pytest.mark.parametrize(("argument", "variable", "effective"), MODES)
def test_the_pause_mode_is_the_argument_or_else_the_variable_or_else_retract(
    monkeypatch: pytest.MonkeyPatch, argument: Any, variable: str | None, effective: str
) -> None:
    if variable is not None:
        monkeypatch.setenv(PAUSE_MODE_VARIABLE, variable)

    made = scheme(pause_mode=argument).create_transport()

    assert made.pause_mode == effective


def test_the_variable_is_read_when_it_is_needed_and_not_only_at_construction(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = transport()
    seen = []
    for mode in ("abort", "in_place"):
        monkeypatch.setenv(PAUSE_MODE_VARIABLE, mode)
        seen.append(made.pause_mode)

    assert seen == ["abort", "in_place"]


@pytest.mark.parametrize("where", ["argument", "variable"])
def test_an_unknown_pause_mode_is_a_value_error_that_lists_the_known_ones(
    monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Ours: at construction. TorchRL takes the argument as it is, and the server refuses it."""
    if where == "variable":
        monkeypatch.setenv(PAUSE_MODE_VARIABLE, "retarct")

    with pytest.raises(ValueError, match="retarct") as caught:
        scheme(pause_mode="retarct" if where == "argument" else None)

    for mode in ("abort", "retract", "in_place"):
        assert repr(mode) in str(caught.value)


# -- the flush that is asked for with a mode that cannot have it ---------------------------

REFUSED = [
    # argument, variable of the mode
    ("retract", None),
    ("in_place", None),
    ("in_place", "abort"),
    (None, None),
    (None, "retract"),
    (None, "in_place"),
]
ACCEPTED = [("abort", None), ("abort", "retract"), (None, "abort")]
MAKERS = pytest.mark.parametrize("make", [scheme, transport], ids=["scheme", "transport"])


@MAKERS
@pytest.mark.parametrize(("argument", "variable"), REFUSED)
def test_a_flush_needs_the_mode_abort(
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[..., Any],
    argument: Any,
    variable: str | None,
) -> None:
    """Ours: the scheme looks at the effective mode too, and not at its argument alone."""
    if variable is not None:
        monkeypatch.setenv(PAUSE_MODE_VARIABLE, variable)

    with pytest.raises(ValueError, match="pause_mode='abort'"):
        make(flush_cache_on_update=True, pause_mode=argument)


@MAKERS
@pytest.mark.parametrize(("argument", "variable"), ACCEPTED)
def test_a_flush_goes_with_the_mode_abort(
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[..., Any],
    argument: Any,
    variable: str | None,
) -> None:
    if variable is not None:
        monkeypatch.setenv(PAUSE_MODE_VARIABLE, variable)

    assert make(flush_cache_on_update=True, pause_mode=argument).flush_cache_on_update is True


@MAKERS
@pytest.mark.parametrize("mode", [None, "retract", "in_place", "abort"])
@pytest.mark.parametrize("flush", [None, False])
def test_a_flush_that_is_not_forced_goes_with_every_mode(
    make: Callable[..., Any], flush: bool | None, mode: Any
) -> None:
    assert make(flush_cache_on_update=flush, pause_mode=mode).flush_cache_on_update is flush


@pytest.mark.parametrize("value", ["1", "true", "YES", "On"])
def test_a_variable_that_forces_the_flush_is_no_error_in_any_mode(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    """It is set for a whole job: where the mode cannot have it there is a warning, no error."""
    monkeypatch.setenv(FLUSH_VARIABLE, value)

    assert scheme(pause_mode="in_place").options.flush_wanted() is True


def test_a_flush_variable_that_nobody_can_read_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ours: to TorchRL whatever is not yes means no, a typo too."""
    monkeypatch.setenv(FLUSH_VARIABLE, "ture")

    with pytest.raises(ValueError, match="ture"):
        scheme()


# -- what is made of what ------------------------------------------------------------------


def test_a_port_and_an_address_that_nobody_gave_are_chosen_when_they_are_bound() -> None:
    """Ours: TorchRL picks a free port at construction, which another process may take."""
    made = scheme(num_gpus=1)

    assert (made.master_address, made.master_port) == (None, None)


def test_the_number_of_gpus_that_nobody_gave_is_asked_of_the_servers() -> None:
    """Ours: TorchRL takes 1, and a server with two waits for ever."""
    assert scheme().num_gpus is None


@pytest.mark.parametrize("device", [0, 1, "cuda:1", torch.device("cuda:2"), None])
def test_a_transport_is_made_where_no_gpu_is(device: Any) -> None:
    """As the driver of a Ray job does; a bare index follows to whoever has the GPU."""
    assert transport(device=device).check_connection() is False


def test_what_a_scheme_makes_has_its_settings_whatever_else_is_passed() -> None:
    made = scheme(num_gpus=3, pause_mode="abort", flush_cache_on_update=True).create_transport(
        anything=1
    )

    assert (made.server_url, made.rank, made.world_size) == (URL, 0, 4)
    assert (made.pause_mode, made.flush_cache_on_update) == ("abort", True)


def test_receivers_are_the_servers_which_the_log_says(caplog: pytest.LogCaptureFixture) -> None:
    from torchrl import logger

    logger.addHandler(caplog.handler)
    level = logger.level
    logger.setLevel(logging.INFO)
    try:
        assert scheme().create_receiver(1, two=2) is None
    finally:
        logger.setLevel(level)
        logger.removeHandler(caplog.handler)
    assert "receiver" in caplog.text


# -- metadata ------------------------------------------------------------------------------


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 2, dtype=torch.float16)
        self.norm = nn.BatchNorm1d(2)
        self.head = nn.Linear(2, 4, bias=False, dtype=torch.bfloat16)


def test_metadata_is_name_to_dtype_and_shape_in_the_order_of_the_state_dict() -> None:
    model = Model()

    found = get_model_metadata(model)

    assert list(found) == list(model.state_dict())
    assert found["head.weight"] == (torch.bfloat16, torch.Size([4, 2]))
    assert found["embed.weight"] == (torch.float16, torch.Size([4, 2]))


def test_both_names_of_the_metadata_are_one_function() -> None:
    assert get_sglang_model_metadata is get_model_metadata


# -- the texts that users match on ---------------------------------------------------------


def dead_model(sender: Any) -> None:
    model = nn.Linear(1, 1)
    sender.register_model(model)
    del model
    gc.collect()
    sender.update_weights()


MODEL = nn.Linear(1, 1)
META = get_model_metadata(MODEL)
TEXTS: dict[str, Callable[[], object]] = {
    "Only rank 0": lambda: SGLangCollectiveTransport(
        URL, "127.0.0.1", 29500, 1, 2
    ).init_all_workers_group(META),
    "only from rank 0": lambda: SGLangCollectiveTransport(
        URL, "127.0.0.1", 29500, 1, 2
    ).send_weights("model", MODEL.state_dict()),
    "Communication group not initialized": lambda: transport().send_weights(
        "model", MODEL.state_dict()
    ),
    "No model registered": lambda: scheme().create_sender().update_weights(),
    "Model reference is no longer valid": lambda: dead_model(scheme().create_sender()),
}


@pytest.mark.parametrize(("text", "call"), TEXTS.items(), ids=TEXTS)
def test_a_mistake_is_a_runtime_error_with_torchrls_words(
    text: str, call: Callable[[], object]
) -> None:
    with pytest.raises(RuntimeError, match=text):
        call()


def test_an_update_without_a_group_makes_one() -> None:
    """Ours: TorchRL raises "Transport not initialized"; here nobody answers, which is said."""
    sender = scheme(timeout=5.0).create_sender()
    sender.register_model(MODEL)

    with pytest.raises(ConnectionError, match=URL):
        sender.update_weights()


def test_a_flush_of_a_server_that_does_not_answer_is_false() -> None:
    assert scheme(timeout=5.0).create_sender().flush_cache() is False


def test_a_sender_and_a_transport_that_never_connected_are_shut_down_twice() -> None:
    for made in (scheme().create_sender(), transport()):
        made.shutdown()
        made.shutdown()
