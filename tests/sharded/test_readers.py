"""Who must read weights together is known before anything is read, and if the reading fails."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from weight_update.weights.shards.readers import readers_of


class Part(torch.Tensor):
    """A part of a tensor, as far as it can be told."""

    def full_tensor(self) -> torch.Tensor:
        raise AssertionError("nothing is read")


def test_whole_tensors_are_read_alone() -> None:
    assert readers_of(nn.Linear(1, 1), 3) == set()
    assert readers_of({"a": torch.ones(1)}, 3) == set()


def test_a_module_of_parts_is_read_together() -> None:
    model = nn.Linear(1, 1)
    model.weight = nn.Parameter(torch.ones(1, 1).as_subclass(Part))
    assert readers_of(model, 3) == {0, 1, 2}


def test_a_model_of_fsdp2_is_read_together_while_its_parameters_are_whole() -> None:
    class Gathered(nn.Linear, FSDPModule):
        """As ``fully_shard`` makes a class of a model's."""

        def __new__(cls, *arguments: int) -> Gathered:
            return nn.Linear.__new__(cls)

    assert readers_of(nn.Sequential(Gathered(1, 1)), 3) == {0, 1, 2}


def test_a_mapping_of_parts_is_read_together_whatever_else_is_in_it() -> None:
    parts = {"a": torch.ones(1).as_subclass(Part), "b": torch.ones(1), "no tensor": 3}
    assert readers_of(parts, 3) == {0, 1, 2}
