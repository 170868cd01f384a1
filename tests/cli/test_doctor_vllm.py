"""What doctor makes of vLLM servers: a table of situations, no server needed."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from weight_update.cli.doctor_checks import diagnose, misfits
from weight_update.cli.doctor_facts import AddressFacts, Facts, ModelFacts
from weight_update.engines.probing import ServerFacts
from weight_update.engines.vllm.capabilities import PROBED_ROUTES
from weight_update.engines.vllm.client import PAUSE_ROUTE
from weight_update.weights.specs import TensorSpec

from .findings import found

URL = "http://10.0.0.5:8000"
ROUTES = dict.fromkeys((PAUSE_ROUTE, *PROBED_ROUTES), True)
EXTENSION = "weight_update.vllm_worker.WorkerExtension"
INFO = {
    "version": "0.32.0",
    "ranks": 1,
    "tp_size": 1,
    "pp_size": 1,
    "dp_size": 1,
    "dtype": "float32",
    "device": "cpu",
    "backend": "weight_update_gloo",
    "extension": EXTENSION,
    "lora": False,
}
MODEL = {"weight_version": "3", "model_path": "/models/m"}
HEALTHY = ServerFacts(
    URL, service="vllm", why="it says so", info=INFO, model=MODEL, routes=ROUTES, ready=True
)
NEAR = AddressFacts("10.0.0.9", servers={URL: "10.0.0.5"})


def server(*, way: dict[str, Any] | None = None, **changes: Any) -> Facts:
    """Facts of one server that differs from a healthy one."""
    info = {**INFO, **changes.pop("info", {})}
    routes = {**ROUTES, **changes.pop("routes", {})}
    return Facts((replace(HEALTHY, info=info, routes=routes, **changes),), NEAR, **(way or {}))


def test_a_healthy_server_is_described_in_the_form_of_all_servers() -> None:
    diagnosis = diagnose(Facts((HEALTHY,), NEAR))
    assert diagnosis.ok
    (described,) = diagnosis.servers
    (gone,) = diagnose(Facts((ServerFacts(URL, unreachable="refused"),), NEAR)).servers
    assert list(described) == list(gone)
    expected = {"service": "vllm", "release": "0.32.0", "ranks": 1, "version": "3"}
    assert {name: described[name] for name in expected} == expected


NCCL = {"backend": "nccl"}
PROBLEMS = [
    ("development mode off", server(routes={PAUSE_ROUTE: False}), "VLLM_SERVER_DEV_MODE=1"),
    (
        "an old release",
        server(info={"version": "0.20.2"}, routes={"/start_weight_update": False}),
        r"0\.20\.2 opens and closes no updates.*0\.23",
    ),
    (
        "an old release with its development mode off",
        server(info={"version": "0.13.0"}, routes=dict.fromkeys(ROUTES, False)),
        r"0\.13\.0 opens and closes no updates",
    ),
    (
        "no weight transfer",
        server(info={"backend": ""}),
        "without weight transfer.*--weight-transfer-config.*weight_update_gloo.*--worker-extension",
    ),
    (
        "a backend for GPUs, and weights that leave from the CPU",
        server(info=NCCL | {"device": "cuda"}),
        "sends by gloo.*'nccl'.*--device cuda",
    ),
    (
        "a backend for a CPU, and weights that leave from a GPU",
        server(way={"backend": "nccl"}),
        "sends by nccl.*weight_update_gloo.*--device cpu",
    ),
    (
        "NCCL on a server without a GPU",
        server(info=NCCL, way={"backend": "nccl"}),
        "on a CPU.*needs GPUs.*weight_update_gloo",
    ),
    (
        "no extension where workers open memory",
        server(info={"extension": ""}, way={"transport": "ipc"}),
        "cannot open memory.*--worker-extension-cls.*PYTHONPATH",
    ),
    (
        "replicas where workers open memory",
        server(info={"dp_size": 2}, way={"transport": "ipc"}),
        "2 data-parallel replicas.*--transport broadcast",
    ),
    (
        "adapters on an old release",
        server(info={"version": "0.27.1", "lora": True}),
        r"0\.27\.1 with --enable-lora.*serve without it, or with vLLM 0\.32\.0",
    ),
    ("quantised weights", server(info={"quantization": "fp8"}), "fp8.*unquantised"),
    ("a dead engine", server(dead=True), "engine is gone.*restart"),
    ("busy workers", server(busy=True), "do not answer.*another update.*restart"),
    ("a gateway that forbids", server(control_key="forbidden"), "control routes forbid"),
]


@pytest.mark.parametrize(("facts", "said"), [p[1:] for p in PROBLEMS], ids=[p[0] for p in PROBLEMS])
def test_a_problem_is_named_with_its_remedy(facts: Facts, said: str) -> None:
    assert not diagnose(facts).ok
    assert re.search(f"problem: .*{said}", found(facts)), found(facts)


WARNINGS = [
    ("a pause", server(ready=False, info={"asleep": True, "never_sleeps": True}), "it is paused"),
    (
        "a pause or sleep",
        server(ready=False, info={"asleep": True}),
        r"sleeps, or is only paused.*wake it up first.*/wake_up",
    ),
    ("replicas", server(info={"dp_size": 2}), "2 data-parallel replicas.*not tried"),
    ("stages", server(info={"pp_size": 2}), "2 pipeline stages.*not tried"),
    ("no labels", server(routes={"/update_weight_version": False}), "no version label"),
    ("a key of /v1", server(ordinary_key="missing"), "/v1 routes.*needs none of them"),
]


@pytest.mark.parametrize(("facts", "said"), [w[1:] for w in WARNINGS], ids=[w[0] for w in WARNINGS])
def test_what_an_update_survives_is_only_warned_of(facts: Facts, said: str) -> None:
    assert diagnose(facts).ok
    assert re.search(f"warning: .*{said}", found(facts)), found(facts)


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        (server(info={"backend": None}), "which weight transfer it was started with"),
        (server(info={"extension": None}, way={"transport": "ipc"}), "can open memory"),
        (server(info={"extension": "mine.Own"}, way={"transport": "ipc"}), "mine.Own"),
        (server(ready=None), "whether it is paused"),
    ],
)
def test_what_is_not_said_is_called_unknown(facts: Facts, said: str) -> None:
    assert diagnose(facts).ok
    assert re.search(f"unknown: .*{re.escape(said)}", found(facts)), found(facts)


# -- a checkpoint -----------------------------------------------------------------------------

SPECS = {n: TensorSpec(n, torch.float32, (4,)) for n in ("a.weight", "b.weight")}


def compared(names: set[str] | None, **info: Any) -> str:
    facts = server(info=info, names=None if names is None else frozenset(names))
    facts = replace(facts, model=ModelFacts("/ckpt", SPECS))
    return found(facts)


def test_names_are_those_of_the_folder_that_it_loaded() -> None:
    assert "problem" not in compared({"a.weight", "b.weight"})
    assert "1 weight(s) of the checkpoint are not the server's" in compared({"a.weight"})
    text = compared({"a.weight", "b.weight", "c.weight"})
    assert "1 weight(s) of the server are not in the checkpoint" in text


def test_a_folder_that_is_not_here_leaves_the_names_unknown() -> None:
    assert "unknown: which weights it has" in compared(None)


def test_a_server_that_has_other_weights_is_a_misfit() -> None:
    facts = replace(server(names=frozenset({"c.weight"})), model=ModelFacts("/ckpt", SPECS))
    assert [finding.level for finding in misfits(facts)] == ["problem", "problem"]
