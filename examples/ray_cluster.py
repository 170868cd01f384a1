"""A trainer of two ranks, two engines and two collectors as Ray actors; two of them die on the way.

    python examples/ray_cluster.py
    python examples/ray_cluster.py --address auto --server http://a:30000 --model DIR --no-deaths

The driver starts a Ray cluster on this machine's CPUs, with a folder of its own that is gone
afterwards, or joins one that runs. The ranks train a model that FSDP2 shards; every rank calls
``update_weights()`` after each step. Collectors sample while the ranks train, from engines that
Ray starts again when they die. Midway an engine is killed, later a collector:

- the update that meets the dead engine goes on without it (``quorum=1``) and says so; once Ray
  has started it again, it takes the place of the old one in the fleet, and a full push brings it
  the weights;
- a new collector takes the place of the dead one, and counts on from the present version.

The run fails unless all engines end on one version, say greedily what the trainer says, and
every collector has counted every update. It needs weight-update[demo,ray]; docs/ray.md has what a
cluster of several machines needs.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import mean
from types import FrameType
from typing import Any, NoReturn

import ray
import requests
import torch
from ray.exceptions import RayActorError
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from tensordict import TensorDict
from torch import distributed
from torch.distributed import TCPStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

from weight_update import EngineState, SGLangWeightSyncScheme, UpdateReport
from weight_update.rollouts import versions_of

RANKS, ENGINES, COLLECTORS = 2, 2, 2
ANSWER, GROUP, WORDS = 6, 8, 16  # tokens of an answer; samples of a prompt; words that are used
PROMPTS = [[word] for word in range(8)]
ENOUGH = 12  # steps, for the reward to rise
CLIP, LEARNING_RATE, MINIBATCH = 0.2, 3e-3, 32
START_SECONDS, UPDATE_SECONDS, SAMPLE_SECONDS = 180.0, 60.0, 120.0
OBJECT_STORE_BYTES = 200 * 2**20

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": WORDS,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "bos_token_id": None,
    "eos_token_id": None,
}
REFERENCE_ENGINE = (
    f"{sys.executable} -m weight_update.reference_engine --model {{model}} --load-format dummy "
    "--host {host} --port {port}"
)


def session() -> requests.Session:
    """Engines are inside the cluster: past any proxy."""
    made = requests.Session()
    made.trust_env = False
    return made


def node_address() -> str:
    """The address of this node, as the cluster knows it."""
    here = ray.get_runtime_context().get_node_id()
    return str(next(n["NodeManagerAddress"] for n in ray.nodes() if n["NodeID"] == here))


# -- the actors ----------------------------------------------------------------------------


class Trainer:
    """One rank of the trainer.

    Args:
        rank: Of all ranks; the lowest one talks to the engines.
        model: A folder; with a ``config.json`` alone, training starts from random weights.
        host: Where rank 0 waits for the others; None takes the node's address.
    """

    def __init__(self, rank: int, model: str, host: str | None) -> None:
        self._rank, self._folder, self._host = rank, model, host

    def meeting_point(self) -> tuple[str, int]:
        """Opens the store where the ranks meet; on rank 0."""
        host = self._host or node_address()
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        return host, self._store.port

    def join(self, place: tuple[str, int], engines: Sequence[str], quorum: int | str) -> None:
        """Meets the other ranks, shards the model, and makes the sender.

        Args:
            place: Of the store.
            engines: URLs, the same on every rank.
            quorum: How many engines an update needs.
        """
        store = self._store if self._rank == 0 else TCPStore(*place, is_master=False)
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        backend = "nccl" if self._device == "cuda" else "gloo"
        distributed.init_process_group(backend, store=store, rank=self._rank, world_size=RANKS)
        torch.manual_seed(0)  # the same model on every rank
        self._model = sharded(load(self._folder), self._device)
        torch.manual_seed(self._rank + 1)
        self._optimizer = torch.optim.Adam(self._model.parameters(), lr=LEARNING_RATE)
        scheme = SGLangWeightSyncScheme(
            list(engines), strategy="state_dict", quorum=quorum, timeout=UPDATE_SECONDS
        )
        self._sender = scheme.create_sender()
        self._sender.register_model(self._model)

    def register_collector(self, collector: Any) -> None:
        """Has a collector count; on rank 0 alone, or each rank would have it count."""
        self._sender.register_collector(collector)

    def replace_engine(self, old: str, new: str | None) -> None:
        """Puts an engine, if there is one, in the place of one that is gone; on every rank."""
        if new is not None:
            self._sender.add_engine(new)
        self._sender.remove_engine(old)

    def update_weights(self) -> UpdateReport:
        """Brings the weights to the engines; on every rank."""
        return self._sender.update_weights()

    def train(self, samples: TensorDict) -> float:
        """One pass over this rank's part of the samples; the mean loss."""
        parts = samples[torch.randperm(len(samples))].to(self._device).split(MINIBATCH)
        return mean(self._step(part) for part in parts)

    def _step(self, samples: TensorDict) -> float:
        loss = grpo_loss(self._model, samples)
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return float(loss.detach())

    def greedy(self) -> list[list[int]]:
        """What the trained model says after each prompt; all ranks compute it together."""
        tokens = torch.tensor(PROMPTS, device=self._device)
        with torch.no_grad():
            for _ in range(ANSWER):
                last = self._model(input_ids=tokens).logits[:, -1].argmax(-1)
                tokens = torch.cat([tokens, last[:, None]], dim=1)
        return [row[1:] for row in tokens.tolist()]

    def leave(self) -> None:
        """Gives up the groups, the engines' and the ranks'."""
        self._sender.shutdown()
        distributed.destroy_process_group()


