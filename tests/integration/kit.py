"""Tiny models, what they generate, and what an engine was asked."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from weight_update import SGLangWeightSender, SGLangWeightSyncScheme
from weight_update.reference_engine import Fault, ReferenceEngine

PROMPT = [5, 9, 17, 33, 2, 40, 41, 8]
TOKENS = 8

KEY, ADMIN_KEY = "ordinary-5ecret", "admin-5ecret"

INIT = "/init_weights_update_group"
LEAVE = "/destroy_weights_update_group"
PAUSE = "/pause_generation"
BEGIN = "/begin_weight_update"
UPDATE = "/update_weights_from_distributed"
END = "/end_weight_update"
FLUSH = "/flush_cache"
STAMP = "/update_weight_version"
CONTINUE = "/continue_generation"
STEPS = (PAUSE, BEGIN, UPDATE, END, FLUSH, STAMP, CONTINUE)
#: The last update request carries the flush wherever the release can.
USUAL_STEPS = (PAUSE, BEGIN, UPDATE, END, STAMP, CONTINUE)

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "initializer_range": 0.2,
    "eos_token_id": None,
    "bos_token_id": None,
}


@cache
def llama(seed: int, **sizes: int) -> LlamaForCausalLM:
    """A random Llama (seed 0 is A, 1 is B); shared, so tests must not change it."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**SIZES | sizes, tie_word_embeddings=False)).eval()


@cache
def qwen2(seed: int, tied: bool = True) -> Qwen2ForCausalLM:
    """A random Qwen2; shared, so tests must not change it."""
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=tied)).eval()


def greedy(model: Any, prompt: Sequence[int] = PROMPT, count: int = TOKENS) -> list[int]:
    """What transformers generates greedily."""
    ids = torch.tensor([list(prompt)])
    with torch.no_grad():
        out = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            do_sample=False,
        )
    return list(out[0, len(prompt) :].tolist())


@cache
def tokens_of(seed: int) -> list[int]:
    """What :func:`llama` generates for ``PROMPT``."""
    return greedy(llama(seed))


@contextmanager
def engines(count: int, **options: Any) -> Iterator[list[ReferenceEngine]]:
    """Engines on model A, started side by side."""
    with ExitStack() as stack:
        started = [ReferenceEngine(llama(0), wait=False, **options) for _ in range(count)]
        for engine in started:
            stack.enter_context(engine)
        yield started


def served(engine: ReferenceEngine) -> list[int]:
    """What an engine generates for ``PROMPT``."""
    return list(engine.generate(PROMPT, TOKENS)["output_ids"])


def label(engine: ReferenceEngine) -> str:
    """The version that an engine shows."""
    return str(engine.call("GET", "/model_info")["weight_version"])


def relabel(engine: ReferenceEngine, version: str) -> None:
    """Write the version label without a sender."""
    engine.call("POST", STAMP, {"new_version": version, "abort_all_requests": False})


def is_paused(engine: ReferenceEngine) -> bool:
    """Whether an engine holds new requests."""
    try:
        engine.call("GET", "/ready")
    except RuntimeError:
        return True
    return False


def make_sender(
    engines: Sequence[ReferenceEngine] | ReferenceEngine, **options: Any
) -> SGLangWeightSender:
    """A sender for one engine or several, with a bound that no test waits for."""
    urls = engines.url if isinstance(engines, ReferenceEngine) else [e.url for e in engines]
    return SGLangWeightSyncScheme(urls, **{"timeout": 60.0, **options}).create_sender()


def push(engines: Sequence[ReferenceEngine] | ReferenceEngine, model: Any) -> None:
    """Bring a model into engines with a sender of its own."""
    with make_sender(engines) as sender:
        sender.update_weights(model)


class Collector:
    """Counts as TorchRL's collectors do, from wherever it stands."""

    def __init__(self, version: int = 0) -> None:
        self.version = version

    def increment_version(self) -> None:
        """Count an update."""
        self.version += 1


