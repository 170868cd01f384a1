"""What all endpoints share: the facts, the gate, the label, and the way to the scheduler."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from starlette.responses import JSONResponse, Response

from weight_update.reference_engine.gate import Gate
from weight_update.reference_engine.releases import Release
from weight_update.reference_engine.sampling import Limits
from weight_update.reference_engine.scheduler import Outcome, Scheduler


@dataclass(frozen=True)
class ServerInfo:
    """What the server says about itself.

    Args:
        release: The profile in force.
        arguments: The resolved start arguments, as ``/server_info`` shows them.
        model: ``model_type`` and ``architectures`` of the model.
        limits: What the model allows.
        tokenizer: A transformers tokenizer, or None: prompts are token ids then.
        health_timeout: How long ``/health`` waits before it says 503.
    """

    release: Release
    arguments: dict[str, Any]
    model: dict[str, Any]
    limits: Limits
    tokenizer: Any = None
    health_timeout: float = 2.0


class Front:
    """The HTTP layer's own state; everything that touches the model is asked of the scheduler."""

    def __init__(self, scheduler: Scheduler, info: ServerInfo) -> None:
        self.scheduler = scheduler
        self.info = info
        self.gate = Gate(info.release.continue_waits)
        self.weight_version = "default"

    async def ask(self, command: Callable[..., Any], *args: Any) -> Any:
        """Have the scheduler's thread run a command, and return its answer."""
        return await asyncio.wrap_future(self.scheduler.call(command, *args))

    def abort_all(self) -> None:
        """Have all requests ended; returns before it has happened."""
        self.scheduler.post(self.scheduler.abort, "", True)


def answer_of(outcome: Outcome) -> Response:
    """Return the answer that an outcome is."""
    return JSONResponse(asdict(outcome), 200 if outcome.success else 400)


def start_arguments(options: dict[str, Any], release: Release) -> dict[str, Any]:
    """Return what ``/server_info`` shows: it includes the keys, as the real server's does."""
    parallel = {"pp_size": 1, "dp_size": 1, "ep_size": 1}
    if release.attn_dp_size:
        parallel["attn_dp_size"] = 1
    fixed = {"enable_dp_attention": False, "weight_version": "default", "pid": os.getpid()}
    fixed["disaggregation_mode"] = "null"
    fixed["random_seed"] = secrets.randbelow(1 << 30)  # another one at every start
    return options | parallel | fixed