def load(folder: str) -> Any:
    """The model of a folder."""
    if any(Path(folder).glob("*.safetensors")):
        return AutoModelForCausalLM.from_pretrained(folder)
    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))


def sharded(model: Any, device: str) -> Any:
    """Each rank keeps its part of every parameter."""
    mesh = init_device_mesh(device, (RANKS,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def grpo_loss(model: Any, samples: TensorDict) -> torch.Tensor:
    """The clipped objective, with log-probabilities of whoever made each token."""
    tokens, advantage = samples["tokens"], samples["advantage"][:, None]
    logits = model(input_ids=tokens).logits[:, -ANSWER - 1 : -1]
    logprobs = logits.log_softmax(-1).gather(-1, tokens[:, -ANSWER:, None])[..., 0]
    ratio = (logprobs - samples["sampled_logprobs"]).exp()
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage).mean()


class Engine:
    """Owns a server on its node, which ends with it; when either dies, Ray starts both again.

    Args:
        command: Starts the server; ``{host}`` and ``{port}`` stand for where it is to listen.
        host: That address; None takes the node's.
        port: That port; 0 takes one that is free.
    """

    def __init__(self, command: str, host: str | None, port: int) -> None:
        host = host or node_address()
        port = claimed(host, port)
        self._url = f"http://{host}:{port}"
        words = shlex.split(command.replace("{host}", host).replace("{port}", str(port)))
        # The kernel ends the server with this process, however that ends.
        self._server = subprocess.Popen(["setpriv", "--pdeathsig", "KILL", *words])

    def url(self) -> str:
        """Where the server listens, once it answers."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self._server.poll() is not None:
                os._exit(1)  # Ray starts this actor again
            try:
                session().get(f"{self._url}/model_info", timeout=5).raise_for_status()
                return self._url
            except requests.RequestException:
                time.sleep(0.1)
        raise TimeoutError(f"{self._url} does not answer within {START_SECONDS:.0f} s")


def claimed(host: str, port: int) -> int:
    """That port, or one that is free for 0; a server that listens there is somebody else's."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            print(f"{host}:{port}: {error}")
            os._exit(1)  # it may be the one of before that ends: Ray starts this actor again
        return int(probe.getsockname()[1])


class Collector:
    """Samples from the engines, and stamps each token with the version that made it.

    ``increment_version()`` is called while ``collect()`` may wait for a paused engine, so the
    actor needs ``max_concurrency=2``.

    Args:
        seat: Which of the collectors it is; each asks another engine first.
        policy_version: The version from which it counts.
    """

    def __init__(self, seat: int, policy_version: int) -> None:
        self._seat, self._version, self._session = seat, policy_version, session()

    def increment_version(self) -> None:
        """Counts an update: the engines have new weights, and none generates yet."""
        self._version += 1

    def policy_version(self) -> int:
        """How many updates there were."""
        return self._version

    def collect(self, engines: Sequence[str]) -> tuple[dict[str, Any], TensorDict]:
        """Samples a group of answers to each prompt.

        Args:
            engines: URLs of those that serve what the trainer pushed.

        Returns:
            What the driver wants to know, and the samples.
        """
        prompts = [prompt for prompt in PROMPTS for _ in range(GROUP)]
        answers = zip(prompts, self._ask(prompts, engines), strict=True)
        samples = torch.stack([sample_of(prompt, answer) for prompt, answer in answers])
        samples["advantage"] = advantages_of(samples["reward"])
        versions = samples["policy_version"]
        told = {"reward": float(samples["reward"].mean()), "oldest": int(versions.min())}
        return {**told, "newest": int(versions.max())}, samples

    def _ask(self, prompts: list[list[int]], engines: Sequence[str]) -> list[dict[str, Any]]:
        sampling = {"max_new_tokens": ANSWER, "temperature": 1.0, "ignore_eos": True}
        body = {"input_ids": prompts, "sampling_params": sampling, "return_logprob": True}
        first = self._seat % len(engines)
        for url in [*engines[first:], *engines[:first]]:
            try:
                answer = self._session.post(f"{url}/generate", json=body, timeout=SAMPLE_SECONDS)
                answer.raise_for_status()
                return list(answer.json())
            except requests.RequestException as error:
                print(f"{url} gave no samples: {error}")  # the next one may
        raise RuntimeError(f"none of {list(engines)} gave samples")


def sample_of(prompt: list[int], answer: dict[str, Any]) -> TensorDict:
    """An answer as a sample. The task is to echo: its reward is the share of the prompt's word."""
    version = torch.empty(ANSWER, dtype=torch.long)
    for span in versions_of(answer).spans:
        version[span.start : span.end] = int(span.version)
    tokens = torch.tensor(prompt + answer["output_ids"])
    logprobs = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
    return TensorDict(
        tokens=tokens,
        reward=(tokens[-ANSWER:] == prompt[-1]).float().mean(),
        sampled_logprobs=torch.tensor(logprobs),
        policy_version=version,
    )


def advantages_of(rewards: torch.Tensor) -> torch.Tensor:
    """How much better than its group each sample did, in the group's standard deviations."""
    groups = rewards.view(-1, GROUP)
    spread = groups.std(-1, keepdim=True) + 1e-4
    return ((groups - groups.mean(-1, keepdim=True)) / spread).flatten()


# -- the driver ----------------------------------------------------------------------------


class Ranks:
    """The trainer's ranks: started all or none, and asked all at once.

    Args:
        options: Command line.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        wants = {"CPU": 1.0, "GPU": 1.0} if options.gpus else {"CPU": 1.0}
        group = placement_group([wants] * RANKS, strategy="PACK")
        ray.get(group.ready(), timeout=START_SECONDS)
        trainer = ray.remote(num_cpus=1, num_gpus=int(options.gpus))(Trainer)
        seats = [PlacementGroupSchedulingStrategy(group, rank) for rank in range(RANKS)]
        self._actors = [
            trainer.options(scheduling_strategy=seat).remote(rank, options.model, options.host)
            for rank, seat in enumerate(seats)
        ]

    def join(self, engines: Sequence[str], quorum: int | str) -> None:
        """Has the ranks meet."""
        place = ray.get(self._actors[0].meeting_point.remote(), timeout=START_SECONDS)
        self.all("join", place, engines, quorum)

    def all(self, method: str, *arguments: Any) -> list[Any]:
        """Calls a method on every rank, with the same arguments."""
        return self.each(method, [arguments] * RANKS)

    def each(self, method: str, arguments: Sequence[Sequence[Any]]) -> list[Any]:
        """Calls a method on every rank, with arguments of its own.

        Raises:
            RayTaskError: A rank raised; it is a ``WeightUpdateError`` if an update failed.
            RayActorError: A rank has died, and the others wait for it: the run is over.
        """
        calls = [
            getattr(actor, method).remote(*a)
            for actor, a in zip(self._actors, arguments, strict=True)
        ]
        return list(ray.get(calls, timeout=START_SECONDS))

    def counted_by(self, collector: Any) -> None:
        """Has a collector count the updates."""
        ray.get(self._actors[0].register_collector.remote(collector), timeout=START_SECONDS)


class Engines:
    """The servers, and the actors that own those which were started here.

    Args:
        options: Command line.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._given = list(options.server)
        self._owners: dict[str, Any] = {}
        self._starting: dict[str, Any] = {}  # calls that tell where one came back, by old URL
        self.serving: list[str] = []  # those that hold what was pushed last
        self.lost = 0
        engine = ray.remote(Engine).options(
            num_cpus=1,
            num_gpus=options.gpus_per_engine,
            max_restarts=3,
            max_task_retries=-1,
            scheduling_strategy="SPREAD",
        )
        command = options.engine_command.replace("{model}", options.model)
        number = 0 if self._given else ENGINES
        ports = [options.port and options.port + seat for seat in range(number)]
        self._actors = [engine.remote(command, options.host, port) for port in ports]

    def wait(self) -> list[str]:
        """Their URLs, once all of them answer."""
        calls = [actor.url.remote() for actor in self._actors]
        try:
            urls = ray.get(calls, timeout=START_SECONDS)
        except RayActorError:
            sys.exit("an engine ends as soon as it starts (--verbose shows why): is its port free?")
        self._owners = dict(zip(urls, self._actors, strict=True))
        return [*self._given, *self._owners]

    @property
    def ours(self) -> list[str]:
        """URLs of those that Ray starts again when they die."""
        return list(self._owners)

    def kill(self, url: str) -> None:
        """Kills one of ours, as a crash would."""
        ray.kill(self._owners[url], no_restart=False)

    def learn(self, report: UpdateReport) -> None:
        """Notes which serve the new weights, and asks where those that are gone come back."""
        states = {url: outcome.state for url, outcome in report.engines.items()}
        self.serving = [url for url, state in states.items() if state is EngineState.NEW]
        for url, state in states.items():
            gone = state is EngineState.UNREACHABLE and url in self._owners
            if gone and url not in self._starting:
                self._starting[url] = self._owners[url].url.remote()
                self.lost += 1

    def returned(self, patience: float = 0.0) -> list[tuple[str, str | None]]:
        """Old and new URL of each that was gone and answers again; None if Ray gave it up.

        Args:
            patience: Seconds to wait for each.
        """
        back: list[tuple[str, str | None]] = []
        for old, call in list(self._starting.items()):
            if not ray.wait([call], timeout=patience)[0]:
                continue
            owner = self._owners.pop(old)
            try:
                new = ray.get(self._starting.pop(old))
                self._owners[new] = owner
            except RayActorError:
                new = None
            back.append((old, new))
        return back


class Collectors:
    """Those who sample, each replaced when it dies.

    Args:
        ranks: Whose updates they count.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._kind = ray.remote(Collector).options(
            num_cpus=1, max_concurrency=2, scheduling_strategy="SPREAD"
        )
        self.actors = [self._kind.remote(seat, 0) for seat in range(COLLECTORS)]
        self.replaced = 0
        self._asked: list[Any] = []

    def count(self) -> None:
        """Has all of them count, from the first update on."""
        for actor in self.actors:
            self._ranks.counted_by(actor)

    def ask(self, engines: Sequence[str]) -> None:
        """Has each begin to sample."""
        self._asked = [self._ask(seat, engines) for seat in range(COLLECTORS)]

    def take(self, version: int, engines: Sequence[str]) -> tuple[list[dict[str, Any]], list[Any]]:
        """What was told of the samples, and where they are; of a new one in a dead one's place.

        Args:
            version: From which a new one counts on.
            engines: Where it samples.
        """
        for seat in range(COLLECTORS):
            self._await(seat, version, engines)
        told, samples = zip(*self._asked, strict=True)
        return ray.get(list(told)), list(samples)

    def versions(self) -> list[int]:
        """What each has counted."""
        calls = [actor.policy_version.remote() for actor in self.actors]
        return list(ray.get(calls, timeout=SAMPLE_SECONDS))

    def kill(self) -> None:
        """Kills the last one, as the loss of its node would."""
        ray.kill(self.actors[-1])

    def _await(self, seat: int, version: int, engines: Sequence[str]) -> None:
        registered, deadline = self.actors[seat], time.monotonic() + START_SECONDS
        while True:
            try:
                ray.get(self._asked[seat][0], timeout=SAMPLE_SECONDS)
                break
            except RayActorError as error:  # of a new one too: its node may be the one that died
                if time.monotonic() > deadline:
                    raise
                say(f"collector {seat} has died: {first_line(error)}")
                time.sleep(1)
                self.actors[seat] = self._kind.remote(seat, version)
                self._asked[seat] = self._ask(seat, engines)
        if self.actors[seat] is not registered:
            self._ranks.counted_by(self.actors[seat])
            self.replaced += 1
            say(f"collector {seat} is a new one, which counts on from version {version}")

    def _ask(self, seat: int, engines: Sequence[str]) -> Any:
        return self.actors[seat].collect.options(num_returns=2).remote(list(engines))


class Run:
    """A run: what is trained, by whom, and what became of it.

    Args:
        options: Command line.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._ranks, self._engines = Ranks(options), Engines(options)
        self._collectors = Collectors(self._ranks)
        self._rewards: list[float] = []
        self._reports: list[UpdateReport] = []
        self._warned: set[str] = set()

    def start(self) -> None:
        """Has all meet, and the engines take the trainer's weights."""
        urls = self._engines.wait()
        say(f"engines: {', '.join(urls)}")
        self._ranks.join(urls, 1)
        self._collectors.count()
        self._update("start")

    def train(self) -> None:
        """Trains on samples of the weights before the last, while the next are made."""
        self._collectors.ask(self._engines.serving)
        for step in range(1, self._options.steps + 1):
            told, samples = self._collectors.take(self._version, self._engines.serving)
            self._collectors.ask(self._engines.serving)
            self._let_die(step)
            self._ranks.each("train", [(part,) for part in samples])
            self._rewards.append(mean(one["reward"] for one in told))
            lag = self._version - min(one["oldest"] for one in told)
            self._update(f"step {step:2}  reward {self._rewards[-1]:.3f}  lag {lag}")

    def finish(self) -> bool:
        """Waits for engines that are still starting, and looks whether all went well."""
        self._take_back(START_SECONDS)
        self._update("finish")
        found = self._findings()
        self._ranks.all("leave")
        for what, holds in found.items():
            say(f"{'✓' if holds else '✗'} {what}")
        return all(found.values())

    @property
    def _version(self) -> int:
        return self._reports[-1].version

    def _let_die(self, step: int) -> None:
        if self._options.deaths and step == self._options.steps // 3:
            for url in self._engines.ours[-1:]:
                self._engines.kill(url)
                say(f"killed the engine {url}")
        if self._options.deaths and step == 2 * self._options.steps // 3:
            self._collectors.kill()
            say("killed a collector")

    def _take_back(self, patience: float = 0.0) -> None:
        for old, new in self._engines.returned(patience):
            if new != old:
                self._ranks.all("replace_engine", old, new)
            back = f"is back as {new}: the next update brings it all weights"
            say(f"{old} {back if new else 'does not come back'}")

    def _update(self, when: str) -> None:
        self._take_back()
        report = self._ranks.all("update_weights")[0]
        self._reports.append(report)
        self._engines.learn(report)
        new = self._engines.serving
        seconds = f"{1e3 * report.seconds['paused']:.0f} ms"
        say(f"{when}  version {report.version} on {len(new)} of {len(report.engines)} in {seconds}")
        for outcome in report.engines.values():
            if outcome.state is not EngineState.NEW:
                say(f"  {outcome}")
        for warning in set(report.warnings) - self._warned:
            say(f"  warning: {warning}")
        self._warned |= set(report.warnings)

    def _findings(self) -> dict[str, bool]:
        """What must hold at the end, and whether it does."""
        last, serving = self._reports[-1], self._engines.serving
        labels, answers = zip(*(served(url) for url in serving), strict=True)
        said = self._ranks.all("greedy")
        found = {
            f"every engine serves version {last.version}": (
                len(serving) == len(last.engines) and set(labels) == {str(last.version)}
            ),
            "every engine says greedily what the trainer says": all(
                answer == said[0] for answer in (*answers, *said)
            ),
            f"every collector has counted to version {last.version}": (
                self._collectors.versions() == [last.version] * COLLECTORS
            ),
        }
        if self._options.deaths and self._engines.ours:
            found["an engine died, and updates went on without it"] = self._engines.lost > 0
        if self._options.deaths:
            found["a collector died, and another took its place"] = self._collectors.replaced > 0
        if self._options.tiny and self._options.steps >= ENOUGH:
            found["the reward rose"] = mean(self._rewards[-5:]) > mean(self._rewards[:5]) + 0.1
        return found


def served(url: str) -> tuple[str, list[list[int]]]:
    """The version that a server says it has, and what it says greedily after each prompt."""
    with session() as http:
        model = http.get(f"{url}/model_info", timeout=UPDATE_SECONDS).json()
        sampling = {"max_new_tokens": ANSWER, "temperature": 0.0, "ignore_eos": True}
        body = {"input_ids": PROMPTS, "sampling_params": sampling}
        answers = http.post(f"{url}/generate", json=body, timeout=SAMPLE_SECONDS).json()
    return str(model["weight_version"]), [answer["output_ids"] for answer in answers]


def say(line: str) -> None:
    print(line, flush=True)


def first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]


