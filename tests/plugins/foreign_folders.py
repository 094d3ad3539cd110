"""Small random models that other tools pruned and saved in their own ways, with the forward pass that those tools have.

Torch-Pruning prunes by its own code, as its examples/LLMs/prune_llm.py does. FLAP's slicing, biases and folder are as
in its lib/prune.py; what it removes is random. Folders of Puzzletron, with the keys of AnyModel, follow the schemas in
NVIDIA's Model-Optimizer (block_config.py in three versions, utils/vllm_adapter.py) and in vllm#36512. Those of LLM-Drop
keep the tensors of dropped blocks, as its configs with two lists do.
"""

import copy
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tiny_models
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

SIZES = tiny_models.SIZES | {"vocab_size": 320, "num_hidden_layers": 4}
WEIGHTS = "model.safetensors"
BLOCKS = [  # query heads, KV heads, channels; 0: the block is gone. Puzzletron keeps query heads and merges KV heads
    (12, 4, 40), (12, 2, 64), (0, 0, 33), (12, 4, 0)
]  # fmt: skip


def llama(**settings: Any) -> Any:
    """Return a random Llama in float32."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**SIZES, **settings})).float().eval()
    model.generation_config.eos_token_id = None
    return model


def torch_pruning(folder: Path) -> Any:
    """Prune heads and channels by Torch-Pruning with one threshold for all layers, and save with save_pretrained."""
    import torch_pruning as tp

    model = llama(num_key_value_heads=12, use_cache=False)
    layers = model.model.layers
    for index, layer in enumerate(layers):  # else all layers of a random model keep alike
        layer.mlp.up_proj.weight.data *= 1 + index / 4
    heads = {getattr(layer.self_attn, f"{name}_proj"): 12 for layer in layers for name in "qkv"}
    outputs = [part for layer in layers for part in (layer.self_attn.o_proj, layer.mlp.down_proj)]
    warnings.simplefilter("ignore")  # it warns of norms, which nothing here prunes; pytest restores the filters
    pruner = tp.pruner.BasePruner(
        model, torch.arange(1, 9)[None], importance=tp.importance.GroupMagnitudeImportance(p=2), global_pruning=True,
        pruning_ratio=0.4, head_pruning_ratio=0.4, num_heads=heads, prune_num_heads=True, prune_head_dims=False,
        ignored_layers=[model.lm_head, model.model.embed_tokens, *outputs], output_transform=lambda out: out.logits,
    )  # fmt: skip
    for group in pruner.step(interactive=True):
        group.prune()
    for layer in layers:  # as in its example: the config is true of the last layer alone
        model.config.intermediate_size = layer.mlp.gate_proj.out_features
        heads = layer.self_attn.q_proj.out_features // layer.self_attn.head_dim
        if SIZES["hidden_size"] % heads == 0:  # else transformers does not save it
            model.config.num_attention_heads = model.config.num_key_value_heads = heads
    model.config.use_cache = True
    model.save_pretrained(folder)
    return model


def of_flap(folder: Path) -> Any:
    """Save a Llama as FLAP does: without some heads and channels, and with a bias for what they added on average."""
    model, generator = llama(num_key_value_heads=12), torch.Generator().manual_seed(1)
    for layer in model.model.layers:
        for part, inputs, output, units, size in (
            (layer.self_attn, "qkv", "o_proj", 12, 32), (layer.mlp, ("gate", "up"), "down_proj", 64, 1)
        ):  # fmt: skip
            kept = (torch.rand(units, generator=generator) > 0.4).repeat_interleave(size)
            for linear in (getattr(part, f"{name}_proj") for name in inputs):
                linear.weight = nn.Parameter(linear.weight[kept])
            write = getattr(part, output)
            write.bias = nn.Parameter((torch.rand(len(kept), generator=generator) * ~kept) @ write.weight.T)
            write.weight = nn.Parameter(write.weight[:, kept].contiguous())
    model.save_pretrained(folder)
    return model


class NoAttention(nn.Module):
    """What NVIDIA's patcher puts in the place of attention."""

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        return torch.zeros_like(hidden_states), None


class NoMLP(nn.Module):
    """The same for an MLP."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(hidden_states)


def of_blocks() -> Any:
    """Return a Llama with the layers of BLOCKS, each built from its own config, as NVIDIA's patcher does."""
    model = llama()
    model.config.layer_types = None
    for index, (_, kv_heads, width) in enumerate(BLOCKS):
        own = copy.copy(model.config)
        own.num_key_value_heads, own.intermediate_size = kv_heads or 4, width or 1
        layer = LlamaDecoderLayer(own, index)
        for name, parameter in layer.named_parameters():
            nn.init.normal_(parameter, mean=float("norm" in name), std=0.15)
        if not kv_heads:
            layer.self_attn, layer.input_layernorm = NoAttention(), nn.Identity()
        if not width:
            layer.mlp, layer.post_attention_layernorm = NoMLP(), nn.Identity()
        model.model.layers[index] = layer
    return model.float().eval()


