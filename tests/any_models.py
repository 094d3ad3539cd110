"""Small random models of architectures without a row in `FAMILIES`: the one table of them for all tests.

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

from ddp_vllm.remote_code.modeling_deepseek import DeepseekConfig, register_deepseek

INTERMEDIATE, EXPERT, NUM_EXPERTS, LAYERS = 96, 64, 8, 3
SIZES: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": INTERMEDIATE, "num_hidden_layers": LAYERS,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 256, "initializer_range": 0.2,
    "eos_token_id": 0, "bos_token_id": None, "pad_token_id": None,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"moe_intermediate_size": EXPERT, "num_experts_per_tok": 3}
# the first layer is dense
SHARED: dict[str, Any] = EXPERTS | {"n_routed_experts": NUM_EXPERTS, "n_shared_experts": 2, "first_k_dense_replace": 1}
LINEAR: dict[str, Any] = {  # gated DeltaNet in all but the last layer
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
}  # fmt: skip
YARN: dict[str, Any] = {  # vLLM 0.32's CPU kernel for plain interleaved RoPE is wrong with two heads, dense as well
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64,
    "beta_fast": 32.0, "beta_slow": 1.0,
}  # fmt: skip
LATENT: dict[str, Any] = {
    "kv_lora_rank": 512, "q_lora_rank": 24, "qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 32,
    "num_key_value_heads": 2, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.5,
    "rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
}  # fmt: skip
GEMMA: dict[str, Any] = {
    "head_dim": 32, "global_head_dim": 32, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "sliding_window": 8,
}  # fmt: skip
MAMBA: dict[str, Any] = {
    "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1,
}  # fmt: skip
MUP: dict[str, Any] = {  # numbers in the forward of MLPs and of the head, which published models have
    "mlp_multipliers": [0.5, 2.0], "lm_head_multiplier": 0.05, "embedding_multiplier": 5.0,
}  # fmt: skip
VISION: dict[str, Any] = {  # its MLPs are as wide as the decoder's, so that a mix-up would show
    "hidden_size": 32, "intermediate_size": INTERMEDIATE, "num_hidden_layers": 1, "depth": 1, "num_heads": 2,
    "num_attention_heads": 2, "patch_size": 4, "image_size": 32, "out_hidden_size": 64, "num_channels": 3,
    "num_position_embeddings": 64, "head_dim": 16,
}  # fmt: skip


def tiny_config(name: str, *parts: dict[str, Any], **more: Any) -> Any:
    settings: dict[str, Any] = {}
    for part in (SIZES, *parts, more):
        settings |= part
    return (DeepseekConfig if name == "DeepseekConfig" else getattr(transformers, name))(**settings)


def _wrapper(name: str, text: Any, **more: Any) -> Any:
    kind = getattr(transformers, name)
    return kind(text_config=text.to_dict(), vision_config=VISION | more, eos_token_id=0)


# mixtures that `dimensions.widths_of` knows
MIXTURES: dict[str, Callable[[], Any]] = {
    # the middle layer has a dense MLP: widths must find their layer
    "qwen3_moe": lambda: tiny_config(
        "Qwen3MoeConfig", EXPERTS, num_experts=NUM_EXPERTS, head_dim=32, mlp_only_layers=[1]
    ),
    # a shared expert with a gate of its own, biases in attention
    "qwen2_moe": lambda: tiny_config(
        "Qwen2MoeConfig", EXPERTS, num_experts=NUM_EXPERTS, shared_expert_intermediate_size=48
    ),
    # other names on disk; one tensor is embedding and head; a hidden size that our CPU kernel does not take
    "mixtral": lambda: tiny_config(
        "MixtralConfig", hidden_size=48, head_dim=32, intermediate_size=EXPERT, num_local_experts=NUM_EXPERTS,
        num_experts_per_tok=3, tie_word_embeddings=True,
    ),
    # norms over all heads, so KV heads as many as query heads
    "olmoe": lambda: tiny_config(
        "OlmoeConfig", num_key_value_heads=2, intermediate_size=EXPERT, num_experts=NUM_EXPERTS, num_experts_per_tok=3
    ),
    "deepseek": lambda: tiny_config("DeepseekConfig", SHARED, num_key_value_heads=2),
    "deepseek_v2": lambda: tiny_config("DeepseekV2Config", SHARED, LATENT),
}  # fmt: skip
MODELS: dict[str, Callable[[], Any]] = MIXTURES | {
    "falcon_h1": lambda: tiny_config("FalconH1Config", MUP, head_dim=32, **MAMBA),
    "olmo2": lambda: tiny_config("Olmo2Config"),
    "olmo3": lambda: tiny_config("Olmo3Config", sliding_window=8),
    "glm4": lambda: tiny_config("Glm4Config", head_dim=32),  # gate and up are one tensor
    "gemma4_text": lambda: tiny_config(
        "Gemma4TextConfig", head_dim=32, vocab_size_per_layer_input=320, hidden_size_per_layer_input=16, pad_token_id=0
    ),
    "hunyuan_v1_dense": lambda: tiny_config("HunYuanDenseV1Config", head_dim=32),
    "starcoder2": lambda: tiny_config("Starcoder2Config"),  # an MLP without a gate, biases everywhere
    # attention and MLP in parallel
    "phi": lambda: tiny_config("PhiConfig", num_key_value_heads=2, partial_rotary_factor=0.5),
    "gpt_neox": lambda: tiny_config("GPTNeoXConfig", num_key_value_heads=2),
    "mistral3": lambda: _wrapper(
        "Mistral3Config", tiny_config("MistralConfig", head_dim=32), model_type="pixtral", patch_size=8
    ),
    "qwen3_5": lambda: _wrapper("Qwen3_5Config", tiny_config("Qwen3_5TextConfig", LINEAR, head_dim=32)),
    "qwen3_5_moe": lambda: _wrapper(
        "Qwen3_5MoeConfig",
        tiny_config("Qwen3_5MoeTextConfig", EXPERTS, LINEAR, head_dim=32, num_experts=NUM_EXPERTS,
                shared_expert_intermediate_size=48),
    ),
    "qwen3_next": lambda: tiny_config(
        "Qwen3NextConfig", EXPERTS, LINEAR, head_dim=32, num_experts=NUM_EXPERTS, shared_expert_intermediate_size=48
    ),
    "glm4_moe": lambda: tiny_config("Glm4MoeConfig", SHARED, head_dim=32, n_shared_experts=1, n_group=1, topk_group=1),
    "deepseek_v3": lambda: tiny_config(
        "DeepseekV3Config", SHARED, LATENT, n_group=2,
        topk_method="noaux_tc", scoring_func="sigmoid",  # vLLM reads both, which transformers takes for granted
    ),
    "ernie4_5_moe": lambda: tiny_config(
        "Ernie4_5_MoeConfig", moe_intermediate_size=EXPERT, moe_num_experts=NUM_EXPERTS, moe_k=3,
        moe_num_shared_experts=1, moe_layer_start_index=1, rope_parameters=YARN,
    ),
    "minimax_m2": lambda: tiny_config(
        "MiniMaxM2Config", intermediate_size=EXPERT, num_local_experts=NUM_EXPERTS, num_experts_per_tok=3, head_dim=32,
        rotary_dim=16, use_routing_bias=True,
        scoring_func="softmax",  # vLLM 0.32 has no sigmoid without groups on a CPU
    ),
    "exaone_moe": lambda: tiny_config(
        "ExaoneMoeConfig", EXPERTS, head_dim=32, num_experts=NUM_EXPERTS, num_shared_experts=1, n_group=1, topk_group=1,
        sliding_window=8, layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        mlp_layer_types=["dense", "sparse", "sparse"],
    ),
    "hunyuan_v1_moe": lambda: tiny_config(
        "HunYuanMoEV1Config", intermediate_size=EXPERT, num_experts=NUM_EXPERTS, moe_topk=3, head_dim=32
    ),
}  # fmt: skip
# models that vLLM's tests leave out
UNSERVED: dict[str, Callable[[], Any]] = {
    "cohere2": lambda: tiny_config("Cohere2Config", sliding_window=8, logit_scale=0.5),
    "gpt_oss": lambda: tiny_config(
        "GptOssConfig", intermediate_size=32, num_local_experts=4, num_experts_per_tok=2, head_dim=32, sliding_window=8
    ),
    "gemma4_moe": lambda: tiny_config(  # an MLP and experts in every layer, the experts in one tensor
        "Gemma4TextConfig", GEMMA, pad_token_id=0, enable_moe_block=True, num_experts=4, top_k_experts=2,
        moe_intermediate_size=32,
    ),
    "granitemoehybrid": lambda: tiny_config(  # without experts; with them its MLPs are shared experts
        "GraniteMoeHybridConfig", num_local_experts=0, shared_intermediate_size=INTERMEDIATE, logits_scaling=4.0,
        mamba_n_heads=4, mamba_d_head=32, mamba_d_state=16, layer_types=["mamba", "attention", "mamba"],
    ),
    "gemma4": lambda: _wrapper("Gemma4Config", tiny_config("Gemma4TextConfig", GEMMA, pad_token_id=0)),
}  # fmt: skip


def write_model(name: str, folder: Path, **changes: Any) -> Path:
    """Write the model of that name in float32, with every norm and bias away from 0 and 1; return its folder."""
    register_deepseek()  # v1, which transformers does not know
    config = (MODELS | UNSERVED)[name]()
    for key, value in changes.items():
        setattr(config, key, value)
    torch.manual_seed(0)
    model = _class_of(config).from_config(config, dtype=torch.float32).eval()
    for label, tensor in model.state_dict().items():
        if name == "ernie4_5_moe" and "correction_bias" in label:
            tensor.zero_()  # vLLM 0.32's router on a CPU ignores it where scores are softmax, dense as well
        elif tensor.dim() == 1 and ("norm" in label or label.endswith("bias")):
            torch.nn.init.normal_(tensor, mean=float(tensor.mean()), std=0.3)
        elif tensor.dim() > 1:
            torch.nn.init.normal_(tensor, std=0.1)
    model.save_pretrained(folder)
    return folder


def _class_of(config: Any) -> Any:
    kinds = transformers.AutoModelForImageTextToText, transformers.AutoModelForCausalLM
    return next(kind for kind in kinds if type(config) in kind._model_mapping)


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
    with torch.device("meta"):
        model = _class_of(config).from_config(config, dtype=torch.bfloat16)
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
