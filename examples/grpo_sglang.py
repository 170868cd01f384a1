"""GRPO with TorchRL's parts on samples of a live SGLang server that follows the trainer.

    python examples/grpo_sglang.py
    python examples/grpo_sglang.py --server http://a:30000 --server http://b:30000 --model DIR

Each step samples groups of answers from the server, compares the answers of a group with each
other, takes one pass of GRPO over them, and pushes the new weights. The push runs while the next
answers are sampled, so some are a version old and some are mixed: begun by the old weights and
ended by the new ones. Each token comes with the log-probability that its own version gave it, so
GRPO's ratios hold for them too. --max-lag 0 leaves them out, --on-policy waits for each push.

The task is one that a tiny model learns in a minute: say odd numbers after "numbers like 7" and
even ones after "numbers like 4". The script fails if the server's log-probabilities are not the
trainer's, and if the reward does not rise.

Without --server a reference engine is started in a process of its own; that needs
weight-update[demo]. Real servers must serve the checkpoint of --model. For a task of your own
change PROMPTS and reward_of().
"""

from __future__ import annotations

import argparse
import math
import re
from concurrent.futures import ThreadPoolExecutor

import torch
from tensordict import TensorDictBase, set_list_to_stack
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch.utils.data import DataLoader
from torchrl.collectors.llm import LLMCollector
from torchrl.data import (
    Composite,
    LazyStackStorage,
    ReplayBuffer,
    SamplerWithoutReplacement,
    Unbounded,
)
from torchrl.envs import EnvBase, StepCounter, Transform
from torchrl.envs.llm import ChatEnv
from torchrl.modules.llm import TransformersWrapper
from torchrl.objectives.llm import GRPOLoss, MCAdvantage
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from weight_update import (
    SGLangWeightSender,
    SGLangWeightSyncScheme,
    SGLangWrapper,
    UpdateReport,
    staleness,
)
from weight_update.reference_engine import ReferenceEngine

set_list_to_stack(True).set()  # TorchRL's chats want it: a list of strings is one a sample

PROMPTS = [f"numbers like {number}" for number in range(13)]
WORDS = ["<pad>", "numbers", "like", *map(str, range(13))]  # all that the tiny model knows
TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"
GROUP = 8  # answers to one prompt, compared with each other
GROUPS = 8  # prompts of a step, for each server
ANSWER_TOKENS = 6
LEARNING_RATE = 5e-3
# What is learned from; a sample's chats and texts would only be copied.
LEARNED = (
    "query",
    "tokens",
    "masks",
    "log_probs",
    "weight_versions",
    ("next", "reward"),
    ("next", "done"),
)


def reward_of(prompt: str, answer: str) -> float:
    """The share of an answer's numbers that are odd, or even, as the prompt's number is."""
    asked = int(re.findall(r"\d+", prompt)[-1])
    given = [int(number) for number in re.findall(r"\d+", answer)]
    return sum(number % 2 == asked % 2 for number in given) / max(len(given), 1)


class Reward(Transform):
    """Pays for each answer."""

    def __init__(self) -> None:
        super().__init__(out_keys=["reward"])

    def _step(self, answered: TensorDictBase, after: TensorDictBase) -> TensorDictBase:
        pairs = zip(answered["query"], answered["text"].response, strict=True)
        rewards = torch.tensor([reward_of(prompt, answer) for prompt, answer in pairs])
        return after.set("reward", rewards[:, None, None])  # as GRPOLoss has it: answer, token, 1

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:
        """Tells the environment of it."""
        reward_spec["reward"] = Unbounded((*reward_spec.shape, 1, 1))
        return reward_spec


def tiny_llama(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<pad>", pad_token="<pad>", chat_template=TEMPLATE
    )


def make_env(tokenizer: PreTrainedTokenizerBase, seed: int) -> EnvBase:
    """One turn a chat: a prompt, an answer, a reward. Each prompt is asked once a group member."""
    prompts = DataLoader(
        PROMPTS,
        batch_size=GROUPS,
        shuffle=True,
        collate_fn=lambda batch: {"query": batch},
        generator=torch.Generator().manual_seed(seed),
    )
    env = ChatEnv.from_dataloader(
        prompts, batch_size=(GROUPS * GROUP,), repeats=GROUP, tokenizer=tokenizer
    )
    env.append_transform(StepCounter(max_steps=1))
    env.append_transform(Reward())
    return env


