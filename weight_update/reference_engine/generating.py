"""What the endpoints for requests, pauses, the cache and memory do and answer."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from starlette.responses import JSONResponse, PlainTextResponse, Response

from weight_update.reference_engine import bodies
from weight_update.reference_engine.front import Front
from weight_update.reference_engine.generation import GenerateRequest
from weight_update.reference_engine.routes import Endpoint
from weight_update.reference_engine.sampling import requests_of


class Generating:
    """Takes requests, and holds, ends or forgets them."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._scheduler, self._gate, self._info = front.scheduler, front.gate, front.info
        self._flushing = False

    def endpoints(self) -> list[Endpoint]:
        """Return the routes of all releases."""
        post, both, memory = ("POST",), ("GET", "POST"), bodies.MemoryOccupation
        flush = bodies.FlushCache if self._info.release.flush_timeout else bodies.NoBody
        return [
            Endpoint("/generate", ("POST", "PUT"), self.generate, bodies.Generate),
            Endpoint("/flush_cache", both, self.flush_cache, flush, admin=True, query=True),
            Endpoint("/abort_request", post, self.abort_request, bodies.AbortRequest, True),
            Endpoint("/pause_generation", post, self.pause, bodies.PauseGeneration, True),
            Endpoint("/continue_generation", post, self.resume, bodies.ContinueGeneration, True),
            Endpoint("/release_memory_occupation", both, self.release_memory, memory, True),
            Endpoint("/resume_memory_occupation", both, self.resume_memory, memory, True),
        ]

    async def generate(self, body: bodies.Generate) -> Response:
        """Generate for one prompt or a list of them; held while the engine is paused."""
        prompts, single = self._prompts(body)
        requests = requests_of(body, prompts, self._info.limits)
        async with self._gate.request():
            for request in requests:
                self._scheduler.post(self._scheduler.submit, request)
            futures = [asyncio.wrap_future(request.answer) for request in requests]
            answers = list(await asyncio.gather(*futures))
        for request, answer in zip(requests, answers, strict=True):
            if body.return_logprob:
                entries = zip(request.logprobs, request.output, strict=True)
                answer["meta_info"]["output_token_logprobs"] = [[p, t, None] for p, t in entries]
            if self._info.tokenizer is not None:
                answer["text"] = self._text(request)
        return JSONResponse(answers[0] if single else answers)

    def _text(self, request: GenerateRequest) -> str:
        """What the output adds to the prompt's text, without special and stop tokens."""
        decode = self._info.tokenizer.decode
        stopped = (request.finish_reason() or {}).get("type") == "stop"
        prompt, whole = request.tokens[: request.prompt_length], request.tokens
        whole = whole[:-1] if stopped else whole
        before = decode(prompt, skip_special_tokens=True)
        text: str = decode(whole, skip_special_tokens=True)
        return text[len(before) :]

    def _prompts(self, body: bodies.Generate) -> tuple[list[list[int]], bool]:
        if body.stream:
            raise bodies.RequestError("stream is not supported by the reference engine")
        given: Any = body.input_ids if body.text is None else self._encoded(body.text)
        if not given:
            raise bodies.RequestError("either input_ids or text must be given and not empty")
        single = isinstance(given[0], int)
        if single and isinstance(body.extra_key, list):
            raise bodies.RequestError("extra_key should be a string for a single request")
        return [given] if single else given, single

    def _encoded(self, text: str | list[str]) -> Any:
        if self._info.tokenizer is None:
            raise bodies.RequestError("this model has no tokenizer; send input_ids")
        return self._info.tokenizer(text)["input_ids"]

    async def abort_request(self, body: bodies.AbortRequest) -> Response:
        """Abort by id prefix, or all; answers before it has happened."""
        if body.rid or body.abort_all:
            self._scheduler.post(self._scheduler.abort, body.rid, body.abort_all)
        return Response()

    async def pause(self, body: bodies.PauseGeneration) -> Response:
        """Pause; ``abort`` ends what runs, the other modes tell the scheduler and return."""
        if body.mode == "abort":
            await self._gate.pause(self._front.abort_all, drain=True)
        else:
            stop = self._scheduler.pause
            await self._gate.pause(lambda: self._scheduler.post(stop, body.mode), drain=False)
        return JSONResponse({"message": "Generation paused successfully.", "status": "ok"})

    async def resume(self, _: bodies.ContinueGeneration) -> Response:
        """Continue; waits for an update that runs under the pause."""
        await self._gate.resume(lambda: self._scheduler.post(self._scheduler.resume))
        return JSONResponse({"message": "Generation continued successfully.", "status": "ok"})

    async def flush_cache(self, body: bodies.FlushCache | bodies.NoBody) -> Response:
        """Flush if idle; with a timeout, wait for strict idleness."""
        patience = body.timeout if isinstance(body, bodies.FlushCache) else 0.0
        if not patience:
            # Without a timeout to take, a release says "flushed" in any case.
            speaks = self._info.release.flush_timeout
            failure = "Flush cache failed.\n" if speaks else "Cache flushed.\n"
            done = await self._front.ask(self._scheduler.flush)
        elif self._flushing:
            failure = "Another flush_cache is already in progress."
            done = False
        else:
            failure = "Timed out waiting for idle state."
            done = await self._flush_when_idle(patience)
        return PlainTextResponse("Cache flushed.\n" if done else failure, 200 if done else 400)

    async def _flush_when_idle(self, patience: float) -> bool:
        self._flushing, deadline = True, time.monotonic() + patience
        try:
            while not await self._front.ask(self._scheduler.flush, True):
                if time.monotonic() > deadline:
                    return False
                await asyncio.sleep(0.02)
            return True
        finally:
            self._flushing = False

    async def release_memory(self, body: bodies.MemoryOccupation) -> Response:
        """Free memory; an engine that is not idle ends."""
        await self._front.ask(self._scheduler.release_memory, tuple(body.tags or ()))
        return JSONResponse(None)

    async def resume_memory(self, body: bodies.MemoryOccupation) -> Response:
        """Take memory back; an engine that did not free it ends."""
        await self._front.ask(self._scheduler.resume_memory, tuple(body.tags or ()))
        return JSONResponse(None)
