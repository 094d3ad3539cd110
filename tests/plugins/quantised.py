"""Pruned checkpoints with quantised weights, as compressed-tensors writes them, and what they compute by definition."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny_models import edit_config, load_model
from torch import nn

GROUP = 32
INT8_WEIGHTS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
INT8_TOKENS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
INT4_WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}


def round_to_grid(values: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return integers and the scale of each row (last axis) by the symmetric absolute-maximum rule."""
    top = 2 ** (bits - 1) - 1
    scale = values.abs().amax(-1, keepdim=True).clamp_min(1e-10) / top
    return (values / scale).round().clamp(-top - 1, top), scale


def pack(whole: torch.Tensor) -> torch.Tensor:
    """Pack integers -8…7 along the last axis, eight an int32, the first in the lowest bits."""
    nibbles = (whole.to(torch.int64) + 8).unflatten(-1, (-1, 8))
    return (nibbles << torch.arange(0, 32, 4)).sum(-1).to(torch.int32)


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """Return what `pack` was given."""
    nibbles = (packed.to(torch.int64)[..., None] >> torch.arange(0, 32, 4)) & 15
    return (nibbles - 8).flatten(-2).float()


def quantise(folder: Path, bits: int) -> Any:
    """Quantise all projections of a checkpoint in place; return the model in transformers with the rounded weights.

    bits: 8, a scale an output channel, activations rounded token by token; or 4, a scale a group, activations as is.
    """
    model = load_model(folder)
    weights = load_file(folder / "model.safetensors")
    for name, module in model.model.named_modules(prefix="model"):
        if isinstance(module, nn.Linear):
            weight = weights.pop(f"{name}.weight").float()
            if bits == 8:
                whole, scale = round_to_grid(weight, 8)
                weights |= {f"{name}.weight": whole.to(torch.int8), f"{name}.weight_scale": scale}
                module.register_forward_pre_hook(_round_activations)
            else:
                whole, scale = round_to_grid(weight.unflatten(-1, (-1, GROUP)), 4)
                weights[f"{name}.weight_packed"] = pack(whole.flatten(-2))
                weights[f"{name}.weight_scale"] = scale.squeeze(-1)
                weights[f"{name}.weight_shape"] = torch.tensor(weight.shape)
            module.weight.data = (whole * scale).reshape(weight.shape)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    state_quantisation(folder, bits)
    return model


def state_quantisation(folder: Path, bits: int) -> None:
    """Say in config.json how the weights are quantised."""
    group = {"targets": ["Linear"], "weights": INT8_WEIGHTS, "input_activations": INT8_TOKENS}
    if bits == 4:
        group |= {"weights": INT4_WEIGHTS, "input_activations": None}
    quantisation = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized" if bits == 8 else "pack-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }
    edit_config(folder, lambda config: config.update(quantization_config=quantisation))


def _round_activations(_: nn.Module, inputs: tuple[torch.Tensor]) -> torch.Tensor:
    whole, scale = round_to_grid(inputs[0], 8)
    return whole * scale
