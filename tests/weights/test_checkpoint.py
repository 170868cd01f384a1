"""Checkpoints on disk: what is read, in which order, and what is refused before a push."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from weight_update import ConfigurationError, WeightMismatchError, WeightUpdateError
from weight_update.weights.checkpoint import INDEX, Checkpoint
from weight_update.weights.extract import extract_weights

Tensors = Mapping[str, torch.Tensor]


def shard(number: int, of: int) -> str:
    return f"model-{number:05d}-of-{of:05d}.safetensors"


def save_sharded(directory: Path, *shards: Tensors) -> Path:
    """What save_pretrained writes for a large model."""
    names = [shard(index + 1, len(shards)) for index in range(len(shards))]
    for name, tensors in zip(names, shards, strict=True):
        save_file(dict(tensors), directory / name)
    index = {key: name for name, each in zip(names, shards, strict=True) for key in each}
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return directory


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    first = {"a.weight": torch.randn(3, 2), "b.weight": torch.randn(4).to(torch.bfloat16)}
    second = {"c.weight": torch.randn(5, 1), "c.bias": torch.randn(5), "step": torch.tensor(7)}
    return save_sharded(tmp_path, first, second)


# -- what is read -------------------------------------------------------------------------


def test_specs_come_from_every_shard_in_order(sharded: Path) -> None:
    specs = {spec.name: (spec.dtype, spec.shape) for spec in Checkpoint(sharded).specs}
    assert specs == {
        "a.weight": (torch.float32, (3, 2)),
        "b.weight": (torch.bfloat16, (4,)),
        "c.weight": (torch.float32, (5, 1)),
        "c.bias": (torch.float32, (5,)),
        "step": (torch.int64, ()),
    }
    homes = [spec.name in ("a.weight", "b.weight") for spec in Checkpoint(sharded).specs]
    assert homes == sorted(homes, reverse=True)


def test_values_are_those_of_the_files(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.arange(4).to(torch.bfloat16)}
    save_file(tensors, tmp_path / "model.safetensors")

    read = {weight.spec.name: weight.read() for weight in Checkpoint(tmp_path).weights}

    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())
    assert read.keys() == tensors.keys()


def test_values_are_read_when_they_are_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(2)}, file)
    (weight,) = Checkpoint(tmp_path).weights

    file.unlink()

    with pytest.raises(ConfigurationError, match=r"model\.safetensors"):
        weight.read()


def test_one_file_is_mapped_at_a_time(sharded: Path) -> None:
    weights = Checkpoint(sharded).weights

    assert mapped(sharded) == set()
    for weight in weights:
        weight.read()
        assert len(mapped(sharded)) == 1


def mapped(directory: Path) -> set[str]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split()[-1] for line in lines if str(directory) in line}


def test_a_checkpoint_is_a_source_of_weights_like_any_other(sharded: Path) -> None:
    checkpoint = Checkpoint(sharded)

    assert extract_weights(checkpoint) == checkpoint.weights


def test_tied_weights_are_sent_as_they_are_stored(tmp_path: Path) -> None:
    tensors = {"embed.weight": torch.ones(2, 2), "lm_head.weight": torch.ones(2, 2)}
    save_file(tensors, tmp_path / "model.safetensors")
    assert {spec.name for spec in Checkpoint(tmp_path).specs} == tensors.keys()


def test_shards_without_an_index_are_read_if_all_are_there(sharded: Path) -> None:
    (sharded / INDEX).unlink()
    assert len(Checkpoint(sharded).weights) == 5


def test_an_index_decides_which_files_are_the_model(sharded: Path) -> None:
    save_file({"other": torch.ones(1)}, sharded / "consolidated.safetensors")
    assert "other" not in {spec.name for spec in Checkpoint(sharded).specs}


def test_a_file_that_was_replaced_after_planning_is_refused(sharded: Path) -> None:
    weights = extract_weights(Checkpoint(sharded))
    second = sharded / shard(2, 2)
    copy = second.read_bytes()
    second.unlink()
    second.write_bytes(copy)
    os.utime(second, ns=(1, 1))

    weights[0].read()
    with pytest.raises(ConfigurationError, match="was replaced while it was pushed"):
        weights[-1].read()


def test_an_index_that_is_nested_without_end_is_refused(sharded: Path) -> None:
    (sharded / INDEX).write_text("[" * 100_000)

    with pytest.raises(ConfigurationError, match="cannot be read as an index"):
        Checkpoint(sharded)


def test_a_file_that_is_gone_by_the_time_it_is_read_is_an_error_with_its_name(
    sharded: Path,
) -> None:
    weights = Checkpoint(sharded).weights
    (sharded / shard(2, 2)).unlink()

    with pytest.raises(ConfigurationError, match="00002-of-00002") as failure:
        [weight.read() for weight in weights]

    assert failure.value.phase == "transfer"


_PEAK = """
import sys
import torch
from weight_update.transports.broadcast import BucketPacker
from weight_update.weights.buckets import plan_buckets
from weight_update.weights.checkpoint import Checkpoint
from weight_update.weights.extract import extract_weights

def status(field):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))

before = status("VmRSS")
open("/proc/self/clear_refs", "w").write("5")  # the high-water mark starts anew
plan = plan_buckets(extract_weights(Checkpoint(sys.argv[1])), int(sys.argv[2]))
planned = status("VmHWM") - before
packer = BucketPacker(torch.device("cpu"))
for bucket in plan.buckets:
    packer.pack(bucket)
