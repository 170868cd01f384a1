"""Names on the wire are the bare model's, however the trainer wraps it (C15)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from weight_update.weights.extract import get_model_metadata
from weight_update.weights.names import bare_name, unwrap


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(2, 3)
        self.down = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x))


def small_model() -> nn.Module:
    return nn.Sequential(Block(), Block())


def with_compiled_layer(model: nn.Module) -> nn.Module:
    model[0].up = torch.compile(model[0].up)
    return model


def with_checkpointed_layers(model: nn.Module) -> nn.Module:
    model[0] = checkpoint_wrapper(model[0])
    model[1].down = checkpoint_wrapper(model[1].down)
    return model


def with_compiled_checkpointed_layer(model: nn.Module) -> nn.Module:
    model[1] = torch.compile(checkpoint_wrapper(model[1]))
    return model


@pytest.fixture
def default_group() -> Iterator[None]:
    """DDP wants a default group, of one rank here."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


ddp = nn.parallel.DistributedDataParallel

WRAPPERS = {
    "nothing": lambda m: m,
    "DataParallel": nn.DataParallel,
    "compile": torch.compile,
    "DDP": ddp,
    "compile(DDP)": lambda m: torch.compile(ddp(m)),
    "DDP(compile)": lambda m: ddp(torch.compile(m)),
    "DDP(DataParallel(compile))": lambda m: ddp(nn.DataParallel(torch.compile(m))),
    "compiled layer": with_compiled_layer,
    "checkpointed layers": with_checkpointed_layers,
    "compiled checkpointed layer": with_compiled_checkpointed_layer,
    "DDP(checkpointed layers)": lambda m: ddp(with_checkpointed_layers(m)),
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS.keys())
@pytest.mark.usefixtures("default_group")
def test_a_wrapped_model_has_the_names_of_the_bare_one(
    wrap: Callable[[nn.Module], nn.Module],
) -> None:
    bare = get_model_metadata(small_model())

    assert get_model_metadata(wrap(small_model())) == bare
    assert list(bare)[:2] == ["0.up.weight", "0.up.bias"]


def test_a_true_child_called_module_keeps_its_name() -> None:
    model = nn.Module()
    model.module = nn.Linear(1, 1)

    assert list(get_model_metadata(model)) == ["module.weight", "module.bias"]
    assert list(get_model_metadata(nn.DataParallel(model))) == ["module.weight", "module.bias"]


class Policy(nn.Module):
    """A policy class that holds the language model as an attribute."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.language_model = model


@pytest.mark.parametrize(
    "hold",
    [
        Policy,
        lambda m: Policy(Policy(m)),
        lambda m: Policy(torch.compile(m)),
        lambda m: torch.compile(Policy(m)),
    ],
    ids=["policy", "policy(policy)", "policy(compile)", "compile(policy)"],
)
def test_a_policy_that_holds_a_language_model_has_the_names_of_that_model(
    make_llama, hold: Callable[[nn.Module], nn.Module]
) -> None:
    assert get_model_metadata(hold(make_llama())) == get_model_metadata(make_llama())


def test_a_policy_with_weights_of_its_own_keeps_all_its_names(make_llama) -> None:
    policy = Policy(make_llama())
    policy.value_head = nn.Linear(16, 1)

    names = list(get_model_metadata(policy))

    assert "value_head.weight" in names
    assert "language_model.lm_head.weight" in names


@pytest.mark.parametrize(
    ("name", "bare"),
    [
        ("weight", "weight"),
        ("_orig_mod.weight", "weight"),
        ("a._orig_mod._checkpoint_wrapped_module.b.weight", "a.b.weight"),
        ("_fsdp_wrapped_module.a._fsdp_wrapped_module.weight", "a.weight"),
        ("module.weight", "module.weight"),
        ("a_orig_mod.weight", "a_orig_mod.weight"),
    ],
)
def test_only_whole_segments_of_wrappers_leave_a_name(name: str, bare: str) -> None:
    assert bare_name(name) == bare


def test_unwrapping_a_bare_module_gives_the_module_itself() -> None:
    model = small_model()

    assert unwrap(model) is model
