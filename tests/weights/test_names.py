"""Names on the wire are the bare model's, however the trainer wraps it (C15)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from tensordict import TensorDict
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
)
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel
from torchrl.modules import (
    ActorCriticOperator,
    ActorCriticWrapper,
    ActorValueOperator,
    LMHeadActorValueOperator,
    ValueOperator,
)
from torchrl.modules.llm import TransformersWrapper
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForSequenceClassification,
)

from weight_update import ConfigurationError
from weight_update.weights.extract import extract_weights, get_model_metadata
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
    policy.projector = nn.Linear(8, 16)

    names = list(get_model_metadata(policy))

    assert "projector.weight" in names
    assert "language_model.lm_head.weight" in names


# -- policies and their critics -----------------------------------------------------------


class ValueHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.1)
        self.summary = nn.Linear(16, 8)
        self.out = nn.Linear(8, 1)


class ModelWithValueHead(nn.Module):
    """The shape that TRL gives a policy: the model, and a value head beside it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.pretrained_model = model
        self.v_head = ValueHead()


class ActorCritic(nn.Module):
    def __init__(self, actor: nn.Module, critic: nn.Module) -> None:
        super().__init__()
        self.actor = actor
        self.critic = critic


def with_score(model: nn.Module) -> nn.Module:
    policy = Policy(model)
    policy.score = nn.Linear(16, 1)
    return policy


POLICIES = {
    "v_head": ModelWithValueHead,
    "DataParallel(v_head(compile))": lambda m: nn.DataParallel(
        ModelWithValueHead(torch.compile(m))
    ),
    "a critic of its own": lambda m: ActorCritic(m, nn.Sequential(nn.Linear(16, 8), nn.Tanh())),
    "a head of one number": with_score,
    "a list": lambda m: nn.ModuleList([nn.ModuleDict({"net": m}), nn.Linear(16, 1)]),
    "checkpoint_wrapper": checkpoint_wrapper,
    "policy(checkpoint_wrapper)": lambda m: Policy(checkpoint_wrapper(m)),
    "the same model twice": lambda m: ActorCritic(m, torch.compile(m)),
}


@pytest.mark.parametrize("hold", POLICIES.values(), ids=POLICIES.keys())
def test_the_policy_is_found_and_its_value_head_left_out(
    make_llama, hold: Callable[[nn.Module], nn.Module]
) -> None:
    assert get_model_metadata(hold(make_llama())) == get_model_metadata(make_llama())


def test_a_base_model_beside_its_own_peft_model_is_no_other_candidate(make_llama) -> None:
    base = make_llama()
    adapted = get_peft_model(base, LoraConfig(target_modules=["q_proj"]))

    assert unwrap(ActorCritic(base, adapted)) is adapted


def critic(**more: int) -> nn.Module:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "vocab_size": 32, "num_labels": 1}
    return LlamaForSequenceClassification(LlamaConfig(**sizes, **heads, **more))


@pytest.mark.parametrize(
    ("second", "kind"),
    [
        (critic, "LlamaForSequenceClassification"),
        (lambda: nn.Sequential(critic().model, nn.Linear(16, 1)), "LlamaModel"),
        (lambda: nn.DataParallel(critic()), "LlamaForSequenceClassification"),
    ],
    ids=["critic", "trunk and head", "wrapped critic"],
)
def test_several_language_models_are_ambiguous_and_all_are_named(
    make_llama, second: Callable[[], nn.Module], kind: str
) -> None:
    with pytest.raises(ConfigurationError, match="holds 2 language models") as failure:
        get_model_metadata(nn.DataParallel(ActorCritic(make_llama(), second())))

    assert "actor (LlamaForCausalLM)" in str(failure.value)
    assert f"({kind})" in str(failure.value)
    assert "pass the one that the engines serve" in failure.value.remedy
    assert failure.value.phase == "plan"


def test_a_trunk_and_a_head_that_are_held_apart_have_the_names_of_the_whole(make_llama) -> None:
    whole = make_llama()
    policy = ActorCritic(whole.model, nn.Linear(16, 1))
    policy.head = whole.lm_head

    assert get_model_metadata(policy) == get_model_metadata(whole)


def test_a_head_of_another_width_is_not_taken_for_the_trunks(make_llama) -> None:
    policy = Policy(make_llama().model)
    policy.classifier = nn.Linear(16, 5)

    assert "classifier.weight" in get_model_metadata(policy)


# -- tensordict and torchrl ---------------------------------------------------------------


