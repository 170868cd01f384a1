"""Plays the steps of the parity table to one engine and notes what it answers."""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import requests
import torch

from weight_update.transports.process_group import UpdateGroup
from weight_update.waiting import spawn

from .models import shortfall
from .parity_table import (
    GROUP,
    OTHER,
    PORT,
    Call,
    Finish,
    Generate,
    Grow,
    IsDone,
    Join,
    Push,
    Start,
    Step,
)

Observation = Any

HTTP_SECONDS = 120.0
# What changes from call to call, or tells of the machine.
VOLATILE = re.compile(r"e2e_latency|timestamp|.*_time|.*_ts|queue_.*|ts_tic|id|rid|http_worker_ipc")
MISSING = "(missing)"


class Player:
    """One engine, and the trainer's ends of its groups.

    Args:
        url: The engine.
        models: The transformers models ``a`` (which it serves at first) and ``b``.
    """

    def __init__(self, url: str, models: dict[str, Any]) -> None:
        self.url = url
        self._models = models
        self._names: dict[str, str] = {}
        self._groups: dict[str, UpdateGroup] = {}
        self._running: dict[str, Future[requests.Response]] = {}
        self._join(GROUP)
        self._names[PORT] = str(self._groups[GROUP].port)

    def play(self, steps: Sequence[Step]) -> list[Observation]:
        """What the engine answers to the steps, one observation each."""
        self.reset()
        return [_ACTIONS[type(step)](self, step) for step in steps]

    def reset(self) -> None:
        """Back to model A: idle, not paused, outside a session, nothing cached, ``default``."""
        self._request("POST", "/continue_generation", {})
        self._request("POST", "/end_weight_update", {})
        self._request("POST", "/abort_request", {"abort_all": True})
        for answer in self._running.values():
            answer.result(HTTP_SECONDS)
        self._running.clear()
        self._request("POST", "/begin_weight_update", {})
        assert self.push(Push(model="a"))[0] == 200
        self._request("POST", "/end_weight_update", {})
        self._request(
            "POST",
            "/update_weight_version",
            {"new_version": "default", "abort_all_requests": False},
        )
        _wait_for(lambda: self._request("POST", "/flush_cache").ok)

    def close(self) -> None:
        """Leaves all groups, both ends."""
        for placeholder, group in self._groups.items():
            name = self._names[placeholder]
            self._request("POST", "/destroy_weights_update_group", {"group_name": name})
            group.give_up()

    # ---- one method a kind of step

    def call(self, step: Call) -> Observation:
        """The status, and what the step wants to know of the body."""
        answer = self._request(step.method, step.path, step.body, step.raw)
        return self._observe(answer, step.reads, step.says)

    def generate(self, step: Generate) -> Observation:
        """Tokens, versions and what came from the cache."""
        answer = self._request("POST", "/generate", _body(step.prompt, step.count)).json()
        if not self._running:  # the answer may come before its end: releasing memory would kill
            _wait_for(lambda: self._load("num_running_reqs") == 0)
        meta = answer["meta_info"]
        keys = ("weight_version", "weight_versions", "cached_tokens")
        return [answer["output_ids"], *(meta.get(key, MISSING) for key in keys)]

    def start(self, step: Start) -> Observation:
        """Nothing: the request goes on."""
        others = len(self._running)
        if step.until == "running":  # the count may trail the end of an earlier request
            _wait_for(lambda: self._load("num_running_reqs") == others)
        body = _body(step.prompt, step.count, step.name)
        self._running[step.name] = spawn(self._request, "POST", "/generate", body)
        if step.until == "running":
            answer = self._running[step.name]  # a short one may be over before it is seen
            _wait_for(lambda: answer.done() or self._load("num_running_reqs") > others)

    def grow(self, step: Grow) -> Observation:
        """Nothing: some tokens more were made."""
        goal = self._tokens() + 6
        _wait_for(lambda: self._tokens() >= goal)

    def finish(self, step: Finish) -> Observation:
        """Why it ended, and on whose weights each version's tokens were made.

        How many tokens a request had that is aborted in the queue is a matter of time.
        """
        if step.cut:
            self._request("POST", "/abort_request", {"rid": step.name})
        answer = self._running.pop(step.name).result(HTTP_SECONDS)
        if not answer.ok:
            return [answer.status_code, answer.text]
        meta, tokens = answer.json()["meta_info"], answer.json()["output_ids"]
        fate = {
            "reason": meta["finish_reason"],
            "retractions": meta.get("num_retractions", MISSING),
        }
        if fate["reason"].get("message") == "Abort in waiting queue":
            return fate
        if "weight_versions" not in meta:
            return {**fate, "version": meta["weight_version"]}
        spans = [(s["version"], s["start"], s["end"]) for s in meta["weight_versions"]]
        prompt = list(Start().prompt)
        made = [(v, self._maker(prompt + tokens[:i], tokens[i:j])) for v, i, j in spans]
        return {**fate, "spans": made[:1] if step.raced else made}

    def is_done(self, step: IsDone) -> Observation:
        """Whether the answer came; one that should have come may trail the engine's state."""
        self._request("GET", "/model_info")
        try:
            self._running[step.name].result(HTTP_SECONDS if step.expected else 0.3)
        except TimeoutError:
            return False
        return True

    def push(self, step: Push) -> Observation:
        """The answer to an update request whose bytes were broadcast."""
        tensors = self._tensors(step)
        fields = {
            "names": [name for name, _ in tensors],
            "dtypes": [str(t.dtype).removeprefix("torch.") for _, t in tensors],
            "shapes": [list(t.shape) for _, t in tensors],
            "group_name": GROUP,
            "flush_cache": False,
            **({"load_format": "flattened_bucket"} if step.flat else {}),
            **step.fields,
        }
        body = {key: value for key, value in fields.items() if value is not ...}
        wire = [tensor for _, tensor in tensors]
        if step.flat:
            wire = [torch.cat([t.reshape(-1).view(torch.uint8) for t in wire])]
        group = self._groups[fields["group_name"]]
        answer = spawn(self._request, "POST", "/update_weights_from_distributed", body)
        group.broadcast(wire)
        answer.result(HTTP_SECONDS)
        self._drain(fields["group_name"], group)
        return self._observe(answer.result(), step.reads, step.says)

    def join(self, step: Join) -> Observation:
        """The answer to joining a second group."""
        return self._join(OTHER)

    # ---- helpers

    def _drain(self, placeholder: str, group: UpdateGroup) -> None:
        """Makes a new group if the engine refused without taking part in the broadcast."""
        try:
            _wait_for(lambda: not group.moving(), 10.0)
        except AssertionError:
            group.give_up()
            body = {"group_name": placeholder}
            self._request("POST", "/destroy_weights_update_group", body)
            self._join(placeholder)

    def _join(self, placeholder: str) -> Observation:
        name = self._names[placeholder] = f"parity-{secrets.token_hex(6)}"
        group = UpdateGroup(
            address="127.0.0.1", port=None, world_size=2, device=torch.device("cpu"), name=name
        )
        body = {
            "master_address": "127.0.0.1",
            "master_port": group.port,
            "rank_offset": 1,
            "world_size": 2,
            "group_name": name,
            "backend": "gloo",
        }
        answer = spawn(self._request, "POST", "/init_weights_update_group", body)
        group.join()
        self._groups[placeholder] = group
        return self._observe(answer.result(HTTP_SECONDS), (), ())

    def _tensors(self, step: Push) -> list[tuple[str, torch.Tensor]]:
        known = dict(self._models[step.model].named_parameters())
        names = known if step.names is None else step.names
        tensors = [(name, known[name].detach()) for name in names]
        tensors += [(name, torch.zeros(shape)) for name, shape in step.zeros.items()]
        cast = getattr(torch, step.cast) if step.cast else torch.float32
        return [(name, tensor.to(cast).contiguous()) for name, tensor in tensors]

    def _request(
        self, method: str, path: str, body: Any = None, raw: str | None = None
    ) -> requests.Response:
        data = raw if raw is not None else None if body is None else json.dumps(body)
        for placeholder, name in self._names.items():
            data = data and data.replace(f'"{placeholder}"', json.dumps(_number(name)))
        headers = {"Content-Type": "application/json"}
        return requests.request(
            method, self.url + path, data=data, headers=headers, timeout=HTTP_SECONDS
        )

    def _observe(
        self, answer: requests.Response, reads: Sequence[str], says: Sequence[str]
    ) -> Observation:
        text = answer.text
        for placeholder in self._groups:
            text = text.replace(self._names[placeholder], placeholder)
        if says:
            return [answer.status_code, {words: words in text for words in says}]
        try:
            body = _stable(json.loads(text))
        except ValueError:
            body = text
        if reads and answer.ok:
            body = {path: _at(json.loads(text), path) for path in reads}
        return [answer.status_code, body]

    def _load(self, key: str) -> int:
        return int(self._loads()[key])

    def _tokens(self) -> int:
        """How many are held; of the two counts, older releases have the one of those computed."""
        load = self._loads()
        return int(load.get("num_total_tokens", load.get("num_used_tokens")))

    def _loads(self) -> dict[str, Any]:
        loads: list[dict[str, Any]] = self._request("GET", "/v1/loads").json()["loads"]
        return loads[0]

    def _maker(self, prefix: list[int], tokens: list[int]) -> str:
        """Whose greedy choice the tokens are; neither's, on keys and values of other weights."""
        makers = [n for n, m in self._models.items() if shortfall(m, prefix, tokens) < 1e-3]
        return makers[0] if makers else "neither"


