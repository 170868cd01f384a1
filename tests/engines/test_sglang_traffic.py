"""Several updates in a row while 16 requests run: all return, and say which weights made them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from itertools import count, pairwise
from typing import Any

import pytest

from weight_update import EngineState, SGLangWeightSender
from weight_update.options import PauseMode
from weight_update.waiting import spawn

from .long_request import wait_until
from .models import SEED_A, SEED_B, VOCAB_SIZE, greedy, worst_shortfall
from .served import ROUNDING, Served, sender_of
from .sglang_server import SGLangServer

pytestmark = pytest.mark.parametrize("served", [("llama", "float32")], indirect=True, ids="-".join)

CLIENTS = 16
TOKENS = 40
SECONDS = 120.0
UPDATES = (SEED_B, SEED_A, SEED_B, SEED_A)
# First tokens that no client uses, none of them twice: what they begin is in no cache.
_fresh = iter(range(200, VOCAB_SIZE))


class Traffic:
    """Clients that each send one request after the other, as a context manager."""

    def __init__(self, server: SGLangServer) -> None:
        self._server = server
        self._answers: list[dict[str, Any]] = []
        self._over = threading.Event()
        self._clients: list[Future[None]] = []

    def __enter__(self) -> Traffic:
        """Start all clients."""
        self._clients = [spawn(self._ask_again_and_again, number) for number in range(CLIENTS)]
        return self

    def __exit__(self, *_: object) -> None:
        """Let each client's last request return."""
        self._over.set()
        for client in self._clients:
            client.result(SECONDS)

    @property
    def answers(self) -> list[dict[str, Any]]:
        """What came back so far."""
        return list(self._answers)

    def flow(self) -> None:
        """Wait until as many answers came as there are clients: all have a request out."""
        goal = len(self._answers) + CLIENTS
        wait_until(lambda: len(self._answers) >= goal or any(c.done() for c in self._clients))

    def _ask_again_and_again(self, client: int) -> None:
        for number in count():
            prompt = [3 + client, 3 + number % 190, 3 + number // 190]
            sampling = {"max_new_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
            body = {"input_ids": prompt, "sampling_params": sampling}
            answer = self._server.post("generate", body, timeout=SECONDS)
            self._answers.append({**answer, "prompt": prompt})
            if self._over.is_set():
                return


def updates_in_a_row(
    served: Served, sender: SGLangWeightSender, traffic: Traffic
) -> dict[str, int]:
    """Update again and again; fresh output equals transformers after each. Seeds by label."""
    published = {}
    for seed in UPDATES:
        traffic.flow()
        report = sender.update_weights(served.model(seed))
        assert report.engines[served.server.url].state is EngineState.NEW
        published[str(report.version)] = seed
        prompt = [next(_fresh), 14, 15, 92, 65]
        assert served.server.generate(prompt, 24) == greedy(served.model(seed), prompt, 24)
    traffic.flow()
    return published


def spans_of(answer: dict[str, Any]) -> list[dict[str, Any]]:
    return list(answer["meta_info"].get("weight_versions", ()))  # without tokens, none


def in_order(answer: dict[str, Any], published: list[str]) -> bool:
    """Whether labels that were published made an answer, in their order and without a gap."""
    spans = spans_of(answer)
    order = [published.index(span["version"]) for span in spans]  # fails for an unknown label
    ends = [0, *(span["end"] for span in spans)]
    joined = ends == [*(span["start"] for span in spans), len(answer["output_ids"])]
    return joined and all(a < b for a, b in pairwise(order))


def made_by(answers: list[dict[str, Any]], label: str) -> Iterator[tuple[list[int], list[int]]]:
    """What stood before the tokens that bear a label, and these tokens."""
    for answer in answers:
        tokens = answer["output_ids"]
        for span in spans_of(answer):
            if span["version"] == label and span["start"] < span["end"]:
                head = answer["prompt"] + tokens[: span["start"]]
                yield head, tokens[span["start"] : span["end"]]


def are_made_as_labelled(
    served: Served, answers: list[dict[str, Any]], seeds: dict[str, int]
) -> bool:
    """Whether each token is the greedy choice of the weights whose label it bears."""
    return all(
        worst_shortfall(served.model(seed), made_by(answers, label)) <= ROUNDING[served.dtype]
        for label, seed in seeds.items()
    )


@pytest.mark.parametrize("pause_mode", ["retract", "in_place", "abort"])
def test_updates_in_a_row_lose_no_request_and_every_answer_names_its_weights(
    at_a: Served, pause_mode: PauseMode
) -> None:
    seeds = {at_a.server.label(): SEED_A}
    with sender_of(at_a, pause_mode=pause_mode) as sender, Traffic(at_a.server) as traffic:
        seeds |= updates_in_a_row(at_a, sender, traffic)

    answers = traffic.answers
    ends = {answer["meta_info"]["finish_reason"]["type"] for answer in answers}
    labels = {span["version"] for answer in answers for span in spans_of(answer)}
    assert len(answers) >= CLIENTS * (len(UPDATES) + 1)
    # Requests were in flight at the updates: carried across, or aborted.
    assert ends == ({"length", "abort"} if pause_mode == "abort" else {"length"})
    assert any(len(spans_of(answer)) > 1 for answer in answers) is (pause_mode != "abort")
    assert labels == set(seeds)
    assert all(in_order(answer, list(seeds)) for answer in answers)
    if pause_mode != "in_place":  # which goes on from the old weights' cache
        assert are_made_as_labelled(at_a, answers, seeds)
    assert at_a.server.is_ready()
