"""Pruned checkpoints with quantised weights in the format of compressed-tensors, and what they compute by definition."""

import json
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from safetensors.torch import load_file, save_file
from tiny_models import PROMPTS, generate
from torch import nn
from transformers import AutoModelForCausalLM

GROUP = 32
INT8_WEIGHTS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
INT8_TOKENS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
INT4_WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}


def round_to_grid(values: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return integers and the scale of each row (last axis) by the symmetric absolute-maximum rule."""
    top = 2 ** (bits - 1) - 1
    scale = values.abs().amax(-1, keepdim=True).clamp_min(1e-10) / top
    return (values / scale).round().clamp(-top - 1, top), scale


def quantise(folder: Path, bits: int) -> dict[str, Any]:
    """Quantise all projections of a checkpoint in place; return what transformers generates with the rounded weights.

    bits: 8, a scale an output channel, activations rounded token by token; or 4, a scale a group, activations as is.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    weights = load_file(folder / "model.safetensors")
    for name, module in model.model.named_modules(prefix="model"):
        if isinstance(module, nn.Linear):
            weight = weights.pop(f"{name}.weight")
            if bits == 8:
                whole, scale = round_to_grid(weight, 8)
                weights |= {f"{name}.weight": whole.to(torch.int8), f"{name}.weight_scale": scale}
                module.register_forward_pre_hook(_round_activations)
            else:
                whole, scale = round_to_grid(weight.unflatten(-1, (-1, GROUP)), 4)
                weights[f"{name}.weight_packed"] = pack_to_int32(whole.flatten(-2).to(torch.int8), 4)
                weights[f"{name}.weight_scale"] = scale.squeeze(-1)
                weights[f"{name}.weight_shape"] = torch.tensor(weight.shape)
            module.weight.data = (whole * scale).reshape(weight.shape)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    group = {"targets": ["Linear"], "weights": INT8_WEIGHTS, "input_activations": INT8_TOKENS}
    if bits == 4:
        group = {"targets": ["Linear"], "weights": INT4_WEIGHTS, "input_activations": None}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized" if bits == 8 else "pack-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }
    (folder / "config.json").write_text(json.dumps(config))
    return {"outputs": [generate(model, prompt) for prompt in PROMPTS]}


def _round_activations(_: nn.Module, inputs: tuple[torch.Tensor]) -> torch.Tensor:
    whole, scale = round_to_grid(inputs[0], 8)
    return whole * scale
