"""State dicts on disk: what is read, by which names, and what is refused before a push."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from weight_update import ConfigurationError, WeightMismatchError, WeightUpdateError
from weight_update.weights.extract import extract_weights
from weight_update.weights.saved_state_dict import SavedStateDict

ONES = torch.ones(2)


def saved(tmp_path: Path, what: Any, **how: Any) -> Path:
    path = tmp_path / "model.pt"
    torch.save(what, path, **how)
    return path


def names_in(path: Path) -> list[str]:
    return [spec.name for spec in SavedStateDict(path).specs]


# -- what is read -------------------------------------------------------------------------


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "the format before torch 1.6"])
def test_specs_and_values_are_those_of_the_file(tmp_path: Path, zipped: bool) -> None:
    state = {
        "a.weight": torch.arange(6.0).reshape(3, 2).t(),
        "a.bias": torch.arange(3).to(torch.bfloat16),
        "step": torch.tensor(7),
    }
    path = saved(tmp_path, state, _use_new_zipfile_serialization=zipped)

    weights = {weight.spec.name: weight for weight in SavedStateDict(path).weights}

    assert list(weights) == list(state)
    for name, tensor in state.items():
        assert (weights[name].spec.dtype, weights[name].spec.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(weights[name].read(), tensor)


def test_trained_parameters_are_read_detached(tmp_path: Path) -> None:
    path = saved(tmp_path, {"a": nn.Parameter(ONES)})
    (weight,) = SavedStateDict(path).weights
    assert not weight.read().requires_grad


def test_tied_weights_are_sent_as_they_are_stored(tmp_path: Path) -> None:
    assert names_in(saved(tmp_path, {"embed.weight": ONES, "lm_head.weight": ONES})) == [
        "embed.weight",
        "lm_head.weight",
    ]


def test_extra_state_is_no_weight(tmp_path: Path) -> None:
    assert names_in(saved(tmp_path, {"a": ONES, "b._extra_state": {"scale": 1}})) == ["a"]


def test_the_configuration_is_the_one_beside_the_file(tmp_path: Path) -> None:
    path = saved(tmp_path, {"a": ONES})
    assert SavedStateDict(path).config() == {}
    (tmp_path / "config.json").write_text('{"vocab_size": 3}')
    assert SavedStateDict(path).config() == {"vocab_size": 3}


@pytest.mark.parametrize("nest", ["model", "state_dict", "module", "model_state_dict"])
def test_the_state_dict_of_a_training_checkpoint_is_one_level_down(
    tmp_path: Path, nest: str
) -> None:
    optimizer = torch.optim.Adam([nn.Parameter(ONES)]).state_dict()
    checkpoint = {nest: {"a": ONES}, "optimizer": optimizer, "epoch": 3}
    assert names_in(saved(tmp_path, checkpoint)) == ["a"]


# -- names --------------------------------------------------------------------------------


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "nothing": lambda m: m,
    "DataParallel": nn.DataParallel,
    "compile": torch.compile,  # type: ignore[dict-item]
    "compile(DataParallel)": lambda m: torch.compile(nn.DataParallel(m)),  # type: ignore[dict-item]
    "DataParallel(compile)": lambda m: nn.DataParallel(torch.compile(m)),  # type: ignore[arg-type]
    "layers": lambda m: nn.Sequential(torch.compile(m[0]), checkpoint_wrapper(m[1])),  # type: ignore[index]
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=list(WRAPPERS))
def test_names_lose_what_wrappers_put_in(
    tmp_path: Path, wrap: Callable[[nn.Module], nn.Module]
) -> None:
    assert names_in(saved(tmp_path, wrap(block()).state_dict())) == ["0.weight", "1.weight"]


@pytest.mark.parametrize(
    ("stored", "bare"),
    [
        (["module.a", "module.b"], ["a", "b"]),
        (["module.a", "b"], ["module.a", "b"]),
        (["module.module.a", "module.b"], ["module.a", "b"]),
        (["module.module.a"], ["module.a"]),
        (["modules.a"], ["modules.a"]),
    ],
)
def test_the_prefix_of_ddp_goes_once_and_only_if_all_names_have_it(
    tmp_path: Path, stored: list[str], bare: list[str]
) -> None:
    assert names_in(saved(tmp_path, dict.fromkeys(stored, ONES))) == bare


# -- memory -------------------------------------------------------------------------------

_PEAK = """
import sys
import torch
from weight_update.transports.broadcast import BucketPacker
from weight_update.weights.buckets import plan_buckets
from weight_update.weights.extract import extract_weights
from weight_update.weights.saved_state_dict import SavedStateDict