def _write_config(folder: Path, **keys: Any) -> None:
    config = {**LlamaConfig(**SIZES).to_dict(), "model_type": "llama", "dtype": "float32", **keys}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))


def block_configs(schema: str) -> list[dict[str, Any]]:
    """Return BLOCKS with every key that the dataclasses of a version of block_config.py write, also without a use."""
    common = {"replace_with_linear": False, "sparsify": None, "weights_precision": "bf16"}
    found: list[dict[str, Any]] = []
    for heads, kv_heads, width in BLOCKS:
        if schema == "typed":
            attention = {"num_kv_heads": kv_heads, "num_query_heads": heads, "qk_head_dim": 32, "v_head_dim": 32,
                         "sliding_window_size": "full", "k_eq_v": False} if kv_heads else {}  # fmt: skip
            ffn = {"intermediate_size": width} if width else {}
            parts = ("attention", attention), ("ffn", ffn)
            found.append(
                {"subblock_configs": [{"kind": kind, "name": kind, "no_op": not part, **part} for kind, part in parts]}
            )
            continue
        attention = {**common, "no_op": not kv_heads, "mamba": None, "llama4": None}
        ffn = {**common, "no_op": not width, "moe": None, "intermediate_size": width or None}
        if schema == "asdict":
            attention["num_key_value_heads"] = kv_heads or None
        else:
            attention |= {"n_heads_in_group": heads // kv_heads if kv_heads else None, "window_length": None,
                          "num_sink_tokens": None, "use_prefill_window_in_sink_attention": False if kv_heads else None,
                          "unshifted_sink": False if kv_heads else None}  # fmt: skip
            ffn |= {"gated": True if width else None, "hidden_act": "silu" if width else None}
        found.append({"attention": attention, "ffn": ffn, "parallel_blocks": None})
    return found


def puzzletron(folder: Path) -> Any:
    """Save BLOCKS as Puzzletron does: its newest block_configs with the keys of AnyModel, a file for every block in a
    folder of their own."""
    model, parts, weight_map = of_blocks(), dict[str, dict[str, torch.Tensor]](), dict[str, str]()
    _write_config(
        folder, architectures=["AnyModel"], base_architecture="LlamaForCausalLM", anymodel_arch_info={},
        block_configs=block_configs("typed"), per_layer_config=_per_layer_config(),
    )  # fmt: skip
    for name, tensor in model.state_dict().items():
        words = name.split(".")
        part = f"block_{words[2]}_{'attention' if 'attn' in name else 'ffn'}" if words[1] == "layers" else words[-2]
        parts.setdefault(part, {})[name] = tensor.contiguous()
        weight_map[name] = f"subblocks_safetensors/{part}.safetensors"
    (folder / "subblocks_safetensors").mkdir()
    for part, tensors in parts.items():
        save_file(tensors, folder / "subblocks_safetensors" / f"{part}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return model


def _per_layer_config() -> dict[str, dict[str, Any]]:
    """Return BLOCKS as AnyModel reads them: only layers and fields that differ."""
    layers: dict[str, dict[str, Any]] = {}
    for index, (_, kv_heads, width) in enumerate(BLOCKS):
        own = {"num_key_value_heads": kv_heads, "intermediate_size": width}
        own = {key: value for key, value in own.items() if value not in (0, SIZES[key])}
        skip = [*["attention"] * (not kv_heads), *["mlp"] * (not width)]
        layers[str(index)] = {**own, **({"skip": skip} if skip else {})}
    return {index: own for index, own in layers.items() if own}


def llm_drop(folder: Path) -> Any:
    """Save a Llama as LLM-Drop does: lists in config.json, one of layers and one of truth values, and all tensors."""
    model = llama()
    _write_config(
        folder, architectures=["LlamaForCausalLM"], drop_attn_list=[2, 1], drop_mlp_list=[False, True, False, False],
        auto_map={"AutoModelForCausalLM": "modeling_dropped_llama.LlamaForCausalLM"},
    )  # fmt: skip
    save_file({name: each.contiguous() for name, each in model.state_dict().items()}, folder / WEIGHTS)
    for index in (1, 2):
        model.model.layers[index].self_attn, model.model.layers[index].input_layernorm = NoAttention(), nn.Identity()
    model.model.layers[1].mlp, model.model.layers[1].post_attention_layernorm = NoMLP(), nn.Identity()
    return model


def pruned(folder: Path, **sizes: Any) -> None:
    """Save a Llama of which one layer has lost 24 of 64 channels, with the config of the dense model."""
    model = llama(**sizes)
    mlp = model.model.layers[1].mlp
    for linear in (mlp.gate_proj, mlp.up_proj):
        linear.weight = nn.Parameter(linear.weight[:40].detach())
    mlp.down_proj.weight = nn.Parameter(mlp.down_proj.weight[:, :40].detach().contiguous())
    model.save_pretrained(folder)


FOLDERS: dict[str, Callable[[Path], Any]] = {
    "Torch-Pruning": torch_pruning,
    "FLAP": of_flap,
    "Puzzletron": puzzletron,
    "LLM-Drop": llm_drop,
}
