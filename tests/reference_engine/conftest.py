"""Two tiny models, and a trainer that knows nothing of the library's transports."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from transformers import LlamaForCausalLM

from tests.integration.kit import PROMPT, greedy, llama, qwen2, running, wait_for
from weight_update.reference_engine import ReferenceEngine

_numbers = count()


@dataclass(frozen=True)
class Reply:
    """Status and body of an HTTP answer."""

    status: int
    text: str
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def json(self) -> Any:
        return json.loads(self.text)

    @property
    def message(self) -> str:
        return str(self.json["message"])


def http_call(
    engine: ReferenceEngine,
    method: str,
    path: str,
    body: Any = None,
    *,
    key: str | None = None,
    timeout: float = 20.0,
) -> Reply:
    """Make one call and return whatever came back."""
    host, port = engine.url.removeprefix("http://").rsplit(":", 1)
    connection = http.client.HTTPConnection(host, int(port), timeout=timeout)
    headers = {"Content-Type": "application/json"}
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    try:
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        response = connection.getresponse()
        return Reply(response.status, response.read().decode(), dict(response.getheaders()))
    finally:
        connection.close()


def post(engine: ReferenceEngine, path: str, **body: Any) -> Reply:
    """POST ``body`` as JSON."""
    return http_call(engine, "POST", path, body)


def get(engine: ReferenceEngine, path: str) -> Reply:
    """GET ``path``."""
    return http_call(engine, "GET", path)


class Trainer:
    """Rank 0 of a gloo group with one engine."""

    def __init__(self, engine: ReferenceEngine) -> None:
        self.engine = engine
        self.name = f"group-{next(_numbers)}"
        store = dist.TCPStore(
            "127.0.0.1", 0, 2, True, timedelta(seconds=30), wait_for_workers=False
        )
        with background() as start:
            reply = start(
                post,
                engine,
                "/init_weights_update_group",
                master_address="127.0.0.1",
                master_port=store.port,
                rank_offset=1,
                world_size=2,
                group_name=self.name,
                backend="gloo",
            )
            self.group, _ = c10d._new_process_group_helper(
                2,
                0,
                [],
                c10d.Backend("gloo"),
                c10d.PrefixStore(self.name, store),
                group_name=self.name,
                backend_options=None,
                timeout=timedelta(seconds=30),
            )
        c10d._world.pg_group_ranks[self.group] = {0: 0, 1: 1}
        self.store = store
        assert reply.result().status == 200, reply.result().text

    def announce(
        self, tensors: dict[str, torch.Tensor], *, timeout: float = 60.0, **fields: Any
    ) -> Reply:
        """Only tell the engine what is to come."""
        body = {
            "names": list(tensors),
            "dtypes": [str(t.dtype).removeprefix("torch.") for t in tensors.values()],
            "shapes": [list(t.shape) for t in tensors.values()],
            "group_name": self.name,
            "flush_cache": False,
            **fields,
        }
        path = "/update_weights_from_distributed"
        return http_call(self.engine, "POST", path, body, timeout=timeout)

    def broadcast(self, tensors: dict[str, torch.Tensor], *, flat: bool = False) -> None:
        """Only send."""
        wire = [t.detach().contiguous() for t in tensors.values()]
        if flat:
            wire = [torch.cat([t.reshape(-1).view(torch.uint8) for t in wire])]
        for tensor in wire:
            dist.broadcast(tensor, src=0, group=self.group)

    def send(self, tensors: dict[str, torch.Tensor], *, flat: bool = False, **fields: Any) -> Reply:
        """Tell the engine, and broadcast meanwhile."""
        if flat:
            fields["load_format"] = "flattened_bucket"
        with background() as start:
            reply = start(self.announce, tensors, **fields)
            self.broadcast(tensors, flat=flat)
        return reply.result()

    def update(self, model: LlamaForCausalLM, **fields: Any) -> Reply:
        """Send a whole model inside a session."""
        assert post(self.engine, "/begin_weight_update").status == 200
        reply = self.send(dict(model.named_parameters()), **fields)
        assert post(self.engine, "/end_weight_update").status == 200
        return reply

    def close(self) -> None:
        """Leave the group on both sides."""
        post(self.engine, "/destroy_weights_update_group", group_name=self.name)
        # Whoever destroys the default group destroys all others with it.
        with suppress(ValueError):
            dist.destroy_process_group(self.group)


@contextmanager
def background() -> Iterator[Callable[..., Future[Any]]]:
    """Give a function that runs a call in another thread."""
    with ThreadPoolExecutor(4) as pool:
        yield pool.submit


def stays_open(call: Future[Any], seconds: float = 0.3) -> bool:
    """Whether a call is still not answered after a while."""
    try:
        call.result(seconds)
    except TimeoutError:
        return True
    return False


def alive(pid: int) -> bool:
    """Whether a process runs, or could."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture(scope="session")
def model_a() -> LlamaForCausalLM:
    return llama(0)


@pytest.fixture(scope="session")
def model_b() -> LlamaForCausalLM:
    return llama(1)


@pytest.fixture(scope="session")
def kit() -> SimpleNamespace:
    """The helpers of this file, without an import that depends on pytest's import mode."""
    return SimpleNamespace(
        PROMPT=PROMPT,
        qwen2=qwen2,
        greedy=greedy,
        call=http_call,
        post=post,
        get=get,
        Trainer=Trainer,
        background=background,
        wait_for=wait_for,
        stays_open=stays_open,
        alive=alive,
        running=running,
    )


@pytest.fixture(scope="session")
def engine(model_a: LlamaForCausalLM) -> Iterator[ReferenceEngine]:
    """An engine that serves model A, shared by all tests that don't end it."""
    with ReferenceEngine(model_a, group_timeout=20.0, health_timeout=0.3) as running_engine:
        yield running_engine


@pytest.fixture(scope="session")
def trainer(engine: ReferenceEngine) -> Iterator[Trainer]:
    """A trainer in a group with the shared engine."""
    joined = Trainer(engine)
    yield joined
    joined.close()


@pytest.fixture
def clean(engine: ReferenceEngine, trainer: Trainer, model_a: LlamaForCausalLM) -> Iterator[None]:
    """Afterwards the shared engine serves model A again, without faults, pause or session."""
    yield
    engine.clear_faults()
    post(engine, "/end_weight_update")
    post(engine, "/continue_generation")
    post(engine, "/abort_request", abort_all=True)
    assert trainer.update(model_a).status == 200
    wait_for(lambda: get(engine, "/flush_cache").status == 200)
    post(engine, "/update_weight_version", new_version="default")
