"""Tiny random pruned checkpoints, what plain transformers generates from them, and how compressed-tensors quantizes."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from runs import edit_config, edit_weights
from serving import NUM_NEW_TOKENS, PROMPTS

from ddp_vllm.families import code_of, pruned_config
from ddp_vllm.remote_code import modeling_ddp
from ddp_vllm.remote_code.tensors import dense_type
from ddp_vllm.remote_code.widths import Widths

PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SIZES: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 48, "intermediate_size": 64, "num_attention_heads": 12, "num_key_value_heads": 4,
    "head_dim": 32, "max_position_embeddings": 256, "initializer_range": 0.15, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0,
}  # fmt: skip

RAGGED_LAYERS = [
    {"query_heads_per_kv_head": [], "intermediate_size": 0},  # nothing left, and first: the residual starts here
    {"query_heads_per_kv_head": [3, 1], "intermediate_size": 17},  # uneven groups; width odd, prime, no multiple of 8
    {"query_heads_per_kv_head": [3, 3, 3, 3], "intermediate_size": 0},  # attention as in the dense model, no MLP
    {"query_heads_per_kv_head": [], "intermediate_size": 64},  # no attention, MLP as in the dense model
    {"query_heads_per_kv_head": [3, 2, 1], "intermediate_size": 1},  # three KV heads split over no 2 ranks; one channel
    {"query_heads_per_kv_head": [2], "intermediate_size": 33},  # fewer KV heads than ranks: they are replicated
    {"query_heads_per_kv_head": [1], "intermediate_size": 0},  # last layer without MLP: the final norm adds up
]
NOTHING_LAST = [
    {"query_heads_per_kv_head": [], "intermediate_size": 31},  # first layer: MLP only
    {"query_heads_per_kv_head": [1, 1, 1], "intermediate_size": 0},
    {"query_heads_per_kv_head": [], "intermediate_size": 0},  # nothing left, and last
]


def save_random(folder: Path, build: Callable[[Any], Any], config: Any, seed: int = 0) -> Any:
    """Write a random model in fp32, with every norm and bias away from 1 and 0, where a mix-up would not show."""
    torch.manual_seed(seed)
    model = build(config).float().eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name:
            torch.nn.init.normal_(parameter, mean=float(parameter.detach().mean()), std=0.3)
    model.save_pretrained(folder)
    return model


def save_pruned(folder: Path, family: str, layers: list[dict[str, Any]], **settings: Any) -> Any:
    """Write a random pruned model of `family`."""
    model_class = getattr(modeling_ddp, f"DDP{family}ForCausalLM")
    config = model_class.config_class(**SIZES | {"num_hidden_layers": len(layers)} | settings, ddp_layers=layers)
    return save_random(folder, model_class, config)


def make_checkpoint(folder: Path, family: str, layers: list[dict[str, Any]], **settings: Any) -> dict[str, Any]:
    """Write a random pruned model and return what transformers generates: tokens and log-probabilities."""
    model = save_pruned(folder, family, layers, **settings)
    return {"outputs": [generate(model, prompt) for prompt in PROMPTS]}


def add_remote_code(folder: Path) -> None:
    """Make a folder of `make_checkpoint` one that loads without ddp-vllm, as the export does."""
    config = json.loads((folder / "config.json").read_text())
    exported = pruned_config({**config, "model_type": dense_type(config)}, Widths.of(config))
    (folder / "config.json").write_text(json.dumps(exported))
    for file in code_of(exported):
        shutil.copyfile(file, folder / file.name)


def load_model(folder: Path) -> Any:
    """Load a folder of `make_checkpoint`, or a dense one, in plain transformers."""
    architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
    model_class = getattr(modeling_ddp, architecture)
    return model_class.from_pretrained(folder, dtype=torch.float32).eval()


def make_adapter(folder: Path, model: Any, modules: list[str] = PROJECTIONS) -> dict[str, Any]:
    """Write a random LoRA adapter for a model; return what transformers and peft generate with it."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    config = LoraConfig(target_modules=modules, r=4, lora_alpha=8, init_lora_weights=False)
    adapted = get_peft_model(model, config).eval()
    adapted.save_pretrained(folder)
    return {"outputs": [generate(adapted, prompt) for prompt in PROMPTS]}


@torch.no_grad()
def generate(model: Any, prompt: list[int], num_tokens: int = NUM_NEW_TOKENS) -> dict[str, Any]:
    """Return the greedy tokens and their log-probabilities."""
    inputs = torch.tensor([prompt])
    model.generation_config.eos_token_id = None
    ids = model.generate(
        inputs=inputs,
        attention_mask=torch.ones_like(inputs),
        max_new_tokens=num_tokens,
        do_sample=False,
        pad_token_id=0,
    )
    tokens = ids[0, len(prompt) :]
    logits = model(ids).logits[0, len(prompt) - 1 : -1]
    assert torch.equal(logits.argmax(-1), tokens), "transformers differs with and without its KV cache"
    return {"tokens": tokens.tolist(), "logprobs": score(model, prompt, tokens.tolist())}


@torch.no_grad()
def score(model: Any, prompt: list[int], tokens: list[int]) -> list[float]:
    """Return the log-probabilities of tokens after a prompt."""
    logprobs = model(torch.tensor([prompt + tokens])).logits.log_softmax(-1)[0, len(prompt) - 1 : -1]
    return logprobs.gather(1, torch.tensor(tokens)[:, None]).flatten().tolist()


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
    edit_config(folder, quantization_config=stated)


def add_cache_scales(folder: Path, names: dict[str, float]) -> None:
    """State an FP8 KV cache and write a scale for every layer with attention. names: of scales -> their values."""
    scheme = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}
    stated = {"quant_method": "compressed-tensors", "quantization_status": "compressed", "format": "dense"}
    stated |= {"ignore": [], "config_groups": {}, "kv_cache_scheme": scheme}
    edit_config(folder, quantization_config=stated)

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
