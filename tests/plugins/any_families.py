"""Tiny random models of families that have no class of ours, and the same models with narrower MLPs and experts.

The reference is the dense transformers model whose removed channels are zero; what is written is that model with those
channels left out. No code of ours makes either.
"""

import json
import re
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

INTERMEDIATE, EXPERT, NUM_EXPERTS = 96, 64, 8
SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
ROUTED = {"moe_intermediate_size": EXPERT, "num_experts_per_tok": 3}
LINEAR_ATTENTION = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
QWEN_VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": INTERMEDIATE,  # as wide as the decoder's MLPs, so that a mix-up would show
    "num_heads": 2,
    "out_hidden_size": 64,
    "patch_size": 4,
    "num_position_embeddings": 64,
}
PIXTRAL = {
    "model_type": "pixtral",
    "hidden_size": 32,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "head_dim": 16,
    "image_size": 32,
    "patch_size": 8,
}
YARN = {  # vLLM 0.32's CPU kernel for plain interleaved RoPE is wrong with two heads, dense as well
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}
NO_HEAD_DIM = {"head_dim": None, "num_attention_heads": 2, "num_key_value_heads": 1}
WITHOUT_TRANSFORMERS: dict[str, dict[str, Any]] = {  # family whose dense model vLLM computes otherwise -> options
    "minimax_m2": {},  # scores are sigmoid in transformers
    "qwen3_next": {"dtype": "bfloat16"},  # vLLM's linear attention has no other on a CPU
    "qwen3_5": {"dtype": "bfloat16"},
    "qwen3_5_moe": {"dtype": "bfloat16"},
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {  # model_type -> its config's class, and settings beyond SIZES
    "olmo2": ("Olmo2Config", NO_HEAD_DIM),  # which is 32 with two heads
    "olmo3": ("Olmo3Config", NO_HEAD_DIM | {"sliding_window": 8}),
    "glm4": ("Glm4Config", {}),  # gate and up are one tensor
    "gemma4_text": ("Gemma4TextConfig", {"vocab_size_per_layer_input": 128, "hidden_size_per_layer_input": 16}),
    "seed_oss": ("SeedOssConfig", {}),
    "hunyuan_v1_dense": ("HunYuanDenseV1Config", {}),
    "starcoder2": ("Starcoder2Config", NO_HEAD_DIM),  # no gate, and biases everywhere
    "phi": ("PhiConfig", NO_HEAD_DIM | {"num_key_value_heads": 2, "partial_rotary_factor": 0.5}),
    "gpt_neox": ("GPTNeoXConfig", NO_HEAD_DIM | {"num_key_value_heads": None}),
    "mistral3": ("Mistral3Config", {"text_config": {"model_type": "mistral"}, "vision_config": PIXTRAL}),
    "qwen3_5": ("Qwen3_5Config", {"text_config": LINEAR_ATTENTION, "vision_config": QWEN_VISION}),
    "qwen3_5_moe": (
        "Qwen3_5MoeConfig",
        {
            "text_config": {
                **LINEAR_ATTENTION,
                **ROUTED,
                "num_experts": NUM_EXPERTS,
                "shared_expert_intermediate_size": 48,
            },
            "vision_config": QWEN_VISION,
        },
    ),
    "qwen3_next": (
        "Qwen3NextConfig",
        {**LINEAR_ATTENTION, **ROUTED, "num_experts": NUM_EXPERTS, "shared_expert_intermediate_size": 48},
    ),
    "glm4_moe": (
        "Glm4MoeConfig",
        {
            **ROUTED,
            "n_routed_experts": NUM_EXPERTS,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        {
            **ROUTED,
            "n_routed_experts": NUM_EXPERTS,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "n_group": 2,
            "topk_group": 1,
            "num_key_value_heads": 4,
            "kv_lora_rank": 512,  # the only size of vLLM's CPU kernel
            "q_lora_rank": 24,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 64,
            "v_head_dim": 32,
            "head_dim": 64,
            "rope_parameters": YARN,
            "topk_method": "noaux_tc",  # vLLM reads both, which transformers takes for granted
            "scoring_func": "sigmoid",
        },
    ),
    "ernie4_5_moe": (
        "Ernie4_5_MoeConfig",
        {
            "moe_intermediate_size": EXPERT,
            "moe_num_experts": NUM_EXPERTS,
            "moe_k": 3,
            "moe_num_shared_experts": 1,
            "moe_layer_start_index": 1,
            "rope_parameters": {name: value for name, value in YARN.items() if "mscale" not in name},
        },
    ),
    "minimax_m2": (
        "MiniMaxM2Config",
        {
            "intermediate_size": EXPERT,
            "num_local_experts": NUM_EXPERTS,
            "num_experts_per_tok": 3,
            "rotary_dim": 16,
            "scoring_func": "softmax",  # vLLM 0.32 has no sigmoid without groups on a CPU
            "use_routing_bias": True,
        },
    ),
    "qwen3_moe": ("Qwen3MoeConfig", {**ROUTED, "num_experts": NUM_EXPERTS, "mlp_only_layers": [1]}),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        {**ROUTED, **NO_HEAD_DIM, "num_experts": NUM_EXPERTS, "shared_expert_intermediate_size": 48},
    ),
    "mixtral": ("MixtralConfig", {"intermediate_size": EXPERT, "num_local_experts": NUM_EXPERTS}),
    "olmoe": ("OlmoeConfig", NO_HEAD_DIM | {"intermediate_size": EXPERT, "num_experts": NUM_EXPERTS}),
    "hunyuan_v1_moe": (
        "HunYuanMoEV1Config",
        {"intermediate_size": EXPERT, "num_experts": NUM_EXPERTS, "moe_topk": 3},
    ),
}
WIDTHS = (64, INTERMEDIATE, 33, 1)  # of the MLPs: a multiple of 16, dense, odd, a single channel
EXPERT_WIDTHS = (0, 1, 2, 17, 31, 33, 48, EXPERT)  # of a layer's experts, turned from layer to layer
_INPUTS = "gate_proj|up_proj|gate_up_proj|c_fc|fc1|dense_h_to_4h"
_OUTPUTS = "down_proj|c_proj|fc2|dense_4h_to_h|w2"
_MLP = re.compile(rf"(.*\blayers)\.(\d+)\.(mlp)\.({_INPUTS}|{_OUTPUTS})\.(weight|bias)")
_EXPERT = re.compile(r"(.*\blayers)\.(\d+)\.(\w+\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w2|w3)\.weight")


def make_dense(folder: Path, family: str) -> None:
    """Write the dense model in fp32, as its family is on disk."""
    torch.manual_seed(0)
    name, settings = FAMILIES[family]
    config_class, is_wrapper = getattr(transformers, name), "vision_config" in settings
    text = SIZES | (settings["text_config"] if is_wrapper else settings)
    text = {key: value for key, value in text.items() if value is not None}
    config = config_class(**({**settings, "text_config": text} if is_wrapper else text))
    auto = AutoModelForImageTextToText if is_wrapper else AutoModelForCausalLM
    model = auto.from_config(config, dtype=torch.float32).eval()
    for name, tensor in model.state_dict().items():
        if family == "ernie4_5_moe" and "correction_bias" in name:
            tensor.zero_()  # vLLM 0.32's router on a CPU ignores it where scores are softmax, dense as well
        elif tensor.dim() > 1:
            torch.nn.init.normal_(tensor, std=0.12)
        elif name.endswith(("bias", "norm.weight")):  # they start at 0 and 1, where a mix-up would not show
            tensor += 0.1 * torch.randn(tensor.shape)
    model.save_pretrained(folder)


def load(folder: Path) -> Any:
    """Load a model in plain transformers, which narrows it if `register_widths` was called."""
    is_wrapper = "vision_config" in json.loads((folder / "config.json").read_text())
    auto = AutoModelForImageTextToText if is_wrapper else AutoModelForCausalLM
    return auto.from_pretrained(folder, dtype=torch.float32).eval()


def narrow(dense: Path, folder: Path, zeroed: Path) -> None:
    """Write a dense model with narrower MLPs and experts to `folder`, with zeros in their place to `zeroed`."""
    weights = load_file(dense / "model.safetensors")
    compact, stated = cut(weights)
    config = json.loads((dense / "config.json").read_text())
    for place, tensors, more in ((zeroed, weights, {}), (folder, compact, {"quantization_config": stated})):
        place.mkdir()
        save_file(tensors, place / "model.safetensors", metadata={"format": "pt"})
        (place / "config.json").write_text(json.dumps(config | more))


def cut(weights: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Zero the removed channels of MLPs and experts in `weights`; return the tensors without them, and their widths."""
    compact, layers, blocks = dict(weights), {}, {}
    layers_module = ""
    for name, weight in weights.items():
        if (match := _EXPERT.fullmatch(name)) and "mtp" not in name:
            layers_module, layer, module, expert, part = match.groups()
            width = EXPERT_WIDTHS[(int(expert) + 3 * int(layer)) % NUM_EXPERTS]
            sizes = layers.setdefault(int(layer), {}).setdefault("expert_intermediate_sizes", [0] * NUM_EXPERTS)
            sizes[int(expert)] = width
            names, key = _names(f"{module}.{{}}.", part), f"{layer}.{expert}"
            blocks["experts"] = {**names, "intermediate_size": EXPERT, "num_experts": NUM_EXPERTS}
            dense = EXPERT
        elif (match := _MLP.fullmatch(name)) and "vision" not in name:
            layers_module, layer, module, part, kind = match.groups()
            if kind == "bias" and re.fullmatch(_OUTPUTS, part):
                continue
            width, key, dense = WIDTHS[int(layer)], layer, INTERMEDIATE
            layers.setdefault(int(layer), {})["intermediate_size"] = width
            if "mlp" not in blocks or part != "down_proj":  # which several forms share
                blocks["mlp"] = {**_names(f"{module}.", part), "intermediate_size": INTERMEDIATE}
        else:
            continue
        order = torch.randperm(dense, generator=torch.Generator().manual_seed(sum(map(int, key.split(".")))))
        kept, removed = order[:width].sort().values, order[width:]
        if part == "gate_up_proj":
            blocks["mlp"] |= {"fused": "halves"}
            kept, removed = torch.cat((kept, kept + dense)), torch.cat((removed, removed + dense))
        axis = 1 if re.fullmatch(_OUTPUTS, part) else 0
        compact[name] = weight.index_select(axis, kept).contiguous()
        weight.index_fill_(axis, removed, 0)
        if not width:
            del compact[name]
    entries = [layers.get(index, {}) for index in range(SIZES["num_hidden_layers"])]
    return compact, {"quant_method": "ddp_widths", "layers_module": layers_module, **blocks, "layers": entries}


def _names(prefix: str, part: str) -> dict[str, Any]:
    """Return the names of a block's projections on disk, of which `part` is one."""
    for *inputs, output in (
        ("w1", "w3", "w2"),
        ("gate_up_proj", "down_proj"),
        ("c_fc", "c_proj"),
        ("fc1", "fc2"),
        ("dense_h_to_4h", "dense_4h_to_h"),
    ):
        if part in inputs or (part == output and part != "down_proj"):
            break
    else:
        inputs, output = ["gate_proj", "up_proj"], "down_proj"
    return {"inputs": [prefix + name for name in inputs], "output": prefix + output}
