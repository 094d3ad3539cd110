"""Tiny random MoE checkpoints with ragged experts, cut by hand from dense ones: no code of ours makes the reference.

The reference is the dense transformers model of the family whose removed channels are zero; what is written is the
same model with those channels left out.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny_models import PROMPTS, generate
from transformers import AutoConfig, AutoModelForCausalLM

from ddp_models.loading import load_model
from ddp_models.source import open_source
from ddp_prune.export import export
from ddp_prune.gates import GatedModel
from ddp_vllm.families import unit_shapes
from ddp_vllm.remote_code.modeling_deepseek import register_deepseek

NUM_EXPERTS, EXPERT_WIDTH = 8, 64
# one of each: gone, a single channel, even, odd, one above 16, one below and above 32, dense
RAGGED_WIDTHS = (0, 1, 2, 5, 17, 31, 33, 64)
_EXPERT = re.compile(r"layers\.(\d+)\.\w+\.experts\.(\d+)\.(\w+)\.weight$")
_DOWN = ("down_proj", "w2")

SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "max_position_embeddings": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_experts_per_tok": 3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.15,
}
OWN_WIDTH = {"intermediate_size": 96, "moe_intermediate_size": EXPERT_WIDTH}
FAMILIES: dict[str, dict[str, Any]] = {
    # the middle layer has a dense MLP: widths must find their layer
    "qwen3_moe": {**OWN_WIDTH, "num_experts": NUM_EXPERTS, "head_dim": 32, "mlp_only_layers": [1]},
    # a shared expert with a gate of its own, biases in attention
    "qwen2_moe": {**OWN_WIDTH, "num_experts": NUM_EXPERTS, "shared_expert_intermediate_size": 40},
    # other names on disk; routing weights that sum to one; one tensor is embedding and head; a hidden size that our CPU
    # kernel does not take
    "mixtral": {
        "intermediate_size": EXPERT_WIDTH,
        "num_local_experts": NUM_EXPERTS,
        "hidden_size": 48,
        "head_dim": 32,
        "tie_word_embeddings": True,
    },
    # norms over all heads, so KV heads as many as query heads
    "olmoe": {"intermediate_size": EXPERT_WIDTH, "num_experts": NUM_EXPERTS, "num_key_value_heads": 2},
    # first layer dense, shared experts, scaled routing weights, latent attention in the only size of vLLM's CPU kernel
    "deepseek_v2": {
        **OWN_WIDTH,
        "n_routed_experts": NUM_EXPERTS,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.5,
        "num_key_value_heads": 2,
        "kv_lora_rank": 512,
        "q_lora_rank": 24,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "n_group": 1,
        "topk_group": 1,
        # as the real ones; vLLM 0.32's CPU kernel for plain interleaved RoPE is wrong with two heads, dense as well
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
        },
    },
    "deepseek": {
        **OWN_WIDTH,
        "n_routed_experts": NUM_EXPERTS,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 2,
    },
}


def ragged_layers(family: str) -> list[tuple[int, ...] | None]:
    """Return the widths of each layer's experts, turned from layer to layer; None where the MLP is dense."""
    dense = {"qwen3_moe": [1], "deepseek_v2": [0], "deepseek": [0]}.get(family, [])
    turned = [RAGGED_WIDTHS[3 * layer :] + RAGGED_WIDTHS[: 3 * layer] for layer in range(SIZES["num_hidden_layers"])]
    return [None if layer in dense else widths for layer, widths in enumerate(turned)]


def make_expert_checkpoint(folder: Path, family: str) -> dict[str, Any]:
    """Write a random pruned MoE model in fp32; return what the dense model with zeros generates."""
    make_dense_experts(folder, family)
    weights, widths = load_file(folder / "model.safetensors"), ragged_layers(family)
    zeroed, compact = cut(weights, widths)
    save_file(zeroed, folder / "model.safetensors", metadata={"format": "pt"})
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    outputs = [generate(reference, prompt) for prompt in PROMPTS]
    save_file(compact, folder / "model.safetensors", metadata={"format": "pt"})
    state_widths(folder / "config.json", widths)
    return {"outputs": outputs, "expert_bytes": sum(w.nbytes for name, w in compact.items() if ".experts." in name)}


def make_dense_experts(folder: Path, family: str, **sizes: int) -> None:
    """Write a random dense MoE model in fp32."""
    torch.manual_seed(0)
    register_deepseek()  # v1, which transformers does not know
    config = AutoConfig.for_model(family, **{**SIZES, **FAMILIES[family], **sizes})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name:  # they start at 0 and 1, where a mix-up would not show
            torch.nn.init.normal_(parameter, mean=float(parameter.detach().mean()), std=0.3)
    model.save_pretrained(folder)


def make_fewer_experts(folder: Path, family: str, dense: Path) -> dict[str, Any]:
    """Write to `dense` a random model and to `folder` what is left without whole experts.

    Returns what the dense model generates whose routers and experts are masked.
    """
    make_dense_experts(dense, family, hidden_size=64)  # which vLLM's CPU kernel takes
    source = open_source(str(dense))
    gates = torch.rand(unit_shapes(source.sizes, "expert")["experts"]) + 0.5
    for row in gates:
        row[torch.randperm(NUM_EXPERTS)[5:]] = 0.0
    export(source, {"experts": gates}, folder, head_unit="expert", provenance={})
    gated = GatedModel(load_model(source, "float32"), source.family, source.sizes, "expert")
    with gated.masks({"experts": gates}):
        return {"outputs": [generate(gated.model, prompt) for prompt in PROMPTS]}


def cut(
    weights: dict[str, torch.Tensor], widths: Sequence[tuple[int, ...] | None]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the weights with random channels of each expert zero, and the same without those channels."""
    zeroed, compact = dict(weights), dict(weights)
    for name, weight in weights.items():
        if (match := _EXPERT.search(name)) is None:
            continue
        layer, expert = int(match[1]), int(match[2])
        sizes = widths[layer]
        assert sizes is not None
        order = torch.randperm(EXPERT_WIDTH, generator=torch.Generator().manual_seed(100 * layer + expert))
        kept, removed = order[: sizes[expert]].sort().values, order[sizes[expert] :]
        axis = 1 if match[3] in _DOWN else 0
        zeroed[name] = weight.index_fill(axis, removed, 0)
        compact[name] = weight.index_select(axis, kept).contiguous()
        if not len(kept):
            del compact[name]
    return zeroed, compact


def state_widths(path: Path, widths: Sequence[tuple[int, ...] | None]) -> None:
    """Turn the dense model's config.json into the pruned one's."""
    config = json.loads(path.read_text())
    heads = [config["num_attention_heads"] // config["num_key_value_heads"]] * config["num_key_value_heads"]
    config["ddp_layers"] = [
        {"query_heads_per_kv_head": heads, "intermediate_size": config["intermediate_size"]}
        if sizes is None
        else {"query_heads_per_kv_head": heads, "intermediate_size": 0, "expert_intermediate_sizes": list(sizes)}
        for sizes in widths
    ]
    config["model_type"] = f"ddp_{config['model_type']}"
    config["architectures"] = [f"DDP{config['architectures'][0]}"]
    path.write_text(json.dumps(config))
