"""What doctor makes of facts: a table of situations, no server needed."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from weight_update.cli.doctor_checks import diagnose
from weight_update.cli.doctor_facts import AddressFacts, Facts, ModelFacts, address_facts
from weight_update.engines.names import compare_names
from weight_update.engines.probing import ServerFacts
from weight_update.engines.sglang.capabilities import PROBED_ROUTES
from weight_update.weights.specs import TensorSpec

from .findings import found

URL = "http://10.0.0.5:30000"
ROUTES = {**dict.fromkeys(PROBED_ROUTES, True), "/get_load": False}
INFO = {"version": "0.5.23", "tp_size": 1, "pp_size": 1, "dp_size": 1, "dtype": "float32"}
MODEL = {"weight_version": "default", "architectures": ["LlamaForCausalLM"]}
HEALTHY = ServerFacts(URL, info=INFO, model=MODEL, routes=ROUTES, ready=True, running=0)
NEAR = AddressFacts("10.0.0.9", servers={URL: "10.0.0.5"})
NAMES = frozenset({"model.layers.0.self_attn.qkv_proj.weight", "model.norm.weight"})


def spec(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> TensorSpec:
    return TensorSpec(name, dtype, shape)


SPECS = {
    each.name: each
    for each in (
        *(spec(f"model.layers.0.self_attn.{letter}_proj.weight", 4, 4) for letter in "qkv"),
        spec("model.norm.weight", 4),
    )
}
CHECKPOINT = ModelFacts("/ckpt", SPECS)


def server(**changes: Any) -> Facts:
    info = {**INFO, **changes.pop("info", {})}
    return Facts((replace(HEALTHY, info=info, **changes),), NEAR)


def test_a_healthy_server_would_take_an_update() -> None:
    diagnosis = diagnose(Facts((HEALTHY,), NEAR))
    assert diagnosis.ok
    assert diagnosis.to_dict()["problems"] == []
    (described,) = diagnosis.servers
    assert described["ranks"] == 1
    assert described["sessions"] is True
    assert described["pause_modes"] == ["abort", "retract", "in_place"]
    assert described["paused"] is False


def test_what_only_an_update_can_prove_is_called_unknown() -> None:
    text = found(Facts((HEALTHY,), NEAR))
    assert "unknown: whether it can connect to 10.0.0.9" in text
    assert "unknown: whether another trainer left an update open" in text


def test_replicas_are_told_that_updates_go_by_disk() -> None:
    diagnosis = diagnose(server(info={"dp_size": 2}))
    assert diagnosis.ok
    (described,) = diagnosis.servers
    assert described["ranks"] == 0
    (warning,) = described["warnings"]
    assert "2 data-parallel replicas, which cannot join a group" in warning["what"]
    assert "WEIGHT_UPDATE_DIRECTORY" in warning["remedy"]


PROBLEMS = [
    ("no answer", server(unreachable="connection refused", advice="start it"), "refused"),
    ("a redirect", server(redirect="https://b"), "redirects to https://b"),
    ("another service", server(service="other", status=404), "no SGLang server and no vLLM server"),
    ("a gateway", server(status=502, words="Bad Gateway"), "502: Bad Gateway.*directly"),
    ("no key", server(status=401, ordinary_key="missing"), "need a key .401"),
    ("a wrong key", server(status=401, ordinary_key="refused"), "ordinary.*refuse this key .401"),
    ("a forbidden key", server(status=403, ordinary_key="forbidden"), "forbid.*403"),
    ("no admin key", server(control_key="missing"), "control routes need a key"),
    ("a wrong admin key", server(control_key="refused"), "control routes refuse.*ADMIN_API_KEY"),
    ("an old release", server(info={"version": "0.5.3"}), r"0\.5\.3 has no pause modes"),
    ("pipeline stages", server(info={"pp_size": 2}), "pipeline stages.*--pause-mode abort"),
    ("a stuck scheduler", server(busy=True, info={}), "scheduler does not answer"),
    ("a weight cache", server(info={"weight_cache_mode": "on"}), "weight cache is on"),
    ("disaggregation", server(info={"disaggregation_mode": "decode"}), "--pause-mode abort"),
    (
        "a loopback address told to a remote server",
        Facts((HEALTHY,), AddressFacts("127.0.0.1", servers={URL: "10.0.0.5"})),
        "127.0.0.1, a loopback address.*--master-address",
    ),
    (
        "a private address told to a public server",
        Facts((HEALTHY,), AddressFacts("10.0.0.9", servers={URL: "8.8.8.8"})),
        "10.0.0.9, a private address, and is at 8.8.8.8",
    ),
    (
        "an address that is not here",
        Facts((HEALTHY,), AddressFacts("10.9.9.9", error="cannot listen on it")),
        "cannot listen.*10.9.9.9.*--master-address",
    ),
    (
        "a checkpoint that cannot be read",
        Facts((HEALTHY,), NEAR, ModelFacts("/ckpt", error="truncated", remedy="copy it again")),
        "truncated ./ckpt. -> copy it again",
    ),
    (
        "names that the server lacks",
        Facts((replace(HEALTHY, names=NAMES - {"model.norm.weight"}),), NEAR, CHECKPOINT),
        "1 weight.s. of the checkpoint are not the server's.*'model.norm.weight'",
    ),
    (
        "names that the checkpoint lacks",
        Facts((replace(HEALTHY, names=NAMES | {"x"}),), NEAR, CHECKPOINT),
        "1 weight.s. of the server are not in the checkpoint, and would stay old: 'x'",
    ),
    (
        "another length",
        Facts((replace(HEALTHY, names=NAMES, lengths={"model.norm.weight": 8}),), NEAR, CHECKPOINT),
        r"'model.norm.weight' is \(4,\) in the checkpoint and \(8,\) in the server",
    ),
    (
        "another vocabulary than the served folder's, whose weights cannot be read here",
        Facts(
            (replace(HEALTHY, names=NAMES),),
            NEAR,
            replace(CHECKPOINT, config={"vocab_size": 320}),
            {URL: ModelFacts("/served", config={"vocab_size": 256}, error="only *.bin")},
        ),
        "vocab_size is 320 in the checkpoint and 256 in the server",
    ),
    (
        "another shape than the folder that the server loaded",
        Facts(
            (replace(HEALTHY, names=NAMES),),
            NEAR,
            CHECKPOINT,
            {URL: ModelFacts("/served", {**SPECS, "model.norm.weight": spec("n", 6)})},
        ),
        "another shape.*-> push a checkpoint of the model",
    ),
    (
        "more rows than in the folder that the server loaded",
        Facts(
            (replace(HEALTHY, names=NAMES),),
            NEAR,
            CHECKPOINT,
            {URL: ModelFacts("/served", {**SPECS, "model.norm.weight": spec("n", 3)})},
        ),
        "another shape.*-> push with --trim-vocabulary",
    ),
]


@pytest.mark.parametrize(
    ("facts", "words"), [row[1:] for row in PROBLEMS], ids=[row[0] for row in PROBLEMS]
)
def test_a_problem_is_named_with_its_place_and_remedy(facts: Facts, words: str) -> None:
    diagnosis = diagnose(facts)
    assert not diagnosis.ok
    assert all(problem.what and problem.where and problem.remedy for problem in diagnosis.problems)

    assert re.search(f"problem: .*{words}", found(facts), re.IGNORECASE), found(facts)


NOTES = [
    ("a router", server(service="router"), "warning: this is a router"),
    ("a paused server", server(ready=False), "warning: it is paused"),
    ("an old release without /ready", server(ready=None), "unknown: whether it is paused"),
    ("a quantised server", server(info={"quantization": "fp8"}), "warning: it quantises"),
    ("keys in the open", replace(server(), has_keys=True), "warning: keys travel over plain HTTP"),
    (
        "a tunnel",
        Facts(
            (replace(HEALTHY, url="http://127.0.0.1:9000", info={**INFO, "port": 30000}),),
            AddressFacts("127.0.0.1", servers={"http://127.0.0.1:9000": "127.0.0.1"}),
        ),
        "warning: it listens on port 30000 and is reached through 9000",
    ),
    (
        "an output layer that only the served folder stores",
        Facts(
            (replace(HEALTHY, names_unknown="404"),),
            NEAR,
            replace(CHECKPOINT, config={"tie_word_embeddings": True}),
            {URL: ModelFacts("/served", {**SPECS, "lm_head.weight": spec("lm_head.weight", 4)})},
        ),
        "unknown: whether it can connect",
    ),
    ("no layout", server(info={"tp_size": None}), "unknown: how many ranks"),
    (
        "names that the server does not tell",
        Facts((replace(HEALTHY, names_unknown="404: Not Found"),), NEAR, CHECKPOINT),
        "unknown: which weights it has .404: Not Found.",
    ),
    (
        "names of an architecture whose fused names are not known here",
        Facts(
            (replace(HEALTHY, names=frozenset({"x"}), model={"architectures": ["New"]}),),
            NEAR,
            CHECKPOINT,
        ),
        "unknown: whether 5 name.s. fit",
    ),
    (
        "names of a server that wraps its layers",
        Facts(
            (replace(HEALTHY, names=frozenset({"x"}), info={**INFO, "enable_lora": True}),),
            NEAR,
            CHECKPOINT,
        ),
        "unknown: whether 5 name.s. fit",
    ),
    (
        "shapes that the server does not tell",
        Facts((replace(HEALTHY, names=NAMES),), NEAR, CHECKPOINT),
        "unknown: the shapes of its weights",
    ),
    (
        "another dtype",
        Facts(
            (replace(HEALTHY, names=NAMES, info={**INFO, "dtype": "bfloat16"}),), NEAR, CHECKPOINT
        ),
        "warning: it serves bfloat16 and the checkpoint is float32.*--dtype engine",
    ),
    (
        "a dtype that the server does not tell",
        Facts((replace(HEALTHY, names=NAMES, info={**INFO, "dtype": "auto"}),), NEAR, CHECKPOINT),
        "unknown: its dtype",
    ),
]


@pytest.mark.parametrize(
    ("facts", "words"), [row[1:] for row in NOTES], ids=[row[0] for row in NOTES]
)
def test_what_does_not_stop_an_update_is_no_problem(facts: Facts, words: str) -> None:

    assert diagnose(facts).ok, found(facts)
    assert re.search(words, found(facts)), found(facts)


def test_a_name_that_does_not_resolve_is_one_problem() -> None:
    gone = ServerFacts("http://nowhere:30000", unreachable="name not known", advice="look at it")
    (told,) = diagnose(Facts((gone,), address_facts({}, None, None))).problems
    assert told.where == gone.url


def test_keys_over_loopback_are_not_warned_of() -> None:
    url = "http://127.0.0.1:30000"
    facts = Facts((replace(HEALTHY, url=url),), AddressFacts("127.0.0.1"), has_keys=True)
    assert "plain HTTP" not in found(facts)


def test_a_checkpoint_that_fits_has_no_finding_but_what_cannot_be_known() -> None:
    served = {URL: ModelFacts("/served", SPECS)}
    text = found(Facts((replace(HEALTHY, names=NAMES),), NEAR, CHECKPOINT, served))
    assert not [line for line in text.splitlines() if "weight" in line]


@pytest.mark.parametrize(
    ("names", "runtime", "tied", "unknown", "lacking"),
    [
        (["a.q_proj.weight"], ["a.qkv_proj.weight"], False, [], []),
        (["a.gate_proj.weight", "a.up_proj.weight"], ["a.gate_up_proj.weight"], False, [], []),
        (["a.q_proj.weight"], ["a.q_proj.weight"], False, [], []),
        (["lm_head.weight", "e"], ["e"], True, [], []),
        (["e"], ["lm_head.weight", "e"], True, [], []),
        (["lm_head.weight", "e"], ["e"], False, ["lm_head.weight"], []),
        (["e"], ["lm_head.weight", "e"], False, [], ["lm_head.weight"]),
        (["a.rotary_emb.inv_freq"], [], False, [], []),
        (["b"], ["a"], False, ["b"], ["a"]),
    ],
)
def test_names_are_compared_as_the_server_fuses_them(
    names: list[str], runtime: list[str], tied: bool, unknown: list[str], lacking: list[str]
) -> None:
    assert compare_names(names, frozenset(runtime), tied=tied) == (unknown, lacking)


def test_every_problem_of_every_server_is_listed() -> None:
    other = replace(HEALTHY, url="http://10.0.0.6:30000", unreachable="refused", advice="start it")
    diagnosis = diagnose(Facts((replace(HEALTHY, service="vllm"), other), NEAR))
    assert [problem.where for problem in diagnosis.problems] == [URL, other.url]
    assert list(diagnosis.to_dict()) == ["ok", "servers", "problems"]
    assert all(set(p) == {"what", "where", "remedy"} for p in diagnosis.to_dict()["problems"])
