"""The disk path: what is written is a checkpoint, whole as soon as it is there, and cleaned up."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import re
import shutil
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path, PosixPath
from types import SimpleNamespace
from unittest.mock import Mock
from uuid import uuid4

import pytest
import torch
from safetensors import safe_open

from weight_update.engines.model_folder import read_shapes
from weight_update.errors import (
    Applied,
    ConfigurationError,
    EngineRejected,
    EngineUnreachable,
    UpdateTimeout,
    WeightMismatchError,
    WeightUpdateError,
)
from weight_update.options import UpdateOptions
from weight_update.transports import folders as folders_module
from weight_update.transports.disk import DiskPacker, open_no_group
from weight_update.transports.folders import VersionFolders
from weight_update.transports.tensor_file import header_of, write_tensors
from weight_update.weights.buckets import Bucket, plan_buckets
from weight_update.weights.cargo import Terms
from weight_update.weights.checkpoint import DTYPES, INDEX, Checkpoint
from weight_update.weights.extract import extract_weights
from weight_update.weights.specs import TensorSpec, Weight

CPU = torch.device("cpu")
TENSORS = {
    "a": torch.arange(6.0).reshape(2, 3),
    "b": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "c.t": torch.arange(6).reshape(2, 3).T,
    "d": torch.tensor([True, False, True]),
    "e": torch.tensor(3.25, dtype=torch.float64),
    "f": torch.empty(0, 4),
    "g": torch.arange(4.0).to(torch.float8_e4m3fn),
}


@pytest.fixture
def folders(tmp_path: Path) -> Iterator[VersionFolders]:
    made = VersionFolders(tmp_path)
    yield made
    made.close()


def bucket_of(tensors: dict[str, torch.Tensor]) -> Bucket:
    return Bucket(tuple(extract_weights(tensors)))


def written(packer: DiskPacker, tensors: dict[str, torch.Tensor]) -> Path:
    folder = packer.pack(bucket_of(tensors)).folder
    assert folder is not None
    return folder


def packer_of(folders: VersionFolders, file_bytes: int | None = None) -> DiskPacker:
    packer = DiskPacker(folders)
    packer.format((), Terms(file_bytes))
    return packer


def read_all(folder: Path) -> dict[str, torch.Tensor]:
    found = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            found |= {name: tensors.get_tensor(name) for name in list(tensors.keys())}
    return found


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def home_of(directory: Path) -> Path:
    (home,) = directory.glob("weight-update-*")
    return home


# -- what is written -----------------------------------------------------------------------


def test_what_is_written_is_read_back_bit_for_bit(folders: VersionFolders) -> None:
    found = read_all(written(packer_of(folders), TENSORS))
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert bits(found[name]) == bits(tensor)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_every_dtype_that_is_read_can_be_written(dtype: torch.dtype, tmp_path: Path) -> None:
    value = torch.tensor([[1, 0], [1, 1]]).to(dtype)
    write_tensors(tmp_path / "x.safetensors", [TensorSpec("x", dtype, (2, 2))], [value])
    found = read_all(tmp_path)["x"]
    assert found.dtype == dtype
    assert bits(found) == bits(value)


def test_the_folder_is_a_checkpoint_as_transformers_saves_one(folders: VersionFolders) -> None:
    folder = written(packer_of(folders, 16), {"a": torch.ones(2), "b": torch.ones(9)})
    (folder / "config.json").write_text("{}")
    assert [w.spec.name for w in Checkpoint(str(folder)).weights] == ["a", "b"]
    assert read_shapes(str(folder)) == {"a": (2,), "b": (9,)}


def test_files_are_of_the_size_that_was_asked_for(folders: VersionFolders) -> None:
    tensors = {f"w{index}": torch.ones(100) for index in range(10)}
    folder = written(packer_of(folders, 1200), tensors)
    assert sorted(file.name for file in folder.glob("*.safetensors")) == [
        f"model-{number:05}-of-00004.safetensors" for number in (1, 2, 3, 4)
    ]


def test_the_index_names_the_file_of_each_weight(folders: VersionFolders) -> None:
    folder = written(packer_of(folders, 16), {"a": torch.ones(2), "b": torch.ones(9)})
    index = json.loads((folder / INDEX).read_text())
    assert index["metadata"]["total_size"] == 44
    for name, file in index["weight_map"].items():
        with safe_open(folder / file, "pt") as tensors:
            assert name in list(tensors.keys())


def test_no_offset_breaks_an_item(folders: VersionFolders) -> None:
    odd = {"a": torch.ones(3, dtype=torch.uint8), "b": torch.ones(1), "c": torch.ones(1).half()}
    folder = written(packer_of(folders), odd)
    (file,) = folder.glob("*.safetensors")
    raw = file.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    for name, value in odd.items():
        assert (8 + size + header[name]["data_offsets"][0]) % value.element_size() == 0


def test_a_header_is_padded_so_that_tensors_begin_where_any_item_may() -> None:
    for length in range(1, 10):
        assert len(header_of([TensorSpec("x" * length, torch.float32, (1,))])) % 8 == 0


def test_all_weights_are_one_bucket_whatever_the_size_of_a_file(folders: VersionFolders) -> None:
    weights = list(extract_weights({f"w{i}": torch.ones(100) for i in range(9)}))
    chosen = DiskPacker(folders).format([w.spec for w in weights], Terms(500))
    plan = plan_buckets(weights, chosen.bucket_bytes, chosen.packs)
    assert plan.requests == 1
    assert chosen.bucket_bytes == plan.nbytes


def test_a_stream_comes_in_buckets_of_a_file_each(folders: VersionFolders) -> None:
    assert DiskPacker(folders).format(None, Terms(500)).bucket_bytes == 500


def test_one_value_at_a_time_is_in_memory(folders: VersionFolders) -> None:
    alive, most = [0], [0]

    class Counted(SimpleNamespace):
        def __del__(self) -> None:
            alive[0] -= 1

    def read() -> torch.Tensor:
        alive[0] += 1
        most[0] = max(most[0], alive[0])
        value = torch.ones(4)
        value.mark = Counted()  # type: ignore[attr-defined]
        return value

    spec = [TensorSpec(f"w{i}", torch.float32, (4,)) for i in range(20)]
    packer_of(folders).pack(Bucket(tuple(Weight(each, CPU, read) for each in spec)))
    assert most[0] <= 2  # the one that is written, and the one that is read next


# -- what cannot be written ----------------------------------------------------------------


def test_a_value_that_differs_from_its_spec_is_refused_and_leaves_nothing(
    folders: VersionFolders, tmp_path: Path
) -> None:
    wrong = Weight(TensorSpec("a", torch.float32, (2,)), CPU, lambda: torch.ones(3))
    with pytest.raises(WeightMismatchError, match="'a' was announced"):
        packer_of(folders).pack(Bucket((wrong,)))
    assert [file.name for file in home_of(tmp_path).iterdir()] == ["lock"]


def test_a_dtype_that_safetensors_cannot_hold_is_an_objection(folders: VersionFolders) -> None:
    plan = plan_buckets(extract_weights({"z": torch.ones(1, dtype=torch.complex128)}), 100)
    assert DiskPacker(folders).objections(plan) == [
        "'z' is complex128, which safetensors cannot hold"
    ]


@pytest.mark.parametrize("name", ["__metadata__", "a\udc80"], ids=["metadata", "no text"])
def test_a_name_that_safetensors_cannot_hold_is_an_objection(
    folders: VersionFolders, name: str
) -> None:
    plan = plan_buckets(extract_weights({name: torch.ones(1)}), 100)
    (told,) = DiskPacker(folders).objections(plan)
    assert "is a name that safetensors cannot hold" in told


@pytest.mark.parametrize("name", ["a/../b", "\u00fc \U0001d518", "x" * 5000, ' "\\\n\0', ""])
def test_other_names_are_read_back(folders: VersionFolders, name: str) -> None:
    assert list(read_all(written(packer_of(folders), {name: torch.ones(1)}))) == [name]


def test_a_source_that_cannot_be_read_is_not_told_as_a_place_that_cannot_be_written(
    folders: VersionFolders, tmp_path: Path
) -> None:
    def gone() -> torch.Tensor:
        raise FileNotFoundError(2, "No such file", "/checkpoint/model.safetensors")

    weight = Weight(TensorSpec("a", torch.float32, (1,)), CPU, gone)
    with pytest.raises(FileNotFoundError, match="/checkpoint/model"):
        packer_of(folders).pack(Bucket((weight,)))
    assert [file.name for file in home_of(tmp_path).iterdir()] == ["lock"]


def test_too_little_space_is_found_before_anything_is_written(
    folders: VersionFolders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10))
    with pytest.raises(ConfigurationError, match=r"take 24 bytes, and .* has 10 left") as caught:
        written(packer_of(folders), {"a": torch.ones(6)})
    assert "directory=" in caught.value.remedy
    assert [file.name for file in home_of(tmp_path).iterdir()] == ["lock"]


def test_a_disk_that_fails_on_the_way_is_an_error_with_advice(
    folders: VersionFolders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(WeightUpdateError, match="No space left on device") as caught:
        written(packer_of(folders), TENSORS)
    assert str(tmp_path) in caught.value.message
    assert [file.name for file in home_of(tmp_path).iterdir()] == ["lock"]


def test_a_pack_that_is_given_up_stops_at_its_next_tensor(
    folders: VersionFolders, tmp_path: Path
) -> None:
    reading, go = threading.Event(), threading.Event()

    def slow() -> torch.Tensor:
        reading.set()
        assert go.wait(30)
        return torch.ones(1)

    def never() -> torch.Tensor:
        raise AssertionError("read after it was given up")

    specs = [TensorSpec(name, torch.float32, (1,)) for name in "ab"]
    weights = [Weight(spec, CPU, read) for spec, read in zip(specs, (slow, never), strict=True)]
    packer, caught = packer_of(folders), []

    def pack() -> None:
        with pytest.raises(WeightUpdateError, match="given up") as error:
            packer.pack(Bucket(tuple(weights)))
        caught.append(error)

    thread = threading.Thread(target=pack)
    thread.start()
    assert reading.wait(30)
    packer.abandon()
    go.set()
    thread.join(30)
    assert caught
    assert [file.name for file in home_of(tmp_path).iterdir()] == ["lock"]
    written(packer, {"a": torch.ones(1)})  # a later one is not given up


# -- folders -------------------------------------------------------------------------------


def test_a_folder_appears_when_all_of_it_is_written(
    folders: VersionFolders, tmp_path: Path
) -> None:
    with folders.written(1) as (unfinished, place):
        assert not place.exists()
        assert unfinished.name.startswith(".")
        (unfinished / "x").write_text("x")
    assert (place / "x").read_text() == "x"
    assert place.parent == home_of(tmp_path)


def test_what_engines_serve_stays_however_many_updates_fail_after_it(
    folders: VersionFolders, tmp_path: Path
) -> None:
    packer, most = packer_of(folders), 0
    served = written(packer, {"a": torch.ones(1)})
    folders.keep_newest()
    for _ in range(5):
        newest = written(packer, {"a": torch.ones(1)})
        most = max(most, len(list(home_of(tmp_path).glob("version-*"))))
        assert served.is_dir()
    assert most == 3
    folders.keep_newest()
    assert list(home_of(tmp_path).glob("version-*")) == [newest]


def test_what_an_engine_may_still_read_is_there_while_the_next_is_written(
    folders: VersionFolders,
) -> None:
    before = written(packer_of(folders), {"a": torch.ones(1)})
    folders.keep_newest()
    with folders.written(1):
        assert before.is_dir()


def rejected(applied: Applied) -> EngineRejected:
    error = EngineRejected("no")
    error.applied = applied
    return error


@pytest.mark.parametrize(
    ("end", "kept"),
    [
        (UpdateTimeout("no answer"), True),
        (EngineUnreachable("reset"), True),
        (rejected("unknown"), True),  # whoever is in between may have said so
        (rejected("partly"), False),
        (None, False),
    ],
    ids=["silent", "cut off", "refused by who knows", "refused", "taken"],
)
def test_a_folder_stays_until_the_engine_that_reads_it_has_answered(
    end: WeightUpdateError | None, kept: bool, folders: VersionFolders
) -> None:
    packer = packer_of(folders)
    read = written(packer, {"a": torch.ones(1)})
    with suppress(WeightUpdateError), folders.reading(read, "http://slow"):
        if end is not None:
            raise end
    for _ in range(3):
        written(packer, {"a": torch.ones(1)})
        folders.keep_newest()
        assert read.is_dir() == kept


def test_a_folder_that_nobody_answered_for_goes_when_its_reader_reads_another(
    folders: VersionFolders, tmp_path: Path
) -> None:
    packer = packer_of(folders)
    for _ in range(3):  # a silent engine keeps one at most
        place = written(packer, {"a": torch.ones(1)})
        with suppress(UpdateTimeout), folders.reading(place, "http://slow"):
            raise UpdateTimeout("no answer")
        newest = written(packer, {"a": torch.ones(1)})
        folders.keep_newest()
        assert set(home_of(tmp_path).glob("version-*")) == {place, newest}


def test_a_silent_engine_that_left_the_fleet_keeps_no_folder(folders: VersionFolders) -> None:
    packer = packer_of(folders)
    places = {url: written(packer, {"a": torch.ones(1)}) for url in ("http://gone", "http://slow")}
    for url, place in places.items():
        with suppress(UpdateTimeout), folders.reading(place, url):
            raise UpdateTimeout("no answer")
    written(packer, {"a": torch.ones(1)})

    folders.forget_all_but(["http://slow"])
    folders.keep_newest()

    assert [place.is_dir() for place in places.values()] == [False, True]


def test_an_engine_may_begin_to_read_while_folders_are_looked_through(
    folders: VersionFolders, tmp_path: Path
) -> None:
    class LookedAt(PosixPath):
        def __hash__(self) -> int:
            others.enter_context(folders.reading(tmp_path / "new", "http://other"))
            return super().__hash__()

    with folders.written(1):
        pass
    with ExitStack() as others, folders.reading(LookedAt(tmp_path), "http://slow"):
        folders.keep_newest()


def test_closing_removes_everything_and_nothing_else(
    folders: VersionFolders, tmp_path: Path
) -> None:
    (tmp_path / "mine").write_text("x")
    written(packer_of(folders), {"a": torch.ones(1)})
    folders.close()
    folders.close()
    assert [file.name for file in tmp_path.iterdir()] == ["mine"]


def test_a_closed_sender_that_goes_on_starts_anew(folders: VersionFolders) -> None:
    written(packer_of(folders), {"a": torch.ones(1)})
    folders.close()
    assert written(packer_of(folders), {"a": torch.ones(1)}).is_dir()


def test_a_home_that_somebody_removed_is_made_anew(folders: VersionFolders, tmp_path: Path) -> None:
    written(packer_of(folders), {"a": torch.ones(1)})
    shutil.rmtree(home_of(tmp_path))
    assert written(packer_of(folders), {"a": torch.ones(1)}).is_dir()


def test_a_file_system_without_locks_is_written_all_the_same(
    folders: VersionFolders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lustre has none unless it is mounted with them."""

    def lock(*_: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", lock)
    assert written(packer_of(folders), {"a": torch.ones(1)}).is_dir()


def test_what_a_dead_sender_left_without_a_lock_is_left(
    folders: VersionFolders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may live in another container."""
    monkeypatch.setattr("fcntl.flock", Mock(side_effect=OSError(errno.ENOSYS, "none")))
    other = tmp_path / f"weight-update-{HOST}-{NOBODY}-{uuid4().hex}"
    other.mkdir()
    written(packer_of(folders), {"a": torch.ones(1)})
    assert other.is_dir()


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


@pytest.mark.parametrize(("mask", "others"), [(0o022, True), (0o077, False)])
def test_who_may_read_is_said_by_the_umask(
    folders: VersionFolders, tmp_path: Path, mask: int, others: bool
) -> None:
    """Engines may run as another user; who sets a strict mask wants no other to read."""
    with umask(mask):
        folder = written(packer_of(folders), {"a": torch.ones(1)})
    for path in (home_of(tmp_path), folder, *folder.iterdir()):
        assert bool(path.stat().st_mode & 0o004) is others, path


def test_a_directory_that_is_not_there_is_an_error_with_advice(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be written under") as caught:
        written(packer_of(VersionFolders(tmp_path / "gone")), {"a": torch.ones(1)})
    assert "same path" in caught.value.remedy


# -- where, when no directory is set -------------------------------------------------------


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A place that stands for the host's memory, one for its temporary files, and free bytes."""
    place = SimpleNamespace(memory=tmp_path / "shm", temporary=tmp_path / "tmp", free={})
    for folder in (place.memory, place.temporary):
        folder.mkdir()
        place.free[folder] = 1 << 40

    def usage(path: Path) -> SimpleNamespace:
        return SimpleNamespace(
            free=next(f for p, f in place.free.items() if p in (path, path.parent))
        )

    monkeypatch.setattr(folders_module, "_MEMORY", place.memory)
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(place.temporary))
    monkeypatch.setattr(shutil, "disk_usage", usage)
    return place


def test_without_a_directory_the_hosts_memory_is_taken(memory: SimpleNamespace) -> None:
    folders = VersionFolders()
    folder = written(packer_of(folders), {"a": torch.ones(1)})
    assert memory.memory in folder.parents
    folders.close()
    assert list(memory.memory.iterdir()) == []


def test_memory_that_holds_no_two_versions_gives_way_to_the_temporary_directory(
    memory: SimpleNamespace,
) -> None:
    memory.free[memory.memory] = 7
    folders = VersionFolders()
    folder = written(packer_of(folders), {"a": torch.ones(1)})
    assert memory.temporary in folder.parents
    folders.close()


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "http://localhost:1", "http://[::1]:1"])
def test_engines_of_this_host_need_no_directory(url: str) -> None:
    open_no_group([url], UpdateOptions())


