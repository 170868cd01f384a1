"""A GRPO loop in the shape of TorchRL's, sampling from a live inference server.

    python examples/torchrl_grpo_loop.py
    python examples/torchrl_grpo_loop.py --server http://a:30000 --model DIR --steps 100

Without ``--server`` a reference engine is started; it needs ``weight-update[demo]``. A real
server must serve the checkpoint that ``--model`` names.
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from typing import Any

import requests
import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from weight_update import SGLangWeightSender, SGLangWeightSyncScheme, get_model_metadata
from weight_update.reference_engine import ReferenceEngine

WORDS, ANSWER = 16, 6  # the vocabulary; tokens of an answer
PROMPTS = [[word] for word in range(8)]
GROUP = 16  # samples of a prompt, compared with each other
CLIP, LEARNING_RATE, MINIBATCH = 0.2, 3e-3, 64


def tiny_llama(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config)


def rewards_of(tokens: torch.Tensor) -> torch.Tensor:
    """The task is to echo: the share of an answer that equals the prompt's last word."""
    prompt, answer = tokens[:, :-ANSWER], tokens[:, -ANSWER:]
    return (answer == prompt[:, -1:]).float().mean(-1)


def advantages_of(rewards: torch.Tensor) -> torch.Tensor:
    """How much better than its group each sample did, in the group's standard deviations."""
    groups = rewards.view(-1, GROUP)
    spread = groups.std(-1, keepdim=True) + 1e-4
    return ((groups - groups.mean(-1, keepdim=True)) / spread).flatten()


class Collector:
    """Takes groups of samples from a server and stamps each token with its policy version.

    The stamp is the server's own word, ``weight_versions``: a request that was running during
    an update has tokens of both policies. ``policy_version`` counts the updates since this
    collector was registered with the sender, which calls :meth:`increment_version`.
    """

    def __init__(self, server: str) -> None:
        self.policy_version = 0
        self._url = f"{server}/generate"
        self._session = requests.Session()
        self._session.trust_env = False  # a server of this cluster: past any proxy

    def increment_version(self) -> None:
        """Count an update; every server has the new weights and none generates yet."""
        self.policy_version += 1

    def collect(self) -> TensorDict:
        """Ask for one group of samples a prompt."""
        prompts = [prompt for prompt in PROMPTS for _ in range(GROUP)]
        sampling = {"max_new_tokens": ANSWER, "temperature": 1.0, "ignore_eos": True}
        body = {"input_ids": prompts, "sampling_params": sampling, "return_logprob": True}
        response = self._session.post(self._url, json=body, timeout=300)
        response.raise_for_status()
        answers = zip(prompts, response.json(), strict=True)
        return torch.stack([sample_of(prompt, answer) for prompt, answer in answers])


def sample_of(prompt: list[int], answer: dict[str, Any]) -> TensorDict:
    meta = answer["meta_info"]
    version = torch.empty(ANSWER, dtype=torch.long)
    # Releases before token spans know the last version of a request only.
    whole = {"version": meta["weight_version"], "start": 0, "end": ANSWER}
    for span in meta.get("weight_versions", [whole]):
        version[span["start"] : span["end"]] = int(span["version"])
    logprobs = [entry[0] for entry in meta["output_token_logprobs"]]
    return TensorDict(
        tokens=torch.tensor(prompt + answer["output_ids"]),
        sampled_logprobs=torch.tensor(logprobs),
        policy_version=version,
    )


def grpo_loss(model: PreTrainedModel, batch: TensorDict) -> torch.Tensor:
    tokens = batch["tokens"]
    logits = model(input_ids=tokens).logits[:, -ANSWER - 1 : -1]
    logprobs = logits.log_softmax(-1).gather(-1, tokens[:, -ANSWER:, None])[..., 0]
    ratio = (logprobs - batch["sampled_logprobs"]).exp()
    advantage = batch["advantage"][:, None]
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage).mean()


def train(
    model: PreTrainedModel, sender: SGLangWeightSender, collector: Collector, steps: int
) -> list[float]:
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    size = len(PROMPTS) * GROUP
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(size), sampler=SamplerWithoutReplacement(), batch_size=MINIBATCH
    )
    history = []
    for step in range(1, steps + 1):
        samples = collector.collect()
        rewards = rewards_of(samples["tokens"])
        samples["advantage"] = advantages_of(rewards)
        lag = int((sender.version - samples["policy_version"]).max())  # in updates; 0: on policy
        buffer.extend(samples)
        for minibatch in buffer:  # one pass
            optimizer.zero_grad()
            grpo_loss(model, minibatch).backward()
            optimizer.step()
        buffer.empty()
        report = sender.update_weights()
        history.append(float(rewards.mean()))
        print(
            f"step {step:3}  reward {history[-1]:.3f}  lag {lag}  version {report.version} "
            f"in {1e3 * report.seconds['paused']:.0f} ms"
        )
    return history


def run(model: PreTrainedModel, servers: list[str], steps: int) -> None:
    scheme = SGLangWeightSyncScheme(servers, strategy="state_dict")
    sender = scheme.create_sender()
    try:
        sender.register_model(model)
        sender.init_all_workers_group(get_model_metadata(model))
        sender.update_weights()  # the servers start from the trainer's weights
        collector = Collector(servers[0])
        sender.register_collector(collector)
        history = train(model, sender, collector, steps)
    finally:
        sender.shutdown()  # gives up the group on both ends
    print(f"reward: first {history[0]:.3f}, last {history[-1]:.3f}")
    print(f"updates counted by the collector: {collector.policy_version} of {steps}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--server", action="append", help="URL of a server; repeatable")
    parser.add_argument("--model", help="checkpoint that the servers serve; needed with --server")
    parser.add_argument("--steps", type=int, default=30)
    args = parser.parse_args()
    if args.server and not args.model:
        parser.error("--server needs --model, the checkpoint that the servers serve")
    model = AutoModelForCausalLM.from_pretrained(args.model) if args.model else tiny_llama(seed=0)
    if not args.server:
        torch.set_num_threads(1)  # leave the other cores to the engine
    with nullcontext() if args.server else ReferenceEngine(tiny_llama(seed=1)) as engine:
        run(model, args.server or [engine.url], args.steps)


if __name__ == "__main__":
    main()
