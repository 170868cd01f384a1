"""Weights as an engine takes them: its dtype, its vocabulary, its quantisation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from weight_update.facts import Intake
from weight_update.weights.specs import Weight


@dataclass(frozen=True)
class Wishes:
    """What the user asked for.

    Attributes:
        dtype: Floating weights are cast to it; ``engine`` means the engine's, None none.
        trim_vocabulary: Rows beyond the engine's vocabulary are cut off.
        check_finite: Every floating value must be a number.
    """

    dtype: torch.dtype | Literal["engine"] | None = None
    trim_vocabulary: bool = False
    check_finite: bool = False


def fit(
    weights: Sequence[Weight], intake: Intake, wishes: Wishes, *, whole: bool
) -> tuple[Weight, ...]:
    """The weights as an engine takes them.

    Args:
        weights: As the checkpoint has them.
        intake: What the engine says of itself.
        wishes: What the user asked for.
        whole: Whether they are a whole model's.

    Raises:
        ConfigurationError: The engine cannot take them; the text has the reason and a way out.
        WeightMismatchError: Shapes, or values, are wrong.
    """
    return tuple(weights)