def make_collector(
    server: str, tokenizer: PreTrainedTokenizerBase, seed: int, answer_tokens: int = ANSWER_TOKENS
) -> LLMCollector:
    """Samples from a server; each sample says which versions of the weights made it."""
    policy = SGLangWrapper(
        server,
        tokenizer=tokenizer,
        chat_template=tokenizer.chat_template or TEMPLATE,
        # Anything but a temperature of 1 would make log-probabilities that are not the policy's.
        generate_kwargs={"max_new_tokens": answer_tokens, "temperature": 1.0},
    )
    return LLMCollector(
        make_env(tokenizer, seed),
        policy=policy,
        dialog_turns_per_batch=GROUPS * GROUP,
        track_policy_version=True,
    )


def make_buffer() -> ReplayBuffer:
    """Holds the samples of a step, each with its advantage over its group."""
    return ReplayBuffer(
        storage=LazyStackStorage(10_000),
        sampler=SamplerWithoutReplacement(),
        batch_size=GROUPS * GROUP // 2,
        transform=MCAdvantage(grpo_size=GROUP),
    )


class Learner:
    """A model in training, with GRPO's loss and an optimizer."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        self.model = model.eval()  # no dropout: the server has none either
        actor = TransformersWrapper(model, tokenizer=tokenizer, input_mode="tokens", generate=False)
        self.loss = GRPOLoss(actor, masking_strategy="rlhf", entropy_bonus=False)
        self.optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)

    def step(self, samples: TensorDictBase) -> tuple[float, float]:
        """Learns from samples; returns how far the model was from those that made them.

        That is the effective sample size, 1 if there is no difference, and the KL divergence.
        """
        device = self.model.device
        loss = self.loss(samples if device.type == "cpu" else samples.to(device))
        self.optimizer.zero_grad()
        loss.loss_objective.backward()
        self.optimizer.step()
        return float(loss.ESS), float(loss.kl_approx)

    def one_pass(
        self, buffer: ReplayBuffer, version: int, max_lag: float
    ) -> list[tuple[float, float]]:
        """Takes a step on each minibatch, without what is older than ``max_lag`` updates."""
        fresh = (part[staleness(part, version) <= max_lag] for part in buffer)
        return [self.step(part) for part in fresh if len(part)]


def check_agreement(model: PreTrainedModel, passes: list[tuple[float, float]]) -> None:
    """Before anything was learned, server and trainer are one model and must agree."""
    if not passes:
        raise SystemExit("no sample says that it is fresh enough (SGLang 0.5.19 or later does)")
    ess, kl = passes[0]
    tolerance = 1e-4 if model.dtype == torch.float32 else 1e-2
    if not (ess > 0.99 and abs(kl) < tolerance):  # NaN is neither
        raise SystemExit(
            "the server's log-probabilities are not the trainer's (effective sample size "
            f"{ess:.4f}, KL {kl:.1e}): does it serve this model, and see these tokens?"
        )


def line_of(samples: TensorDictBase, ess: float, report: UpdateReport) -> str:
    """What a step shows: of the samples, and of the push that they were learned after."""
    lag = int(staleness(samples, report.version).max())  # of the oldest token, in updates
    known = str(lag) if lag <= report.version else "unknown"  # as of SGLang before 0.5.19
    mixed = int(samples["weight_versions", "mixed"].sum())
    return (
        f"reward {mean_reward(samples):.2f}  lag {known}  mixed {mixed} of {samples.numel()}  "
        f"ess {ess:.3f}  version {report.version}, paused {1e3 * report.seconds['paused']:.0f} ms"
    )


def mean_reward(samples: TensorDictBase) -> float:
    return float(samples["next", "reward"].mean())


def train(
    learner: Learner,
    sender: SGLangWeightSender,
    collectors: list[LLMCollector],
    *,
    steps: int,
    max_lag: float = math.inf,
    on_policy: bool = False,
) -> list[float]:
    """Samples, learns and pushes in turn; returns the mean reward of each step.

    Raises:
        WeightUpdateError: A push failed; it says what each server holds now.
    """
    buffer, streams, rewards = make_buffer(), [iter(each) for each in collectors], []
    push = sender.update_weights_async(snapshot=False)
    for step in range(1, steps + 1):
        if on_policy or step == 1:
            push.result()
        with ThreadPoolExecutor() as pool:  # all servers at the same time
            samples = torch.cat(list(pool.map(next, streams)))
        report = push.result()  # until here it reads the weights, which must not change
        buffer.extend(samples.select(*LEARNED))
        passes = learner.one_pass(buffer, report.version, max_lag)
        buffer.empty()
        if step == 1:
            check_agreement(learner.model, passes)
        push = sender.update_weights_async(snapshot=False)
        rewards.append(mean_reward(samples))
        ess = passes[0][0] if passes else math.nan
        print(f"step {step:3}  {line_of(samples, ess, report)}", flush=True)
    print(f"the last push:\n{push.result()}")
    return rewards


def check_rise(rewards: list[float], expected: float) -> None:
    """Compares the means of the first and of the last fifth of the steps."""
    some = max(len(rewards) // 5, 1)
    first, last = (sum(part) / some for part in (rewards[:some], rewards[-some:]))
    print(f"reward: first {first:.2f}, last {last:.2f}")
    if last - first < expected:
        raise SystemExit(f"the reward did not rise by {expected}")


def run(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    servers: list[str],
    args: argparse.Namespace,
) -> None:
    scheme = SGLangWeightSyncScheme(servers)
    with scheme.create_sender() as sender:  # leaving the block gives up the group on both ends
        sender.register_model(model)
        collectors = [make_collector(url, tokenizer, args.seed) for url in servers]
        for collector in collectors:
            sender.register_collector(collector)  # its policy_version counts the pushes
        chosen = {"steps": args.steps, "max_lag": args.max_lag, "on_policy": args.on_policy}
        rewards = train(Learner(model, tokenizer), sender, collectors, **chosen)
        print(f"pushes that each collector counted: {[c.policy_version for c in collectors]}")
    check_rise(rewards, args.expect_rise)


def parsed() -> argparse.Namespace:
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    add = parser.add_argument
    add("--server", action="append", default=[], help="URL of a server; repeat it for several")
    add("--model", help="checkpoint that the servers serve; its folder has the tokenizer too")
    add("--device", default="cpu", help="where the trainer's model is (cpu)")
    add("--steps", type=int, default=25, help="how often to sample, learn and push (25)")
    add("--on-policy", action="store_true", help="end each push before the next answers begin")
    add("--max-lag", type=float, default=math.inf, help="leave out what is more updates behind")
    add("--expect-rise", type=float, default=0.15, help="fail if the reward rises less (0.15)")
    add("--seed", type=int, default=0, help="of the trainer; servers draw with seeds of their own")
    args = parser.parse_args()
    if bool(args.server) != bool(args.model):
        parser.error(
            "--server needs --model, the checkpoint that it serves, and --model a --server"
        )
    if args.steps < 1:
        parser.error("--steps must be one or more")
    return args


def main() -> None:
    args = parsed()
    torch.manual_seed(args.seed)
    if args.server:
        try:
            model = AutoModelForCausalLM.from_pretrained(args.model).to(args.device)
            tokenizer = AutoTokenizer.from_pretrained(args.model)
        except OSError as error:
            raise SystemExit(f"--model {args.model} cannot be loaded: {error}") from error
        run(model, tokenizer, args.server, args)
        return
    torch.set_num_threads(1)  # leave the other cores to the engine
    with ReferenceEngine(tiny_llama(args.seed + 1)) as engine:  # other weights than the trainer's
        run(tiny_llama(args.seed), tiny_tokenizer(), [engine.url], args)


if __name__ == "__main__":
    main()