def anonymous():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))

before = anonymous()
plan = plan_buckets(extract_weights(SavedStateDict(sys.argv[1])), int(sys.argv[2]))
peak = planned = anonymous() - before
packer = BucketPacker(torch.device("cpu"), "flattened_bucket")
for bucket in plan.buckets:
    packer.pack(bucket)
    peak = max(peak, anonymous() - before)
print(planned, peak)
"""


def test_packing_holds_two_buckets_beside_the_file(tmp_path: Path) -> None:
    mebi = 1 << 20
    path = saved(tmp_path, {f"t{t}": torch.ones(mebi) for t in range(32)})  # 128 MiB

    script = [sys.executable, "-c", _PEAK, str(path), str(8 * mebi)]
    done = subprocess.run(script, capture_output=True, text=True, check=True, timeout=150)

    planned, peak = map(int, done.stdout.split())
    assert planned < 8 * mebi
    assert peak < 2 * 8 * mebi + 8 * mebi


# -- what is refused ----------------------------------------------------------------------


class Runs:
    """Unpickled, it would leave a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


def test_nothing_in_the_file_is_run(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    path = saved(tmp_path, {"a": Runs(mark)})

    with pytest.raises(ConfigurationError, match="mkdir") as failure:
        SavedStateDict(path)

    assert "weights_only=True" in str(failure.value)
    assert not mark.exists()


def no_file(path: Path) -> None:
    del path


def a_folder(path: Path) -> None:
    path.mkdir()


def a_whole_module(path: Path) -> None:
    torch.save(block(), path)


def a_list(path: Path) -> None:
    torch.save([ONES], path)


def a_pickle(path: Path) -> None:
    path.write_bytes(pickle.dumps({"a": 1}))


def junk(path: Path) -> None:
    path.write_bytes(b"PK\x03\x04 and no more")


def empty(path: Path) -> None:
    path.touch()


def truncated(path: Path) -> None:
    torch.save({"a": torch.ones(10_000)}, path)
    path.write_bytes(path.read_bytes()[:-100])


def an_optimizer(path: Path) -> None:
    torch.save(torch.optim.Adam(block().parameters()).state_dict(), path)


def two_models(path: Path) -> None:
    torch.save({"model": {"a": ONES}, "module": {"a": ONES}}, path)


def two_levels_down(path: Path) -> None:
    torch.save({"model": {"state_dict": {"a": ONES}}}, path)


def numbers(path: Path) -> None:
    torch.save({"a": ONES, "epoch": 3}, path)


def no_weights(path: Path) -> None:
    torch.save({}, path)


def numbered_names(path: Path) -> None:
    torch.save({0: ONES}, path)


def one_bare_name(path: Path) -> None:
    torch.save({"a._orig_mod.b": ONES, "a.b": ONES}, path)


def packed_integers(path: Path) -> None:
    torch.save({"a.qweight": torch.ones(2, 2, dtype=torch.int32)}, path)


def sparse(path: Path) -> None:
    torch.save({"a": torch.eye(2).to_sparse()}, path)


def on_meta(path: Path) -> None:
    torch.save({"a": torch.ones(2, device="meta")}, path)


def a_peft_model(path: Path) -> None:
    torch.save({"base_model.model.q.lora_A.default.weight": ONES}, path)


REFUSED: list[tuple[Callable[[Path], None], type[WeightUpdateError], str]] = [
    (no_file, ConfigurationError, r"does not exist.*torch\.save"),
    (a_peft_model, ConfigurationError, "PEFT model.*merge_and_unload"),
    (a_folder, ConfigurationError, "is a folder.*Checkpoint"),
    (a_whole_module, ConfigurationError, r"GLOBAL torch\.nn.*save model\.state_dict\(\).*convert"),
    (a_list, ConfigurationError, "holds list, and no state_dict"),
    (a_pickle, ConfigurationError, r"torch\.load\(weights_only=True\) does not take"),
    (junk, ConfigurationError, r"torch\.load\(weights_only=True\) does not take"),
    (empty, ConfigurationError, r"torch\.load\(weights_only=True\) does not take"),
    (truncated, ConfigurationError, r"torch\.load\(weights_only=True\) does not take"),
    (an_optimizer, ConfigurationError, "state of an optimizer"),
    (two_models, ConfigurationError, "several state_dicts: 'model', 'module'"),
    (two_levels_down, WeightMismatchError, "not tensors: 'state_dict'"),
    (numbers, WeightMismatchError, "not tensors: 'epoch'.*looked for under model, "),
    (no_weights, ConfigurationError, "holds no weights"),
    (numbered_names, WeightMismatchError, "not tensors: '0'"),
    (one_bare_name, WeightMismatchError, "same bare name"),
    (packed_integers, ConfigurationError, r"a\.qweight.*quantised"),
    (sparse, ConfigurationError, "'a' is torch.sparse_coo"),
    (on_meta, ConfigurationError, "'a' is on the meta device"),
]


@pytest.mark.parametrize(
    ("make", "error", "words"), REFUSED, ids=[str(row[0].__name__) for row in REFUSED]
)
def test_what_cannot_be_pushed_is_refused_before_anything_is_read(
    tmp_path: Path, make: Callable[[Path], None], error: type[WeightUpdateError], words: str
) -> None:
    path = tmp_path / "model.pt"
    make(path)

    with pytest.raises(error, match=words) as failure:
        SavedStateDict(path)

    assert failure.value.phase == "plan"
    assert type(failure.value) is error
    assert str(path) in str(failure.value)


def test_a_safetensors_file_is_a_matter_of_its_folder(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.touch()
    with pytest.raises(ConfigurationError, match="name its folder"):
        SavedStateDict(path)


@pytest.mark.parametrize("change", [Path.unlink, lambda path: os.utime(path, ns=(1, 1))])
def test_a_file_that_changes_after_planning_is_refused(
    tmp_path: Path, change: Callable[[Path], None]
) -> None:
    path = saved(tmp_path, {"a": ONES})
    (weight,) = SavedStateDict(path).weights
    change(path)

    with pytest.raises(ConfigurationError, match=r"model\.pt") as failure:
        weight.read()

    assert failure.value.phase == "transfer"


# -- a TensorDict mapped into memory ------------------------------------------------------


@pytest.mark.parametrize(
    ("tensors", "names"),
    [
        ({"a.weight": ONES, "b.weight": 2 * ONES}, ["a.weight", "b.weight"]),
        ({"a": {"weight": ONES}, "b": {"c": {"weight": 2 * ONES}}}, ["a.weight", "b.c.weight"]),
        ({"a": {"b.c": ONES}, "d.e": {"f.g": 2 * ONES}}, ["a.b.c", "d.e.f.g"]),
    ],
    ids=["flat", "nested", "nested names with dots"],
)
def test_a_mapped_tensordict_is_a_source_of_weights(
    tmp_path: Path, tensors: dict[str, Any], names: list[str]
) -> None:
    TensorDict(tensors).memmap(tmp_path)

    weights = {w.spec.name: w for w in extract_weights(TensorDict.load_memmap(tmp_path))}

    assert sorted(weights) == names
    assert [float(weights[name].read()[0]) for name in names] == [1.0, 2.0]


def test_two_entries_of_a_tensordict_with_one_dotted_name_are_refused() -> None:
    with pytest.raises(WeightMismatchError, match="same dotted name"):
        extract_weights(TensorDict({"a.b": ONES, "a": {"b": ONES}}))


def test_values_of_a_mapped_tensordict_are_read_late(tmp_path: Path) -> None:
    mapped = TensorDict({"a": {"b": torch.zeros(2)}}).memmap(tmp_path)
    (weight,) = extract_weights(TensorDict.load_memmap(tmp_path))

    mapped["a", "b"].fill_(3)

    assert weight.read().tolist() == [3.0, 3.0]
