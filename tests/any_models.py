"""Small random models of architectures without a row in `FAMILIES`: their attention is unusual, their MLPs are not.

Sizes of attention are the smallest that vLLM supports on a CPU: heads of 32 numbers, latent vectors of 512.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.core_model_loading import revert_weight_conversion

SIZES: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 256, "initializer_range": 0.2, "eos_token_id": 0,
    "bos_token_id": None, "pad_token_id": None,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
LINEAR: dict[str, Any] = {  # gated DeltaNet in all but the last layer
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
}  # fmt: skip
LATENT: dict[str, Any] = {
    "kv_lora_rank": 512, "q_lora_rank": 24, "qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 32,
    "num_key_value_heads": 2, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.5,
}  # fmt: skip
GEMMA: dict[str, Any] = {
    "head_dim": 32, "global_head_dim": 32, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "sliding_window": 8,
}  # fmt: skip
VISION: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "depth": 1, "num_heads": 2,
    "num_attention_heads": 2, "patch_size": 4, "image_size": 16, "out_hidden_size": 64, "num_channels": 3,
}  # fmt: skip


def _config(name: str, *parts: dict[str, Any], **more: Any) -> Any:
    settings: dict[str, Any] = {}
    for part in (SIZES, *parts, more):
        settings |= part
    return getattr(transformers, name)(**settings)


def _wrapper(name: str, text: Any, **more: Any) -> Any:
    kind = getattr(transformers, name)
    return kind(text_config=text.to_dict(), vision_config=VISION, eos_token_id=0, **more)


MODELS: dict[str, Callable[[], Any]] = {
    "olmo2": lambda: _config("Olmo2Config"),
    "olmo3": lambda: _config("Olmo3Config", sliding_window=8),
    "glm4": lambda: _config("Glm4Config", head_dim=32),  # gate and up are one tensor
    "gemma4_text": lambda: _config("Gemma4TextConfig", GEMMA),
    "seed_oss": lambda: _config("SeedOssConfig", head_dim=32),
    "hunyuan_v1_dense": lambda: _config("HunYuanDenseV1Config", head_dim=32),
    "cohere2": lambda: _config("Cohere2Config", sliding_window=8, logit_scale=0.5),
    "starcoder2": lambda: _config("Starcoder2Config"),  # an MLP without a gate, biases everywhere
    "phi": lambda: _config("PhiConfig"),  # attention and MLP in parallel
    "gpt_neox": lambda: _config("GPTNeoXConfig"),
    "qwen3_5": lambda: _wrapper("Qwen3_5Config", _config("Qwen3_5TextConfig", LINEAR, head_dim=32)),
    "mistral3": lambda: _wrapper("Mistral3Config", _config("MistralConfig", head_dim=32)),
    "qwen3_next": lambda: _config(
        "Qwen3NextConfig", EXPERTS, LINEAR, head_dim=32, num_experts=4, shared_expert_intermediate_size=24
    ),
    "qwen3_5_moe": lambda: _wrapper(
        "Qwen3_5MoeConfig",
        _config("Qwen3_5MoeTextConfig", EXPERTS, LINEAR, head_dim=32, num_experts=4,
                shared_expert_intermediate_size=24),
    ),
    "glm4_moe": lambda: _config(
        "Glm4MoeConfig", EXPERTS, head_dim=32, n_routed_experts=4, n_shared_experts=1, first_k_dense_replace=1,
        n_group=1, topk_group=1,
    ),
    "deepseek_v3": lambda: _config(
        "DeepseekV3Config", EXPERTS, LATENT, n_routed_experts=4, n_shared_experts=1, first_k_dense_replace=1,
        topk_method="noaux_tc", scoring_func="sigmoid",  # which only vLLM reads
    ),
    "ernie4_5_moe": lambda: _config(
        "Ernie4_5_MoeConfig", moe_intermediate_size=32, moe_num_experts=4, moe_k=2, moe_num_shared_experts=1,
        moe_layer_start_index=1,
    ),
    "minimax_m2": lambda: _config(
        "MiniMaxM2Config", intermediate_size=32, num_local_experts=4, num_experts_per_tok=2, head_dim=32,
        rotary_dim=32, scoring_func="sigmoid", use_routing_bias=True,  # which only vLLM reads
    ),
    "hunyuan_v1_moe": lambda: _config("HunYuanMoEV1Config", num_experts=4, moe_topk=2, head_dim=32),
    "gpt_oss": lambda: _config(
        "GptOssConfig", intermediate_size=32, num_local_experts=4, num_experts_per_tok=2, head_dim=32, sliding_window=8
    ),
    "gemma4_moe": lambda: _config(  # an MLP and experts in every layer, the experts in one tensor
        "Gemma4TextConfig", GEMMA, pad_token_id=0, enable_moe_block=True, num_experts=4, top_k_experts=2,
        moe_intermediate_size=32,
    ),
    "gemma4": lambda: _wrapper("Gemma4Config", _config("Gemma4TextConfig", GEMMA, pad_token_id=0)),
}  # fmt: skip


def random_model(name: str) -> Any:
    """Return a model of that name in float32, with every norm and bias away from 0 and 1."""
    config = MODELS[name]()
    torch.manual_seed(0)
    kinds = transformers.AutoModelForImageTextToText, transformers.AutoModelForCausalLM
    kind = next(each for each in kinds if type(config) in each._model_mapping)
    model = kind.from_config(config, dtype=torch.float32).eval()
    for label, parameter in model.named_parameters():
        if parameter.dim() == 1 and ("norm" in label or label.endswith("bias")):
            torch.nn.init.normal_(parameter, mean=float(parameter.detach().mean()), std=0.3)
        elif parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def write_model(name: str, folder: Path) -> Path:
    """Write the model of that name, and return its folder."""
    random_model(name).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    assert "quantization_config" not in config
    return folder


def stack_experts(folder: Path) -> None:
    """Store the experts of each layer in two tensors, as some publishers do."""
    tensors, stacked = load_file(folder / "model.safetensors"), dict[str, torch.Tensor]()
    for name in [name for name in tensors if ".experts.0.gate_proj" in name]:
        layer = name.partition(".0.gate_proj")[0] if name.count(".0.gate_proj") else ""
        number = sum(f"{layer}.{index}.gate_proj.weight" in tensors for index in range(99))

        def parts(kind: str, layer: str = layer, number: int = number) -> torch.Tensor:
            return torch.stack([tensors.pop(f"{layer}.{index}.{kind}_proj.weight") for index in range(number)])

        stacked[f"{layer}.gate_up_proj"] = torch.cat([parts("gate"), parts("up")], dim=1)
        stacked[f"{layer}.down_proj"] = parts("down")
    save_file(tensors | stacked, folder / "model.safetensors", {"format": "pt"})


def write_headers(name: str, folder: Path) -> Path:
    """Write config.json and the weights' headers of a model of the size that is published; the weights are holes."""
    config = getattr(transformers, name)()
    kinds = transformers.AutoModelForImageTextToText, transformers.AutoModelForCausalLM
    kind = next(each for each in kinds if type(config) in each._model_mapping)
    with torch.device("meta"):
        model = kind.from_config(config, dtype=torch.bfloat16)
    config.architectures, config.dtype = [type(model).__name__], "bfloat16"
    config.save_pretrained(folder)
    header: dict[str, Any] = {}
    end = 0
    for label, tensor in revert_weight_conversion(model, model.state_dict()).items():
        begin, end = end, end + 2 * tensor.numel()
        header[label] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return folder