@contextmanager
def cluster(options: argparse.Namespace) -> Iterator[None]:
    """Joins a cluster, or starts one on this machine's CPUs, in a folder that is gone afterwards.

    Args:
        options: Command line; a model of no folder gets one.
    """
    # A path of Ray's sockets, which are in it too, must not be longer than 107 characters.
    home = tempfile.gettempdir() if len(tempfile.gettempdir()) <= 30 else "/tmp"
    with tempfile.TemporaryDirectory(prefix="ray-", dir=home, ignore_cleanup_errors=True) as folder:
        if options.model is None:
            options.model = folder
            (Path(folder) / "config.json").write_text(json.dumps(TINY))
        try:
            if options.address:
                ray.init(options.address, log_to_driver=options.verbose)
            else:
                start_ray(folder, options.verbose)
            say(f"cluster: {len(ray.nodes())} node(s), {ray.cluster_resources()['CPU']:.0f} CPUs")
            yield
        finally:
            ray.shutdown()


def start_ray(folder: str, verbose: bool) -> None:
    """A cluster of this machine alone, which asks for a token, and writes to its folder only."""
    os.environ |= {
        "RAY_AUTH_TOKEN": secrets.token_hex(16),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "GLOO_SOCKET_IFNAME": "lo",  # all ranks are on this host
    }
    start = partial(
        ray.init,
        num_cpus=RANKS + ENGINES + COLLECTORS,
        object_store_memory=OBJECT_STORE_BYTES,
        include_dashboard=False,
        log_to_driver=verbose,
        configure_logging=verbose,
        _temp_dir=folder,
    )
    try:
        start()
    except Exception as error:
        if "timed out during startup" not in str(error):
            raise
        ray.shutdown()  # a busy machine may need longer than the 30 s that Ray gives itself
        start()


