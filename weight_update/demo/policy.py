"""The policy: a tiny Llama, its policy-gradient step, and its greedy output."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from weight_update.demo.sampler import Sample
from weight_update.demo.task import OUTPUT_TOKENS, VOCABULARY, token_rewards

LEARNING_RATE = 3e-3
CLIP = 0.2
ENTROPY_BONUS = 0.01


def make_model(seed: int) -> Any:
    """Build the policy's transformers model with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).eval()


def save_checkpoint(model: Any, directory: Path) -> None:
    """Write the model and a tokenizer of one word a token: SGLang starts with no less."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    model.save_pretrained(directory)
    _tokenizer().save_pretrained(directory)


def _tokenizer() -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = {f"{token:x}": token for token in range(VOCABULARY)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="f"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="f")


class Policy:
    """What is trained: a model and its optimizer.

    Args:
        seed: Seed of the first weights.
    """

    def __init__(self, seed: int) -> None:
        self.model = make_model(seed)
        self._optimizer = torch.optim.Adam(self.model.parameters(), lr=LEARNING_RATE)

    def learn(self, samples: Sequence[Sample]) -> None:
        """Take one policy-gradient step on samples of an engine."""
        rewards = torch.tensor([token_rewards(s.prompt, s.output) for s in samples])
        sampled = torch.tensor([sample.logprobs for sample in samples])
        logprobs = all_logprobs(self.model, samples)
        entropy = -(logprobs.exp() * logprobs).sum(-1).mean()
        surrogate = clipped_loss(of_tokens(logprobs, samples), sampled, advantages(rewards))
        loss = surrogate - ENTROPY_BONUS * entropy
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()

    def greedy(self, prompt: Sequence[int]) -> tuple[int, ...]:
        """What the trainer's own weights say after a prompt, greedily."""
        ids = torch.tensor([list(prompt)])
        output = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=OUTPUT_TOKENS,
            do_sample=False,
        )
        return tuple(output[0, len(prompt) :].tolist())


def advantages(rewards: torch.Tensor) -> torch.Tensor:
    """How much better than the batch's mean each token did, in standard deviations.

    A token is paid for itself only: whether the next one is right depends on what it follows,
    not on whether that was right.
    """
    centred = rewards - rewards.mean()
    return centred / (centred.std() + 1e-6)


def clipped_loss(
    logprobs: torch.Tensor, sampled: torch.Tensor, advantage: torch.Tensor
) -> torch.Tensor:
    """The clipped policy-gradient loss.

    Samples lag behind the policy by an update or two, so each token is weighted by how much
    likelier it has become since the engine sampled it, within limits.

    Args:
        logprobs: The policy's log-probabilities of the tokens.
        sampled: The engine's, when it sampled them.
        advantage: How much better than usual each token was.
    """
    ratio = (logprobs - sampled).exp()
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
    return -torch.minimum(ratio * advantage, clipped * advantage).mean()


def all_logprobs(model: Any, samples: Sequence[Sample]) -> torch.Tensor:
    """Log-probabilities of every token at each place of the outputs."""
    prompt = len(samples[0].prompt)
    ids = torch.tensor([[*sample.prompt, *sample.output] for sample in samples])
    logits = model(input_ids=ids, use_cache=False).logits[:, prompt - 1 : -1]
    return F.log_softmax(logits, dim=-1)


def of_tokens(logprobs: torch.Tensor, samples: Sequence[Sample]) -> torch.Tensor:
    """Those of the tokens that were sampled."""
    tokens = torch.tensor([sample.output for sample in samples])
    return logprobs.gather(-1, tokens[..., None])[..., 0]