_ACTIONS: dict[type[Any], Callable[[Player, Any], Observation]] = {
    Call: Player.call,
    Generate: Player.generate,
    Start: Player.start,
    Grow: Player.grow,
    Finish: Player.finish,
    IsDone: Player.is_done,
    Push: Player.push,
    Join: Player.join,
}


def _body(prompt: Sequence[int], tokens: int, rid: str | None = None) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    body: dict[str, Any] = {"input_ids": list(prompt), "sampling_params": sampling}
    return body if rid is None else {**body, "rid": rid}


def _number(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


def _stable(body: Any) -> Any:
    """A body without what changes from call to call; floats rounded to what fp32 promises.

    Texts of validation errors are each framework's own, and not compared.
    """
    if isinstance(body, dict) and "validation error" in str(body.get("message")):
        return {**body, "message": "validation errors"}
    if isinstance(body, dict):
        return {k: _stable(v) for k, v in body.items() if not VOLATILE.fullmatch(k)}
    if isinstance(body, list):
        return [_stable(item) for item in body]
    return round(body, 3) if isinstance(body, float) else body


def _at(body: Any, path: str) -> Any:
    for key in path.split("."):
        try:
            body = body[int(key)] if isinstance(body, list) else body[key]
        except (KeyError, IndexError, TypeError, ValueError):
            return MISSING
    return _stable(body)


def _wait_for(condition: Callable[[], bool], seconds: float = HTTP_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "condition never came true"
        time.sleep(0.01)
