"""Adapters for engines that read them from a folder."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from weight_update.engines.lora import AdapterFolders

CONFIG = {"r": 2, "peft_type": "LORA"}


def written(folders: AdapterFolders, value: float) -> Path:
    folders.announce(CONFIG)
    folders.pack({"a.lora_A.weight": torch.full((2, 3), value)})
    return folders.place


def test_a_folder_holds_what_peft_saves(tmp_path: Path) -> None:
    place = written(AdapterFolders("policy", tmp_path / "new" / "directory"), 1.5)

    tensors = load_file(place / "adapter_model.safetensors")
    assert torch.equal(tensors["a.lora_A.weight"], torch.full((2, 3), 1.5))
    assert json.loads((place / "adapter_config.json").read_text()) == CONFIG


def test_each_adapter_has_a_folder_of_its_own_and_old_ones_go(tmp_path: Path) -> None:
    folders = AdapterFolders("policy", tmp_path)

    places = [written(folders, float(number)) for number in range(5)]

    assert len(set(places)) == 5
    assert sorted(tmp_path.iterdir()) == sorted(places[-3:])


def test_names_with_slashes_make_no_folders(tmp_path: Path) -> None:
    place = written(AdapterFolders("team/policy", tmp_path), 1.0)

    assert place.parent == tmp_path
