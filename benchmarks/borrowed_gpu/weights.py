"""Writes the weights of SmolLM2-135M from its GGUF file, as llama.cpp dequantizes them, without a
network.

    python weights.py MODEL.gguf FOLDER     # on the GPU machine; FOLDER has config and tokenizer, 5 s

`pack.py` fails unless the weights come back to the bit.
"""

import json
import sys
from pathlib import Path

import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.torch import save_file

NAMES = {
    "token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}  # fmt: skip
PARTS = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
}  # fmt: skip
HEADS = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}


def read(gguf: Path, folder: Path) -> dict[str, torch.Tensor]:
    """Return a Llama's tensors in bfloat16 by the names of transformers."""
    config, tensors = json.loads((folder / "config.json").read_text()), {}
    for tensor in GGUFReader(gguf).tensors:
        values = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy()).bfloat16()
        if tensor.name not in NAMES:
            _, layer, part, _ = tensor.name.split(".")
            if part in HEADS:  # llama.cpp interleaves the two halves of every head's rotation
                pairs = values.unflatten(0, (config[HEADS[part]], -1, 2))
                values = pairs.transpose(1, 2).reshape(values.shape).contiguous()
            tensors[f"model.layers.{layer}.{PARTS[part]}.weight"] = values
        else:
            tensors[NAMES[tensor.name]] = values
    return tensors


if __name__ == "__main__":
    gguf, folder = map(Path, sys.argv[1:])
    save_file(read(gguf, folder), folder / "model.safetensors", metadata={"format": "pt"})
