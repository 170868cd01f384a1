"""Tiny random models of many families; they build with transformers 4.57 and 5."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import nn

from weight_update.weights.extract import extract_weights

SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    # Wide enough that the greedy path differs between seeds and has few near-ties.
    "initializer_range": 0.2,
    # The special tokens of most configurations lie outside so small a vocabulary.
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 48,
}
LATENT: dict[str, Any] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "head_dim": 8,  # of the rotated part
    "moe_layer_freq": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "num_key_value_heads": 4,
    "rope_scaling": {
        "type": "yarn",
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}
ROPE = {
    "rope_type": "default",
    "type": "default",
    "rope_theta": 10000.0,
    "mrope_section": [2, 3, 3],
}
QWEN_VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 64,
    "fullatt_block_indexes": [1],
    "patch_size": 4,
    "spatial_merge_size": 2,
    "in_channels": 3,
    "in_chans": 3,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [1],
}
SIGLIP: dict[str, Any] = {
    "model_type": "siglip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
    "vision_use_head": False,
}
CLIP: dict[str, Any] = {**SIGLIP, "model_type": "clip_vision_model", "projection_dim": 16}


def _config(name: str, **options: Any) -> Any:
    return getattr(transformers, f"{name}Config")(**options)


def _text(name: str, **options: Any) -> Callable[[], Any]:
    return lambda: _config(name, **{**SIZES, **options})


def _qwen_vl(name: str, **text: Any) -> Callable[[], Any]:
    sizes = {**SIZES, "rope_scaling": dict(ROPE), **text}
    return lambda: _config(name, text_config=sizes, vision_config=dict(QWEN_VISION))


def _with_tower(name: str, text: str, tower: dict[str, Any], **options: Any) -> Callable[[], Any]:
    sizes = {**SIZES, "model_type": text, "layer_types": None, "sliding_window": 64}
    if text != "gemma3_text":
        del sizes["layer_types"], sizes["sliding_window"]
    return lambda: _config(name, text_config=dict(sizes), vision_config=dict(tower), **options)


CONFIGS: dict[str, tuple[str, Callable[[], Any]]] = {
    "llama": ("LlamaForCausalLM", _text("Llama")),
    "llama-tied": ("LlamaForCausalLM", _text("Llama", tie_word_embeddings=True)),
    "mistral": ("MistralForCausalLM", _text("Mistral")),
    "qwen2": ("Qwen2ForCausalLM", _text("Qwen2", tie_word_embeddings=True)),
    "qwen3": ("Qwen3ForCausalLM", _text("Qwen3", tie_word_embeddings=False)),
    "gemma2": (
        "Gemma2ForCausalLM",
        _text("Gemma2", query_pre_attn_scalar=16, hidden_act="gelu_pytorch_tanh"),
    ),
    "gemma3-text": ("Gemma3ForCausalLM", _text("Gemma3Text", query_pre_attn_scalar=16)),
    "gemma3": (
        "Gemma3ForConditionalGeneration",
        _with_tower("Gemma3", "gemma3_text", SIGLIP, mm_tokens_per_image=4),
    ),
    "phi": ("PhiForCausalLM", _text("Phi")),
    "phi3": ("Phi3ForCausalLM", _text("Phi3")),
    "gpt-neox": ("GPTNeoXForCausalLM", _text("GPTNeoX")),
    "gpt2": (
        "GPT2LMHeadModel",
        lambda: _config("GPT2", vocab_size=256, n_embd=64, n_layer=2, n_head=4, n_positions=64),
    ),
    "qwen2-moe": ("Qwen2MoeForCausalLM", _text("Qwen2Moe", **EXPERTS)),
    "qwen3-moe": ("Qwen3MoeForCausalLM", _text("Qwen3Moe", **EXPERTS)),
    "olmoe": (
        "OlmoeForCausalLM",
        _text("Olmoe", num_experts=4, num_experts_per_tok=2, num_key_value_heads=4),
    ),
    "mixtral": ("MixtralForCausalLM", _text("Mixtral", num_local_experts=4)),
    "phimoe": ("PhimoeForCausalLM", _text("Phimoe", num_local_experts=4, lm_head_bias=True)),
    "deepseek-v3": ("DeepseekV3ForCausalLM", _text("DeepseekV3", **LATENT)),
    "gpt-oss": (
        "GptOssForCausalLM",
        _text("GptOss", num_local_experts=4, num_experts_per_tok=2, sliding_window=64),
    ),
    "granite-moe": ("GraniteMoeForCausalLM", _text("GraniteMoe", num_local_experts=4)),
    "qwen2-vl": ("Qwen2VLForConditionalGeneration", _qwen_vl("Qwen2VL")),
    "qwen2.5-vl": ("Qwen2_5_VLForConditionalGeneration", _qwen_vl("Qwen2_5_VL")),
    "qwen3-vl": ("Qwen3VLForConditionalGeneration", _qwen_vl("Qwen3VL")),
    "qwen3-vl-moe": ("Qwen3VLMoeForConditionalGeneration", _qwen_vl("Qwen3VLMoe", **EXPERTS)),
    "llava": ("LlavaForConditionalGeneration", _with_tower("Llava", "llama", CLIP)),
    "llava-moe": ("LlavaForConditionalGeneration", _with_tower("Llava", "mixtral", CLIP)),
}
"""By family: the class and what makes its configuration."""


def tiny_model(family: str, seed: int = 0) -> Any:
    """A model with random weights in fp32, its zeros and ones made random too."""
    name, config = CONFIGS[family]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, name)(config())
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point() and float(tensor.detach().std(correction=0)) == 0.0:
                nn.init.normal_(tensor.data, mean=float(tensor.detach().mean()), std=0.2)
    return model.eval()


def meta_model(family: str) -> Any:
    """The same on the meta device."""
    name, config = CONFIGS[family]
    with torch.device("meta"):
        return getattr(transformers, name)(config())


def save(family: str, directory: Path, seed: int = 0) -> Any:
    """Writes a tiny model's checkpoint, and beside it `push.safetensors`: what is extracted."""
    model = tiny_model(family, seed)
    model.save_pretrained(directory)
    push = {each.spec.name: each.read().contiguous() for each in extract_weights(model)}
    save_file(push, directory / "push.safetensors")
    return model


def main(root: Path, families: list[str]) -> None:
    """Writes the checkpoints of some families, each in a folder of its name."""
    for family in families:
        save(family, root / family)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
