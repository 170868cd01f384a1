"""Brings a policy's weights to vLLM after each round of training, by either of its two rows.

    python examples/refit_vllm.py --start
    python examples/refit_vllm.py --start --colocated
    python examples/refit_vllm.py --server http://127.0.0.1:8000 --model DIR --device cuda

``--start`` starts a real vLLM on the CPU with a tiny model, from the environment that ``make
engines ENGINES=vllm-0.32.0`` installs in a clone of this repository. A server of your own must be
started as docs/vllm.md says, and serve the checkpoint that ``--model`` names.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import requests
import torch
from tokenizers import Tokenizer, models
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from weight_update.ports import free_port
from weight_update.synchronizers import (
    StaticCluster,
    TorchPolicy,
    VLLMGeneration,
    create_weight_synchronizer,
)

ROOT = Path(__file__).resolve().parents[1]
ENGINE = ROOT / ".engines" / "vllm-0.32.0" / "bin" / "python"
LAUNCHER = ROOT / "scripts" / "engines" / "cpu" / "launch_vllm_cpu.py"
# What a server needs so that its weights can change: docs/vllm.md explains each.
EXTENSION = ["--worker-extension-cls", "weight_update.vllm_worker.WorkerExtension"]
CPU_BACKEND = ["--weight-transfer-config", '{"backend": "weight_update_gloo"}']
START_SECONDS = 300

PROMPT, LESSON = [1, 1, 2], [3, 5, 8, 2, 10, 1, 0, 1]


def tiny_llama(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        head_dim=32,  # vLLM's attention takes no narrower one on a CPU
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config)


def train(model: PreTrainedModel, optimizer: torch.optim.Optimizer, steps: int) -> float:
    """Teaches the model what comes after the prompt, and returns the last loss."""
    tokens = torch.tensor([PROMPT + LESSON], device=model.device)
    for _ in range(steps):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return float(loss.detach())


def http() -> requests.Session:
    session = requests.Session()
    session.trust_env = False  # a server of this cluster: past any proxy
    return session


def ask(server: str) -> str:
    """What a server says after the prompt, greedily, and how much of it is right."""
    with http() as session:
        (card,) = session.get(f"{server}/v1/models", timeout=60).json()["data"][:1]
        body = {
            "model": card["id"],
            "prompt": PROMPT,
            "max_tokens": len(LESSON),
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        response = session.post(f"{server}/v1/completions", json=body, timeout=60)
    response.raise_for_status()
    answer = response.json()["choices"][0]["token_ids"]
    right = sum(said == wanted for said, wanted in zip(answer, LESSON, strict=True))
    return f"{answer} ({right} of {len(LESSON)} right)"


def run(model: PreTrainedModel, server: str, rounds: int, colocated: bool) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    policy, generation = TorchPolicy(model, optimizer), VLLMGeneration(server)
    synchronizer = create_weight_synchronizer(
        policy,
        generation,
        "vllm",
        colocated,
        train_cluster=None if colocated else StaticCluster(1),
        inference_cluster=None if colocated else StaticCluster(1),
    )
    synchronizer.init_communicator()
    print(f"the server, asked to go on after {PROMPT}: {ask(server)}")
    for number in range(1, rounds + 1):
        loss = train(model, optimizer, steps=3)
        start = time.perf_counter()
        numbers = synchronizer.sync_weights()
        print(
            f"round {number}  loss {loss:.3f}  version {numbers['version']:.0f} in "
            f"{1e3 * (time.perf_counter() - start):.0f} ms, paused for "
            f"{1e3 * numbers['paused_seconds']:.0f} ms  server: {ask(server)}"
        )
    print(f"the last report:\n{synchronizer.report}")
    synchronizer.shutdown()
    generation.shutdown()


@contextmanager
def started() -> Iterator[str]:
    """The URL of a vLLM that serves a tiny model on the CPU, and ends with the block."""
    if not ENGINE.exists():
        sys.exit(f"{ENGINE} is not there: run `make engines ENGINES=vllm-0.32.0` first")
    with tempfile.TemporaryDirectory() as home:
        model = save(tiny_llama(seed=0), Path(home) / "model")
        port = free_port()
        arguments = ["--model", model, "--port", str(port), *EXTENSION, *CPU_BACKEND]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "EXIT_ON_STDIN_EOF": "1"}
        with (Path(home) / "server.log").open("w+") as log:
            process = subprocess.Popen(
                [str(ENGINE), str(LAUNCHER), *arguments],
                env=environment,
                stdin=subprocess.PIPE,  # the server ends when this closes, however we end
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                wait_until_ready(f"http://127.0.0.1:{port}", process, Path(log.name))
                yield f"http://127.0.0.1:{port}"
            finally:
                process.stdin.close()
                process.wait(60)


def save(model: PreTrainedModel, directory: Path) -> str:
    """Writes a checkpoint, with a tokenizer that knows each number by its digits."""
    vocabulary = {str(number): number for number in range(model.config.vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(directory)
    model.save_pretrained(directory)
    return str(directory)


def wait_until_ready(server: str, process: subprocess.Popen[bytes], log: Path) -> None:
    print("starting vLLM, which is half a minute of imports ", end="", flush=True)
    limit = time.monotonic() + START_SECONDS
    with http() as session:
        while not is_healthy(session, server):
            if process.poll() is not None or time.monotonic() > limit:
                sys.exit(f"vLLM did not start:\n{log.read_text()[-3000:]}")
            print(".", end="", flush=True)
            time.sleep(1)
    print(" ready")


def is_healthy(session: requests.Session, server: str) -> bool:
    try:
        return session.get(f"{server}/health", timeout=5).ok
    except requests.RequestException:
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--server", help="URL of a vLLM server")
    where.add_argument("--start", action="store_true", help="start a tiny one on the CPU")
    parser.add_argument("--model", help="checkpoint that it serves; needed with --server")
    parser.add_argument("--colocated", action="store_true", help="it opens the trainer's memory")
    parser.add_argument("--device", default="cpu", help="where the trainer's model is")
    parser.add_argument("--rounds", type=int, default=4, help="rounds of training")
    args = parser.parse_args()
    if args.server and not args.model:
        parser.error("--server needs --model, the checkpoint that the server serves")
    if args.server:
        model = AutoModelForCausalLM.from_pretrained(args.model).to(args.device)
        run(model, args.server, args.rounds, args.colocated)
        return
    torch.set_num_threads(1)  # leave the other cores to the engine
    with started() as server:  # on other weights, so that the first refit shows
        run(tiny_llama(seed=1), server, args.rounds, args.colocated)


if __name__ == "__main__":
    main()
