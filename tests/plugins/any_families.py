"""The models of `any_models` with narrower MLPs and experts.

The reference is the dense transformers model whose removed channels are zero; what is written is that model with those
channels left out. No code of ours makes either.
"""

import json
import re
from pathlib import Path
from typing import Any

import torch
from any_models import EXPERT, INTERMEDIATE, LAYERS, NUM_EXPERTS
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

WITHOUT_TRANSFORMERS: dict[str, dict[str, Any]] = {  # family whose dense model vLLM computes otherwise -> options
    "minimax_m2": {},  # scores are sigmoid in transformers
    "qwen3_next": {"dtype": "bfloat16"},  # vLLM's linear attention has no other on a CPU
    "qwen3_5": {"dtype": "bfloat16"},
    "qwen3_5_moe": {"dtype": "bfloat16"},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "falcon_h1": {"enable_prefix_caching": False}  # vLLM 0.32 cannot keep Mamba's states on a CPU
}
WRAPPERS = ("mistral3", "qwen3_5", "qwen3_5_moe")
WIDTHS = (33, INTERMEDIATE, 1)  # of the MLPs: odd, dense, a single channel
EXPERT_WIDTHS = (0, 1, 2, 17, 31, 33, 48, EXPERT)  # of a layer's experts, turned from layer to layer
_INPUTS = "gate_proj|up_proj|gate_up_proj|c_fc|fc1|dense_h_to_4h"
_OUTPUTS = "down_proj|c_proj|fc2|dense_4h_to_h|w2"
_FORMS: dict[str, tuple[list[str], str]] = {  # projection -> those of its block, if not gate, up and down
    part: (inputs, output)
    for *inputs, output in (
        ("w1", "w3", "w2"), ("gate_up_proj", "down_proj"), ("c_fc", "c_proj"), ("fc1", "fc2"),
        ("dense_h_to_4h", "dense_4h_to_h"),
    )
    for part in {*inputs, output} - {"down_proj"}
}  # fmt: skip
_MLP = re.compile(rf"(.*\blayers)\.(\d+)\.(mlp|feed_forward)\.({_INPUTS}|{_OUTPUTS})\.(weight|bias)")
_EXPERT = re.compile(r"(.*\blayers)\.(\d+)\.(\w+\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w2|w3)\.weight")


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
    entries = [layers.get(index, {}) for index in range(LAYERS)]
    return compact, {"quant_method": "ddp_widths", "layers_module": layers_module, **blocks, "layers": entries}


def _names(prefix: str, part: str) -> dict[str, Any]:
    """Return the names of a block's projections on disk, of which `part` is one."""
    inputs, output = _FORMS.get(part, (["gate_proj", "up_proj"], "down_proj"))
    return {"inputs": [prefix + name for name in inputs], "output": prefix + output}
