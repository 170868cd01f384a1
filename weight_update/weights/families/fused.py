"""Weights that engines put together into one: which belong together, and which sets are whole.

Some loaders keep the first half of such a set in a variable of one call, so that a half that
comes with another request is lost; others fill the place of a missing half with garbage.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from types import MappingProxyType

from weight_update.errors import some_of

# What a module is called, and what engines fuse it into. Read in the stacked parameters of
# SGLang's and vLLM's model classes; a set is the whole of a fusion, and so may be larger than
# what one model has of it.
_FUSED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "qkv": (
            *("q_proj", "k_proj", "v_proj", "q", "k", "v", "query", "key", "value"),
            *("wq", "wk", "wv", "query_proj", "key_proj", "value_proj"),
            *("b_proj", "f_a_proj", "g_a_proj"),  # delta attention fuses these with q, k, v
            "weights_proj",  # an indexer's, beside its wk
        ),
        "qkv_a": ("q_a_proj", "kv_a_proj_with_mqa", "kv_a_proj", "wq_a", "wkv", "wkv_a"),
        "qkv_conv": ("q_conv1d", "k_conv1d", "v_conv1d"),
        "fg_b": ("f_b_proj", "g_b_proj"),
        "gate_up": ("gate_proj", "up_proj", "w1", "w2", "w3", "c_fc_0", "c_fc_1"),
        "index_qkv": ("index_q_proj", "index_k_proj", "index_v_proj"),
        "in_qkvz": ("in_proj_qkv", "in_proj_z", "in_proj_q", "in_proj_k", "in_proj_v"),
        "in_ba": ("in_proj_b", "in_proj_a"),
    }
)
_FUSION_OF = {module: fusion for fusion, modules in _FUSED.items() for module in modules}
_EXPERTS = ".experts."
# Members that a model never has without the others, and the others.
_TOGETHER = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("q", "k", "v"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("in_proj_qkv", "in_proj_z"),
    ("in_proj_b", "in_proj_a"),
    ("q_conv1d", "k_conv1d", "v_conv1d"),
)
_LATENT = ("q_a_proj", "kv_a_proj_with_mqa")
# Beside these, a q_proj has neither k_proj nor v_proj.
_COMPRESSED = ("kv_a_proj_with_mqa", "kv_b_proj")


def group_of(name: str) -> str | None:
    """The group whose members must reach an engine in one request; None for a weight alone.

    A weight and the scales that it was quantised with are a group of their own, where they are
    in none with others.

    Example:
        >>> group_of("model.layers.0.self_attn.q_proj.bias")
        'model.layers.0.self_attn.qkv'
        >>> group_of("model.layers.3.mlp.experts.17.up_proj.weight_scale_inv")
        'model.layers.3.mlp.experts.17'
        >>> group_of("model.layers.0.self_attn.o_proj.weight_scale_inv")
        'model.layers.0.self_attn.o_proj'
        >>> group_of("model.norm.bias") is None
        True
    """
    module, _, leaf = name.rpartition(".")
    place = module.find(_EXPERTS)
    if place >= 0:
        end = module.find(".", place + len(_EXPERTS))
        expert = module if end < 0 else module[:end]
        if expert[place + len(_EXPERTS) :].isdecimal():
            return expert
    parent, dot, own = module.rpartition(".")
    fusion = _FUSION_OF.get(own)
    if fusion is not None:
        return f"{parent}{dot}{fusion}"
    return module if module and (leaf == "weight" or "scale" in leaf) else None


def set_of(group: str) -> str | None:
    """The experts of the layer that an expert belongs to; None for another group.

    Example:
        >>> set_of("model.layers.3.mlp.experts.17")
        'model.layers.3.mlp.experts'
        >>> set_of("model.layers.0.self_attn.qkv") is None
        True
    """
    experts, _, number = group.rpartition(".")
    return experts if number.isdecimal() and experts.endswith(_EXPERTS[:-1]) else None


@dataclass(frozen=True)
class Torn:
    """A set that engines fuse and that a push brings in part.

    Attributes:
        group: What its members become.
        given: Those that are there.
        lacking: Those that are not.
        halves_are_lost: No engine takes it in parts.
    """

    group: str
    given: tuple[str, ...]
    lacking: tuple[str, ...]
    halves_are_lost: bool = False

    def __str__(self) -> str:
        return f"{some_of(self.given)} without {some_of(self.lacking)}"


def incomplete(
    names: Iterable[str], known_names: Iterable[str] | None = None, *, layers: bool = False
) -> list[Torn]:
    """The sets that engines fuse and that ``names`` bring in part.

    Args:
        names: Of a push that may hold some weights only.
        known_names: Of the whole model. What they do not tell, and without them every set, is
            judged by what models of its kind always have.
        layers: Whether all weights of a layer are a set, its bias too.

    Example:
        >>> print(*incomplete(["a.q_proj.weight", "a.k_proj.weight"]))
        'a.q_proj.weight', 'a.k_proj.weight' without 'a.v_proj.weight'
        >>> incomplete(["a.q_proj.weight"], known_names=["a.q_proj.weight", "norm.weight"])
        []
        >>> print(*incomplete(["a.norm.bias"], layers=True))
        'a.norm.bias' without 'a.norm.weight'
    """
    names = list(names)
    given = _sets(names, layers=layers)
    known = _sets(known_names or (), layers=layers)
    modules = {name.rpartition(".")[0] for name in names}
    expected = {
        group: known.get(group) or _usual(members, modules, layers=layers)
        for group, members in given.items()
    }
    return [
        Torn(group, tuple(members), tuple(lacking), _is_latent(group))
        for group, members in given.items()
        if (lacking := [name for name in expected[group] if name not in members])
    ]


def _sets(names: Iterable[str], *, layers: bool) -> dict[str, dict[str, None]]:
    """The members of every set, in order; all experts of a layer are one set."""
    sets: dict[str, dict[str, None]] = defaultdict(dict)
    for name in names:
        group = group_of(name) or (_layer_of(name) if layers else None)
        if group is not None:
            sets[set_of(group) or group][name] = None
    return sets


def _layer_of(name: str) -> str | None:
    """The layer of a weight; experts that are one tensor already are judged by nobody."""
    layer = name.rpartition(".")[0]
    return layer if layer and not layer.endswith(_EXPERTS[:-1]) else None


def _usual(members: Iterable[str], modules: Set[str], *, layers: bool) -> list[str]:
    """What models always have beside these members."""
    usual: dict[str, None] = {}
    for name in members:
        module, _, leaf = name.rpartition(".")
        if layers and leaf == "bias":
            usual[f"{module}.weight"] = None
        parent, dot, own = module.rpartition(".")
        for beside in _beside(own, parent + dot, modules):
            usual[f"{parent}{dot}{beside}.{leaf}"] = None
    return list(usual)


def _beside(own: str, place: str, modules: Set[str]) -> tuple[str, ...]:
    """The modules that never are without another one of theirs."""
    if own == "q_proj" and any(place + module in modules for module in _COMPRESSED):
        return ()
    if own in _LATENT:
        return () if place + "q_proj" in modules else _LATENT
    return next((together for together in _TOGETHER if own in together), ())


def _is_latent(group: str) -> bool:
    return group.rpartition(".")[2] == "qkv_a"
