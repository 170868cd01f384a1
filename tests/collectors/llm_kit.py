"""Dialogues with an engine: a tokenizer, an environment, TorchRL's collector and our policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack, set_list_to_stack
from torch.utils.data import DataLoader
from torchrl.collectors.llm import LLMCollector
from torchrl.data import Composite, Unbounded
from torchrl.data.llm import History
from torchrl.envs import Transform
from torchrl.envs.llm import DatasetChatEnv
from torchrl.envs.llm.transforms import PolicyVersion

from tests.engines.models import tiny_tokenizer
from weight_update.collectors.sglang_wrapper import SGLangWrapper

ENVS = 4
RAGGED = ["w11 w12", "w13", "w14 w15 w16", "w17"]


# A conversation is its messages one after the other.
TEMPLATE = "{% for message in messages %}{{ message['content'] + ' ' }}{% endfor %}"


class Judge(Transform):  # type: ignore[misc]
    """Rewards the share of even tokens, and ends a dialogue after some turns."""

    def __init__(self, turns: int = 1) -> None:
        super().__init__()
        self.turns, self.turn = turns, 0

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        self.turn += 1
        shares = [(1 - s["tokens"].response % 2).float().mean() for s in tensordict.unbind(0)]
        next_tensordict["reward"] = torch.stack(shares)[:, None, None]
        done = torch.full((len(shares), 1), self.turn % self.turns == 0)
        next_tensordict.update({"done": done, "terminated": done.clone()})
        return next_tensordict

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:
        reward_spec["reward"] = Unbounded(shape=(*reward_spec.shape, 1, 1))
        return reward_spec


def dialogues(turns: int = 1, repeats: int = 1) -> Any:
    """An environment of ragged questions."""
    set_list_to_stack(True).set()
    loader = DataLoader(
        [{"query": text} for text in RAGGED],  # type: ignore[arg-type]
        batch_size=1,
        collate_fn=lambda items: {"query": [item["query"] for item in items]},
    )
    env = DatasetChatEnv.from_dataloader(
        loader,
        batch_size=(ENVS,),
        repeats=repeats,
        tokenizer=tiny_tokenizer(),
        input_mode="history",
    )
    return env.append_transform(Judge(turns))


def policy(engine: Any, max_new_tokens: int = 5, **options: Any) -> SGLangWrapper:
    """Ours, sampling at temperature 1 and as far as it is told to."""
    kwargs = {"max_new_tokens": max_new_tokens, "temperature": 1.0, "ignore_eos": True}
    usual = {"tokenizer": tiny_tokenizer(), "chat_template": TEMPLATE, "generate_kwargs": kwargs}
    return SGLangWrapper(engine, **{**usual, **options})


def collector(actor: Any, turns: int = 1, **options: Any) -> LLMCollector:
    """TorchRL's, with an integer version."""
    settings = {"dialog_turns_per_batch": ENVS, "track_policy_version": PolicyVersion("int")}
    env = options.pop("env", None) or dialogues(turns)
    return LLMCollector(env, policy=actor, **{**settings, **options})


def asked(texts: Sequence[str] = RAGGED, mode: str = "history") -> TensorDictBase:
    """A batch of prompts in the words of an input mode."""
    if mode == "tokens":
        ids = [torch.tensor(tiny_tokenizer().encode(text)) for text in texts]
        return lazy_stack([TensorDict({"tokens": {"prompt": prompt}}) for prompt in ids])
    prompt = list(texts) if mode == "text" else histories(texts)
    batch = {mode: TensorDict({"prompt": prompt}, batch_size=[len(texts)])}
    return TensorDict(batch, batch_size=[len(texts)])


def histories(texts: Sequence[str]) -> History:
    """One conversation a text, of one message."""
    shape = [len(texts), 1]
    return History(
        role=[["user"]] * len(texts), content=[[text] for text in texts], batch_size=shape
    )


class Told:
    """Passes on what an engine answers, and keeps it."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.answers: list[dict[str, Any]] = []

    def generate(self, **request: Any) -> Any:
        answer = self.engine.generate(**request)
        self.answers.append({**answer, "prompt": request["input_ids"]})
        return answer