def test_an_engine_elsewhere_needs_a_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "weight_update.transports.disk.is_here", lambda url: url.startswith("http://127.")
    )
    urls = ["http://127.0.0.1:1", "http://10.9.8.7:1"]
    with pytest.raises(ConfigurationError) as caught:
        open_no_group(urls, UpdateOptions())
    assert caught.value.engine == "http://10.9.8.7:1"
    assert caught.value.phase == "connect"
    assert "WEIGHT_UPDATE_DIRECTORY" in caught.value.remedy


def test_with_a_directory_engines_may_be_anywhere(tmp_path: Path) -> None:
    open_no_group(["http://10.9.8.7:1"], UpdateOptions(directory=str(tmp_path)))


# -- those that ended without a word -------------------------------------------------------


def die_while_writing(directory: Path) -> None:
    folders = VersionFolders(directory)
    with folders.written(1) as (unfinished, _):
        (unfinished / "half").write_text("x")
        os._exit(1)


def test_what_a_killed_sender_left_is_removed_at_the_next_start(
    folders: VersionFolders, tmp_path: Path
) -> None:
    process = multiprocessing.get_context("spawn").Process(
        target=die_while_writing, args=(tmp_path,)
    )
    process.start()
    process.join(60)
    left = home_of(tmp_path)
    assert list(left.glob(".unfinished-*/half"))

    written(packer_of(folders), {"a": torch.ones(1)})

    assert not left.exists()