@contextmanager
def timeout_of(sender: SGLangWeightSender, seconds: float) -> Iterator[None]:
    """Give a sender another deadline, so that only the update under test has a short one."""
    updater = sender._transport._updater
    options = updater.options
    updater.options = replace(options, timeout=seconds)
    try:
        yield
    finally:
        updater.options = options


class Log:
    """What engines were asked since this object was made.

    Groups of earlier tests are left out: they are left whenever their owners come to it.
    """

    def __init__(self, *engines: ReferenceEngine) -> None:
        gc.collect()  # senders dropped by earlier tests leave their groups now, not later
        self._start = {engine.url: len(engine.requests()) for engine in engines}

    def records(self, engine: ReferenceEngine, path: str | None = None) -> list[dict[str, Any]]:
        """Requests in order of arrival, without probes."""
        found = engine.requests()[self._start[engine.url] :]
        ours = {r["json"]["group_name"] for r in found if r["path"] == INIT}
        return [
            r
            for r in found
            if r["method"] != "OPTIONS"
            and path in (None, r["path"])
            and (r["path"] != LEAVE or r["json"]["group_name"] in ours)
        ]

    def count(self, engine: ReferenceEngine, path: str) -> int:
        """How many requests a route got."""
        return len(self.records(engine, path))

    def bodies(self, engine: ReferenceEngine, path: str) -> list[dict[str, Any]]:
        """The JSON of a route's requests."""
        return [record["json"] for record in self.records(engine, path)]

    def flags(self, engine: ReferenceEngine, path: str = UPDATE) -> list[bool]:
        """Which of a route's update requests carry the flush."""
        return [body["flush_cache"] for body in self.bodies(engine, path)]

    def flushes(self, engine: ReferenceEngine) -> int:
        """How often a flush was asked for, by a call of its own or by an update request."""
        return self.count(engine, FLUSH) + sum(self.flags(engine))

    def steps(self, engine: ReferenceEngine) -> list[str]:
        """The routes of the update procedure, in order, repetitions folded."""
        paths = [r["path"] for r in self.records(engine) if r["path"] in STEPS]
        return [path for i, path in enumerate(paths) if i == 0 or paths[i - 1] != path]


def make_flush_owed(engine: ReferenceEngine, after: int = 0) -> None:
    """An update request, the next or a later one, loads but cannot flush: the flush is owed."""
    words = "Weights were updated, but the cache was not flushed"
    fault = Fault(UPDATE, "refuse", when="before_answer", times=1, after=after, message=words)
    engine.inject(fault)


def wait_for(condition: Callable[[], Any], seconds: float = 90.0) -> Any:
    """Poll until ``condition`` is true and return it."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "condition never came true"
        time.sleep(0.01)
    return value


def running(engine: ReferenceEngine) -> int:
    """Running requests."""
    return int(engine.call("GET", "/v1/loads")["loads"][0]["num_running_reqs"])


def tokens(engine: ReferenceEngine) -> int:
    """Tokens of the running requests."""
    return int(engine.call("GET", "/v1/loads")["loads"][0]["num_total_tokens"])


@contextmanager
def takes_at_most(seconds: float) -> Iterator[None]:
    """Fail if the block takes longer."""
    start = time.monotonic()
    yield
    elapsed = time.monotonic() - start
    assert elapsed <= seconds, f"took {elapsed:.2f} s, at most {seconds} s allowed"


def wake(engine: ReferenceEngine) -> None:
    """Let a frozen engine go on."""
    os.kill(engine.pid, signal.SIGCONT)
    wait_for(lambda: engine.call("GET", "/ping") == "")


def revive(engine: ReferenceEngine) -> None:
    """Make a shared engine usable again, whatever a test did to it."""
    if engine.process.poll() is None:
        with suppress(OSError, RuntimeError):  # it may be dying
            wake(engine)
            engine.clear_faults()
            _settle(engine)
            return
    engine.restart()


def _settle(engine: ReferenceEngine) -> None:
    with suppress(RuntimeError):  # there is usually no session to end
        engine.call("POST", END, timeout=5)
    engine.call("POST", CONTINUE, {}, timeout=5)
    engine._exchange("POST", "/abort_request", {"abort_all": True}, 5)
    engine.generate([1], 1, timeout=5)
