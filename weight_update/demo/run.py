"""The whole demo: start an engine, train without pushes and with them, gather the evidence."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from weight_update import SGLangWeightSender, SGLangWeightSyncScheme
from weight_update.demo.display import Display
from weight_update.demo.engines import Engine, EngineKind, start_engine, wait_until_ready
from weight_update.demo.policy import Policy, make_model, save_checkpoint
from weight_update.demo.proof import Evidence, Greedy, Requests, Run
from weight_update.demo.provenance import Provenance, Verdict
from weight_update.demo.sampler import REQUESTS_IN_FLIGHT, EngineClient, Sampler
from weight_update.demo.task import PROMPTS
from weight_update.demo.training import train

STEPS = 60


@dataclass(frozen=True)
class Options:
    """What the command line decides.

    Attributes:
        engine: Which engine to train against.
        steps: Steps of the training run.
        seed: Seed of the trainer's first weights; the engine starts from the next one's.
        push: Whether weights are pushed; without, the proof must fail.
    """

    engine: EngineKind = "reference"
    steps: int = STEPS
    seed: int = 0
    push: bool = True

    @property
    def control_steps(self) -> int:
        """Steps of the control run: fewer with SGLang, which is slow on a CPU."""
        return self.steps if self.engine == "reference" else math.ceil(self.steps / 3)


_TASK = """\
The task: continue counting, 3 4 5 6 7 ... and 0 after 9. A token is right if it is the
number after the token before it; the reward is the share of right tokens. Requests are
"carried" that began under one version of the weights and ended under another.
"""


def run(options: Options, display: Display) -> Evidence:
    """Run the demo and return what it measured.

    One engine serves both runs. The control run comes first: it leaves the engine as it was.

    Raises:
        DemoError: The engine is missing or failed.
        WeightUpdateError: An update failed.
    """
    torch.set_num_threads(1)  # the engine needs the other core
    display.say(_TASK)
    base = make_model(options.seed + 1)
    with _engine(options.engine, base, display) as engine:
        client = EngineClient(engine.url)
        policy = Policy(options.seed)
        before = _greedy(client, policy)
        display.say(f"The engine is process {engine.pid}; its weights are not the trainer's.")
        control = _control_run(options, engine, base, display)
        display.outputs("Before the first push", before)
        live = _live_run(options, engine, policy, base, display)
        after = _greedy(client, policy)
        display.outputs("After the last push", after)
        name = f"{options.engine} {client.release()}"
        return Evidence(name, before, after, live, control)


@contextmanager
def _engine(kind: EngineKind, base: torch.nn.Module, display: Display) -> Iterator[Engine]:
    """An engine with the weights of ``base``, ended afterwards whatever happened."""
    with tempfile.TemporaryDirectory(prefix="weight-update-demo-") as directory:
        home = Path(directory)
        save_checkpoint(base, home / "model")
        slow = " (half a minute or more)" if kind == "sglang" else ""
        display.say(f"Starting the engine, {kind}{slow} ...")
        engine = start_engine(kind, home / "model", home)
        try:
            wait_until_ready(engine)
            yield engine
        finally:
            engine.stop()


def _control_run(options: Options, engine: Engine, base: torch.nn.Module, display: Display) -> Run:
    steps = options.control_steps
    title = f"First the control: {steps} steps of training, and no weights are pushed"
    return train_against(engine, Policy(options.seed), base, None, steps, display, title)


def _live_run(
    options: Options, engine: Engine, policy: Policy, base: torch.nn.Module, display: Display
) -> Run:
    title = f"Now {options.steps} steps with {REQUESTS_IN_FLIGHT} requests in flight, " + (
        "weights pushed after each" if options.push else "and no pushes either"
    )
    scheme = SGLangWeightSyncScheme(engine.url, pause_mode="retract", timeout=60.0)
    with scheme.create_sender() as sender:
        used = sender if options.push else None
        return train_against(engine, policy, base, used, options.steps, display, title)


def train_against(
    engine: Engine,
    policy: Policy,
    base: torch.nn.Module,
    sender: SGLangWeightSender | None,
    steps: int,
    display: Display,
    title: str,
) -> Run:
    """Train against an engine, and gather what the proof needs.

    Args:
        engine: Where the samples come from.
        policy: What learns.
        base: A model with the weights that the engine serves.
        sender: Brings the weights there; None for none.
        steps: How many steps.
        display: Where they are shown.
        title: What they are called there.
    """
    client = EngineClient(engine.url)
    first = client.version()
    provenance = Provenance(first, base)
    with Sampler(client, first) as sampler:
        taken = display.follow(title, train(policy, sampler, provenance, sender, steps), steps)
        rest = sampler.drain()
    verdict = sum((step.verdict for step in taken), Verdict()) + provenance.check(rest)
    requests = Requests(sampler.asked, sampler.returned, sampler.lost)
    return Run(tuple(taken), verdict, requests, first, client.version())


def _greedy(client: EngineClient, policy: Policy) -> Greedy:
    engine = tuple(client.greedy(prompt) for prompt in PROMPTS)
    return Greedy(engine, tuple(policy.greedy(prompt) for prompt in PROMPTS))