def td(module: nn.Module, *keys: str) -> TensorDictModule:
    first, *rest = keys or ("tokens", "logits")
    return TensorDictModule(module, in_keys=[first], out_keys=rest)


def sampler() -> ProbabilisticTensorDictModule:
    return ProbabilisticTensorDictModule(
        in_keys=["logits"], out_keys=["action"], distribution_class=torch.distributions.Categorical
    )


def value(module: nn.Module) -> ValueOperator:
    return ValueOperator(module, in_keys=["hidden"])


def transformers_wrapper(model: nn.Module) -> TransformersWrapper:
    return TransformersWrapper(
        model, input_mode="tokens", generate=False, return_log_probs=True, device="cpu"
    )


TENSORDICT = {
    "TensorDictModule": td,
    "TensorDictModule(DataParallel)": lambda m: td(nn.DataParallel(m)),
    "TensorDictSequential": lambda m: TensorDictSequential(td(m), sampler()),
    "ProbabilisticTensorDictSequential": lambda m: ProbabilisticTensorDictSequential(
        td(m), sampler()
    ),
    "TransformersWrapper": transformers_wrapper,
    "TransformersWrapper(compile)": lambda m: transformers_wrapper(torch.compile(m)),
    "DataParallel(TransformersWrapper)": lambda m: nn.DataParallel(transformers_wrapper(m)),
    "ActorCriticWrapper": lambda m: ActorCriticWrapper(td(m), value(critic())),
    "policy(ActorCriticWrapper)": lambda m: Policy(ActorCriticWrapper(td(m), value(critic()))),
    "sequence with ValueOperator": lambda m: TensorDictSequential(
        td(m), value(nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 1)))
    ),
    "ActorValueOperator": lambda m: ActorValueOperator(
        td(m.model, "tokens", "hidden"),
        td(m.lm_head, "hidden", "logits"),
        value(nn.Linear(16, 1)),
    ),
    "ActorCriticOperator": lambda m: ActorCriticOperator(
        td(m.model, "tokens", "hidden"),
        ProbabilisticTensorDictSequential(td(m.lm_head, "hidden", "logits"), sampler()),
        td(nn.Linear(16, 1), "hidden", "state_action_value"),
    ),
}


@pytest.mark.parametrize("hold", TENSORDICT.values(), ids=TENSORDICT.keys())
def test_the_policy_inside_modules_of_tensordict_and_torchrl_has_the_bare_models_names(
    make_llama, hold: Callable[[nn.Module], nn.Module]
) -> None:
    assert get_model_metadata(hold(make_llama())) == get_model_metadata(make_llama())


def test_torchrls_operator_for_language_model_heads_has_the_bare_models_names() -> None:
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 32, "n_positions": 16}
    for tied in (True, False):
        model = GPT2LMHeadModel(GPT2Config(**sizes, tie_word_embeddings=tied))

        assert get_model_metadata(LMHeadActorValueOperator(model)) == get_model_metadata(model)
        assert ("lm_head.weight" in get_model_metadata(model)) is not tied


def test_values_are_those_of_the_trained_model_while_parameters_are_swapped(make_llama) -> None:
    wrapper, other = transformers_wrapper(make_llama(seed=0)), make_llama(seed=1)

    with TensorDict.from_module(other).to_module(wrapper.model):
        swapped = [weight.read() for weight in extract_weights(wrapper)]
    own = [weight.read() for weight in extract_weights(wrapper)]

    assert all(map(torch.equal, swapped, other.state_dict().values()))
    assert all(map(torch.equal, own, make_llama(seed=0).state_dict().values()))


def test_the_module_inside_a_tensordict_module_needs_no_language_model() -> None:
    bare = get_model_metadata(small_model())

    assert get_model_metadata(td(small_model())) == bare
    assert get_model_metadata(TensorDictSequential(td(small_model()), sampler())) == bare
    assert get_model_metadata(td(td(small_model()))) == bare


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


@pytest.mark.usefixtures("default_group")
def test_fsdp_stays_around_its_model_and_leaves_no_trace_in_names(make_llama) -> None:
    sharded = FullyShardedDataParallel(make_llama(), device_id=torch.device("cpu"))

    assert unwrap(Policy(torch.compile(sharded))) is sharded
    assert {bare_name(name) for name, _ in sharded.named_parameters()} == {"_flat_param"}


@pytest.mark.usefixtures("default_group")
def test_what_accelerate_prepares_has_the_names_of_the_bare_model(make_llama) -> None:
    prepared = Accelerator(cpu=True).prepare(ddp(make_llama()))

    assert get_model_metadata(prepared) == get_model_metadata(make_llama())
