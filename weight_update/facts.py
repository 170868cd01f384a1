"""What an engine says of itself: plain data that engines make and the update procedure reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Sighting:
    """What an engine shows without being touched.

    Attributes:
        label: Its version label; None when it shows none.
        ready: Whether it generates; False while it is paused, None when it does not say.
        instance: Something that every start of the server makes anew; None when it shows none.
        ungrouped: Another trainer has updated it since, and it is in that one's group alone.
    """

    label: str | None = None
    ready: bool | None = None
    instance: str | None = None
    ungrouped: bool = False


@dataclass(frozen=True)
class NameCheck:
    """Names of a push against those that an engine can load.

    Attributes:
        known: Whether the engine's names could be known at all.
        unknown: Names that it would ignore.
        lacking: Weights of its own that the push does not bring; they would stay old.
        remark: What else there is to say of them.
    """

    known: bool = False
    unknown: tuple[str, ...] = ()
    lacking: tuple[str, ...] = ()
    remark: str = ""


@dataclass(frozen=True)
class Part:
    """Which part of a weight a rank holds.

    Attributes:
        dim: The dimension that is divided; None when the rank holds all of it.
        start: First index along it.
        length: How many.
    """

    dim: int | None = None
    start: int = 0
    length: int = 0


@dataclass(frozen=True)
class Digests:
    """Digests of the weights that an engine holds, rank by rank.

    Attributes:
        ranks: For each rank, digest by the engine's own name of the weight.
        parts: For each rank, by name, which part of the weight of that name in the checkpoint
            was digested: the SHA-256 of its bytes in row order, in ``dtype``. None where the
            digests compare with those of other engines only.
        dtype: Torch name of the dtype that the engine keeps, such as ``float32``.
    """

    ranks: tuple[Mapping[str, str], ...]
    parts: tuple[Mapping[str, Part], ...] | None = None
    dtype: str | None = None


@dataclass(frozen=True)
class Intake:
    """How an engine takes weights, as far as it says.

    Attributes:
        architectures: Of the model that it serves.
        dtype: Torch name of the dtype that it computes with, such as ``bfloat16``.
        vocabulary: Rows of its embedding.
        quantization: How its weights are quantised, by the engine's own word; None when not.
        block: Rows and columns that share a scale in an fp8 block-quantised engine.
        scaled: Names of the weights that its checkpoint holds with scales; None when unknown.
        unconverted: Modules that its configuration leaves as they were.
        requantises: It processes quantised weights anew after an update.
        drafts: It runs a draft model beside the one that is served.
        partial_modules: It takes some of the weights that it fuses into one, and keeps the
            others as they were.
        whole_layers: It makes each layer anew of what an update brought for it, in whichever
            requests: what an update lacks of a layer is garbage then.
        any_shape: A push may bring other shapes than the one before.
        shapes: Of the weights in its model's folder, by name; empty when unknown.
        offline: Why it takes no weights from a group, in words; None when it does.
        free_bytes: Memory that it has free for an update; None when it does not say.
        nccl: Settings of NCCL that it makes where its environment has none.
        unread: Its model's folder cannot be read here, so it may be quantised without a word.
    """

    architectures: tuple[str, ...] = ()
    dtype: str | None = None
    vocabulary: int | None = None
    quantization: str | None = None
    block: tuple[int, int] | None = None
    scaled: frozenset[str] | None = None
    unconverted: tuple[str, ...] = ()
    requantises: bool = False
    drafts: bool = False
    partial_modules: bool = True
    whole_layers: bool = False
    any_shape: bool = False
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict, repr=False)
    offline: str | None = None
    free_bytes: int | None = None
    nccl: Mapping[str, str] = field(default_factory=dict)
    unread: bool = False