def end_without_a_shutdown(directory: Path) -> None:
    folders = VersionFolders(directory)
    with folders.written(1) as (unfinished, _):
        (unfinished / "x").write_text("x")


def test_a_sender_that_ends_without_a_shutdown_leaves_nothing(tmp_path: Path) -> None:
    process = multiprocessing.get_context("spawn").Process(
        target=end_without_a_shutdown, args=(tmp_path,)
    )
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert list(tmp_path.iterdir()) == []


HOST = re.sub(r"[^A-Za-z0-9.]", "_", socket.gethostname())
NOBODY = 4_194_305  # above the largest process id there can be


@pytest.mark.parametrize(
    "name",
    [
        f"weight-update-{HOST}-{os.getpid()}-{uuid4().hex}",
        f"weight-update-another.host-{NOBODY}-{uuid4().hex}",
        f"weight-update-{HOST}-{NOBODY}-notes",
        "weight-update",
        "model",
    ],
    ids=["a living sender", "another host", "another name", "a shorter name", "a stranger"],
)
def test_what_may_be_somebody_elses_is_left(
    folders: VersionFolders, tmp_path: Path, name: str
) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "model.safetensors").write_text("x")
    written(packer_of(folders), {"a": torch.ones(1)})
    assert (tmp_path / name / "model.safetensors").exists()


def test_a_sender_in_another_container_holds_its_lock(
    folders: VersionFolders, tmp_path: Path
) -> None:
    """Its process number is nobody's here, although it lives."""
    other = tmp_path / f"weight-update-{HOST}-{NOBODY}-{uuid4().hex}"
    other.mkdir()
    handle = folders_module._locked(other)
    written(packer_of(folders), {"a": torch.ones(1)})
    assert other.is_dir()
    os.close(handle)
    folders_module.remove_leftovers(tmp_path)
    assert not other.exists()


def test_a_link_with_such_a_name_is_not_followed(folders: VersionFolders, tmp_path: Path) -> None:
    treasure = tmp_path / "treasure"
    treasure.mkdir()
    (treasure / "x").write_text("x")
    (tmp_path / f"weight-update-{HOST}-{NOBODY}-{uuid4().hex}").symlink_to(treasure)
    written(packer_of(folders), {"a": torch.ones(1)})
    assert (treasure / "x").exists()