print(planned, status("VmHWM") - before)
"""


def test_packing_holds_one_shard_and_two_buckets_at_most(tmp_path: Path) -> None:
    mebi = 1 << 20
    tensors = [{f"s{s}.t{t}": torch.ones(mebi) for t in range(8)} for s in range(6)]
    save_sharded(tmp_path, *tensors)
    shard_bytes, bucket_bytes = 32 * mebi, 8 * mebi

    script = [sys.executable, "-c", _PEAK, str(tmp_path), str(bucket_bytes)]
    done = subprocess.run(script, capture_output=True, text=True, check=True, timeout=150)

    planned, peak = map(int, done.stdout.split())
    assert planned < 4 * mebi  # headers only
    assert peak < shard_bytes + 2 * bucket_bytes + 8 * mebi  # of 192 MiB in all


# -- what is refused ----------------------------------------------------------------------


def no_folder(directory: Path) -> None:
    directory.rmdir()


def empty(directory: Path) -> None:
    del directory


def lacks_a_shard(directory: Path) -> None:
    save_sharded(directory, {"a": torch.ones(1)}, {"b": torch.ones(1)})
    (directory / shard(2, 2)).unlink()


def lacks_a_numbered_file(directory: Path) -> None:
    save_file({"a": torch.ones(1)}, directory / shard(1, 2))


def truncated(directory: Path) -> None:
    save_file({"a": torch.ones(100)}, directory / "model.safetensors")
    data = (directory / "model.safetensors").read_bytes()
    (directory / "model.safetensors").write_bytes(data[:-1])


def a_pointer_of_git_lfs(directory: Path) -> None:
    text = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    (directory / "model.safetensors").write_text(text)


def pickled(directory: Path) -> None:
    torch.save({"a": torch.ones(1)}, directory / "pytorch_model.bin")


def an_adapter(directory: Path) -> None:
    save_file({"lora_A.weight": torch.ones(1)}, directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text("{}")


def two_saves(directory: Path) -> None:
    save_sharded(directory, {"a": torch.ones(1)})
    save_file({"a": torch.ones(1)}, directory / "model.safetensors")


def an_unreadable_index(directory: Path) -> None:
    (directory / INDEX).write_text("[]")


def an_index_that_leads_out(directory: Path) -> None:
    (directory / INDEX).write_text(json.dumps({"weight_map": {"a": "../a.safetensors"}}))


def no_tensors(directory: Path) -> None:
    save_file({}, directory / "model.safetensors")


def packed_integers(directory: Path) -> None:
    tensors = {"a.qweight": torch.ones(2, 2, dtype=torch.int32), "a.scales": torch.ones(2)}
    save_file(tensors, directory / "model.safetensors")


def packed_blocks(directory: Path) -> None:
    save_file({"a.blocks": torch.ones(2, 2).to(torch.uint8)}, directory / "model.safetensors")
    (directory / "config.json").write_text('{"quantization_config": {"quant_method": "mxfp4"}}')


def the_same_name_twice(directory: Path) -> None:
    save_file({"a": torch.ones(1)}, directory / shard(1, 2))
    save_file({"a": torch.ones(1)}, directory / shard(2, 2))


def an_index_that_says_more(directory: Path) -> None:
    save_file({"a": torch.ones(1)}, directory / shard(1, 1))
    index = {"a": shard(1, 1), "b": shard(1, 1)}
    (directory / INDEX).write_text(json.dumps({"weight_map": index}))


def an_index_that_says_less(directory: Path) -> None:
    save_file({"a": torch.ones(1), "b": torch.ones(1)}, directory / shard(1, 1))
    (directory / INDEX).write_text(json.dumps({"weight_map": {"a": shard(1, 1)}}))


REFUSED: list[tuple[Callable[[Path], None], type[WeightUpdateError], str]] = [
    (no_folder, ConfigurationError, "does not exist.*save_pretrained"),
    (empty, ConfigurationError, "no .*safetensors"),
    (lacks_a_shard, ConfigurationError, "lacks 1 shard.*00002-of-00002"),
    (lacks_a_numbered_file, ConfigurationError, "lacks 1 shard.*00002-of-00002"),
    (truncated, ConfigurationError, "no whole safetensors file"),
    (a_pointer_of_git_lfs, ConfigurationError, "no whole safetensors file"),
    (pickled, ConfigurationError, r"pytorch_model\.bin.*convert"),
    (an_adapter, ConfigurationError, "adapter.*merge"),
    (two_saves, ConfigurationError, "both"),
    (an_unreadable_index, ConfigurationError, "cannot be read as an index"),
    (an_index_that_leads_out, ConfigurationError, "elsewhere"),
    (no_tensors, ConfigurationError, "no weights"),
    (packed_integers, ConfigurationError, "a.qweight.*quantised"),
    (packed_blocks, ConfigurationError, "a.blocks.*quantised"),
    (the_same_name_twice, WeightMismatchError, "both hold 'a'"),
    (an_index_that_says_more, WeightMismatchError, "its files lack: 'b'"),
    (an_index_that_says_less, WeightMismatchError, "does not name.*'b'"),
]


@pytest.mark.parametrize(
    ("make", "error", "words"), REFUSED, ids=[str(row[0].__name__) for row in REFUSED]
)
def test_what_cannot_be_pushed_is_refused_before_anything_is_read(
    tmp_path: Path, make: Callable[[Path], None], error: type[WeightUpdateError], words: Any
) -> None:
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    make(directory)

    with pytest.raises(error, match=words) as failure:
        Checkpoint(directory)

    assert failure.value.phase == "plan"
    assert type(failure.value) is error
