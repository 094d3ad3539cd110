"""Quantized weights as compressed-tensors states and writes them."""

from pathlib import Path
from typing import Any

import torch
from tiny_models import edit_config, edit_weights

GROUP = 32
INT8_WEIGHTS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
INT8_TOKENS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
INT4_WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
ROWS_OF_INT8 = {"format": "int-quantized", "weights": INT8_WEIGHTS, "input_activations": INT8_TOKENS}
GROUPS_OF_INT4 = {"format": "pack-quantized", "weights": INT4_WEIGHTS, "input_activations": None}


def state_quantization(folder: Path, scheme: dict[str, Any]) -> None:
    """State in config.json how the weights are quantized."""
    stated = {"quant_method": "compressed-tensors", "quantization_status": "compressed", "ignore": ["lm_head"]}
    stated |= {"format": scheme["format"], "config_groups": {"group_0": {"targets": ["Linear"], **scheme}}}
    edit_config(folder, lambda config: config.update(quantization_config=stated))


def add_cache_scales(folder: Path, names: dict[str, float]) -> None:
    """State an FP8 KV cache and write a scale for every layer with attention. names: of scales -> their values."""
    scheme = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}
    stated = {"quant_method": "compressed-tensors", "quantization_status": "compressed", "format": "dense"}
    stated |= {"ignore": [], "config_groups": {}, "kv_cache_scheme": scheme}
    edit_config(folder, lambda config: config.update(quantization_config=stated))

    def add(weights: dict[str, torch.Tensor]) -> None:
        for name in [*weights]:
            if name.endswith("k_proj.weight"):
                layer = name.removesuffix("k_proj.weight")
                weights.update({f"{layer}{scale}": torch.tensor([value]) for scale, value in names.items()})

    edit_weights(folder, add)


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """Return the integers -8…7 that are packed along the last axis, eight in an int32, the first in the lowest bits."""
    nibbles = (packed.to(torch.int64)[..., None] >> torch.arange(0, 32, 4)) & 15
    return (nibbles - 8).flatten(-2).float()