def leave(number: int, _: FrameType | None) -> NoReturn:
    """SIGTERM ends the run as Ctrl-C does."""
    sys.exit(128 + number)


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--address", help="of a Ray cluster that runs, or auto; else one is started here")
    add("--server", action="append", default=[], help="URL of a server that runs; repeatable")
    add("--model", help="folder of the checkpoint that the servers serve; all nodes see it")
    add("--engine-command", default=REFERENCE_ENGINE, help="with {host}, {port} and {model}")
    add("--port", type=int, default=0, help="of the first engine, the next has the next; 0: any")
    add("--gpus", action="store_true", help="a GPU for each rank of the trainer")
    add("--gpus-per-engine", type=float, default=0)
    add("--steps", type=int, default=18)
    add("--no-deaths", dest="deaths", action="store_false", help="kill nothing")
    add("--verbose", action="store_true", help="show what the actors and the servers log")
    options = parser.parse_args()
    if options.server and not options.model:
        parser.error("--server needs --model, the checkpoint that the servers serve")
    if options.steps < (least := 3 if options.deaths else 1):
        parser.error(f"--steps must be {least} or more{', or with --no-deaths' * options.deaths}")
    options.tiny = options.model is None
    options.host = None if options.address else "127.0.0.1"
    return options


def main() -> None:
    options = parsed()
    signal.signal(signal.SIGTERM, leave)  # until Ray is there, which does the same
    with cluster(options):
        run = Run(options)
        run.start()
        run.train()
        ended_well = run.finish()
    sys.exit(not ended_well)


if __name__ == "__main__":
    main()
