"""Environments and policies that workers and actors make for themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import requests
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.data import Composite, Unbounded
from torchrl.envs import EnvBase


class Idle(EnvBase):
    """An environment in which nothing happens."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_spec = Composite(observation=Unbounded(1))
        self.action_spec = Unbounded(1)
        self.reward_spec = Unbounded(1)

    def _reset(self, tensordict: TensorDictBase | None = None, **_: Any) -> TensorDictBase:
        return TensorDict({"observation": torch.zeros(1)})

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        done = torch.zeros(1, dtype=torch.bool)
        out = {"observation": torch.zeros(1), "reward": torch.zeros(1), "done": done}
        return TensorDict(out)

    def _set_seed(self, seed: int | None) -> None:
        pass


def client() -> TensorDictModule:
    """A policy without parameters, as a client of an inference engine is."""
    return TensorDictModule(lambda seen: seen + 1, in_keys=["observation"], out_keys=["action"])


def layer() -> TensorDictModule:
    """A policy with parameters."""
    return TensorDictModule(nn.Linear(1, 1), in_keys=["observation"], out_keys=["action"])


class Asking(nn.Module):
    """A policy whose actions are the version that a server answers with."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.url = url

    def forward(self, seen: torch.Tensor) -> torch.Tensor:
        body = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 1}}
        answer = requests.post(f"{self.url}/generate", json=body, timeout=60).json()
        return torch.full_like(seen, float(answer["meta_info"]["weight_version"]))


def asking(url: str) -> Callable[[], TensorDictModule]:
    """Makes policies that ask a server."""
    return lambda: TensorDictModule(Asking(url), in_keys=["observation"], out_keys=["action"])
