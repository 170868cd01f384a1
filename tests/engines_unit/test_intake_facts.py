"""What a server's answers, and its model's folder, say of how it takes weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weight_update.engines.intake import intake_of
from weight_update.engines.model_folder import read_config, read_scaled, read_shapes
from weight_update.facts import Intake

LLAMA = {"architectures": ["LlamaForCausalLM"]}
BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 64]}


def intake(info: Any = None, config: Any = None, *, requantises: bool = False) -> Intake:
    return intake_of(info or {}, LLAMA, config or {}, requantises=requantises)


def test_a_server_that_says_nothing_is_taken_for_a_plain_one() -> None:
    assert intake_of({}, {}, {}) == Intake()


@pytest.mark.parametrize(
    ("told", "config", "expected"),
    [
        ("bfloat16", {"dtype": "float32"}, "bfloat16"),
        ("half", {}, "float16"),
        ("float", {}, "float32"),
        ("auto", {}, None),
        ("auto", {"dtype": "bfloat16"}, "bfloat16"),
        ("auto", {"torch_dtype": "torch.bfloat16"}, "bfloat16"),
        # Seen on 0.5.23: a checkpoint in fp32 is served in fp16.
        ("auto", {"dtype": "float32"}, "float16"),
        ("auto", {"dtype": "float32", "model_type": "gemma3_text"}, "bfloat16"),
        ("auto", {"text_config": {"dtype": "bfloat16"}, "dtype": "float32"}, "bfloat16"),
        ("auto", {"text_config": {"hidden_size": 8}, "dtype": "bfloat16"}, "bfloat16"),
        ("auto", {"dtype": "int3"}, None),
        (None, {"dtype": "bfloat16"}, None),
        ("floof", {}, None),
    ],
)
def test_the_dtype_is_the_servers_or_that_of_its_checkpoint(
    told: str | None, config: dict[str, Any], expected: str | None
) -> None:
    assert intake({"dtype": told}, config).dtype == expected


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"vocab_size": 64}, 64),
        ({"text_config": {"vocab_size": 32}, "vocab_size": 64}, 32),
        ({"text_config": {}, "vocab_size": 64}, 64),
        ({"model_type": "mllama", "text_config": {"vocab_size": 32}}, None),
        ({"vocab_size": "64"}, None),
        ({"vocab_size": True}, None),
        ({"vocab_size": 0}, None),
        ({}, None),
    ],
)
def test_the_vocabulary_is_that_of_the_text_model(
    config: dict[str, Any], expected: int | None
) -> None:
    assert intake({}, config).vocabulary == expected


def test_what_the_server_was_told_to_override_wins_over_its_checkpoint() -> None:
    info = {"json_model_override_args": json.dumps({"vocab_size": 32})}

    assert intake(info, {"vocab_size": 64}).vocabulary == 32


@pytest.mark.parametrize(
    ("info", "config", "kind", "block"),
    [
        ({}, {"quantization_config": BLOCKS}, "fp8", (128, 64)),
        ({"quantization": None}, {"quantization_config": BLOCKS}, "fp8", (128, 64)),
        ({"quantization": "fp8"}, {"quantization_config": BLOCKS}, "fp8", (128, 64)),
        ({"quantization": "FP8"}, {}, "fp8", None),
        ({"quantization": "w8a8_fp8"}, {"quantization_config": BLOCKS}, "w8a8_fp8", None),
        ({"quantization": "awq"}, {}, "awq", None),
        ({"torchao_config": "int8wo"}, {}, "torchao", None),
        ({"torchao_config": ""}, {}, None, None),
        ({"quantization": "none"}, {}, None, None),
        ({}, {"quantization_config": {"quant_method": "gptq"}}, "gptq", None),
        ({}, {"text_config": {"quantization_config": BLOCKS}}, "fp8", (128, 64)),
        ({}, {"quantization_config": {}}, None, None),
        ({}, {"quantization_config": {"quant_method": "fp8"}}, "fp8", None),
        (
            {},
            {"quantization_config": {**BLOCKS, "scale_fmt": "ue8m0"}},
            "fp8 with scales in ue8m0",
            (128, 64),
        ),
        (
            {},
            {"compression_config": {"format": "int"}},
            "a kind that its configuration does not name",
            None,
        ),
    ],
)
def test_a_quantisation_is_the_servers_or_that_of_its_checkpoint(
    info: dict[str, Any], config: dict[str, Any], kind: str | None, block: tuple[int, int] | None
) -> None:
    found = intake(info, config)

    assert (found.quantization, found.block) == (kind, block)
    assert found.partial_modules is (kind is None)


@pytest.mark.parametrize("key", ["modules_to_not_convert", "ignored_layers"])
def test_modules_that_stay_unquantised_are_known(key: str) -> None:
    config = {"quantization_config": {**BLOCKS, key: ["lm_head", 3, "visual"]}}

    assert intake({}, config).unconverted == ("lm_head", "visual")


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [("EAGLE", True), ("NEXTN", True), ("NGRAM", False), (None, False), ("", False)],
)
def test_a_draft_model_is_known_by_the_servers_algorithm(
    algorithm: str | None, expected: bool
) -> None:
    assert intake({"speculative_algorithm": algorithm}).drafts is expected


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["quant_method", "weight_block_size", "vocab_size", "dtype"]), inner
        )
    ),
    max_leaves=6,
)
FIELDS = (
    *("dtype", "torch_dtype", "quantization", "speculative_algorithm", "torchao_config"),
    *("json_model_override_args", "architectures", "text_config", "vocab_size", "model_type"),
    *("quantization_config", "compression_config"),
)
BODIES = st.dictionaries(st.sampled_from(FIELDS), JSON)


@given(BODIES, BODIES, BODIES)
def test_any_json_is_survived(info: Any, model: Any, config: Any) -> None:
    found = intake_of(info, model, config)

    assert found.dtype in (None, "float16", "bfloat16", "float32", "float64")
    assert found.vocabulary is None or found.vocabulary > 0


# -- the model's folder ------------------------------------------------------------------------


def test_a_configuration_is_read_from_the_folder_that_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 5}')

    assert read_config(str(tmp_path)) == {"vocab_size": 5}


@pytest.mark.parametrize(
    ("beside", "kind"),
    [
        ({"quantization": {"quant_algo": "FP8"}}, "modelopt FP8"),
        ({"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}, None),
        ({"quantization": "FP8"}, None),
        ({}, None),
    ],
)
def test_a_quantisation_that_is_told_in_a_file_of_its_own_is_found(
    tmp_path: Path, beside: dict[str, Any], kind: str | None
) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 5}')
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(beside))

    found = intake({}, read_config(str(tmp_path)))

    assert (found.quantization, found.vocabulary) == (kind, 5)


@pytest.mark.parametrize("text", ["", "[1]", "{", "\x00", '{"a": ' * 50_000])
def test_what_is_no_configuration_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    (tmp_path / "model.safetensors.index.json").write_text(text)

    assert read_config(str(tmp_path)) == {}
    assert read_scaled(str(tmp_path)) is None
    assert read_shapes(str(tmp_path)) == {}


@pytest.mark.parametrize("path", [None, 3, "", "org/name", ".", "/no\x00where", "/" + "x" * 5000])
def test_a_path_that_names_no_folder_of_this_machine_is_none(path: Any) -> None:
    assert read_config(path) == {}
    assert read_scaled(path) is None
    assert read_shapes(path) == {}


def test_a_relative_path_is_not_read_though_it_exists_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "org").mkdir()
    (tmp_path / "org/config.json").write_text('{"vocab_size": 5}')
    monkeypatch.chdir(tmp_path)

    assert read_config("org") == {}


def test_weights_with_scales_are_found_in_an_index(tmp_path: Path) -> None:
    files = {"a.weight": "1", "a.weight_scale_inv": "1", "b.weight": "2"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))

    assert read_scaled(str(tmp_path)) == {"a.weight"}


def test_weights_with_scales_are_found_in_a_checkpoint_of_one_file(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    tensors = {name: torch.ones(1) for name in ("a.weight", "a.weight_scale_inv", "b.weight")}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})

    assert read_scaled(str(tmp_path)) == {"a.weight"}


@pytest.mark.parametrize(
    "data", [b"", b"\xff" * 8, b"\x05\0\0\0\0\0\0\0ab", b"\x02\0\0\0\0\0\0\0[]"]
)
def test_a_damaged_checkpoint_shows_no_weights(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(data)

    assert read_scaled(str(tmp_path)) is None


def test_shapes_are_those_in_the_headers_of_all_files(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    save_file({"a": torch.ones(2, 3)}, tmp_path / "one.safetensors", {"format": "pt"})
    save_file({"b": torch.tensor(1.0)}, tmp_path / "two.safetensors")
    weight_map = {"a": "one.safetensors", "b": "two.safetensors", "c": "missing.safetensors"}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))

    assert read_shapes(str(tmp_path)) == {"a": (2, 3), "b": ()}


def test_shapes_that_are_none_are_left_out(tmp_path: Path) -> None:
    entries = {"a": {"shape": [2]}, "b": {"shape": [2.5]}, "c": {"shape": "2"}, "d": 3}
    header = json.dumps(entries).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header)

    assert read_shapes(str(tmp_path)) == {"a": (2,)}


def usage(*free: Any) -> dict[str, Any]:
    """A ``/server_info`` whose ranks say what they had free when they had started."""
    return {"internal_states": [{"memory_usage": {"startup_available": gib}} for gib in free]}


@pytest.mark.parametrize(
    ("info", "expected"),
    [
        (usage(8.5), int(8.5 * (1 << 30))),
        (usage(8.5, 3), 3 << 30),
        (usage(0.0), 0),
        (usage(8.5, None), None),
        (usage(-1.0), None),
        (usage(float("nan")), None),
        (usage(float("inf")), None),
        (usage("8.5"), None),
        (usage(True), None),
        ({"internal_states": [{"memory_usage": {"weight": 1.0, "kvcache": 2.0}}]}, None),  # 0.5.15
        ({"internal_states": [{"memory_usage": 7}]}, None),
        ({"internal_states": [None]}, None),
        ({"internal_states": {"memory_usage": {}}}, None),
        ({"internal_states": None}, None),
    ],
)
def test_free_memory_is_that_of_the_fullest_rank_where_all_say_it(
    info: Any, expected: int | None
) -> None:
    assert intake(info).free_bytes == expected


@pytest.mark.parametrize(
    ("info", "expected"),
    [
        ({"device": "cuda"}, ("0", "0")),
        ({"device": "cuda", "enable_nccl_nvls": True}, ("0", "1")),
        ({"device": "cuda", "enable_symm_mem": True}, ("1", "1")),
        ({"device": "cuda", "enable_symm_mem": "no"}, ("0", "0")),
    ],
)
def test_what_a_server_on_a_gpu_sets_of_nccl_follows_from_its_arguments(
    info: Any, expected: tuple[str, str]
) -> None:
    cumem, nvls = expected
    assert intake(info).nccl == {"NCCL_CUMEM_ENABLE": cumem, "NCCL_NVLS_ENABLE": nvls}


@pytest.mark.parametrize("device", ["cpu", None, 7])
def test_a_server_without_a_gpu_sets_nothing_of_nccl(device: Any) -> None:
    assert intake({"device": device}).nccl == {}
