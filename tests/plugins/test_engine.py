"""What else vLLM does with a model, done with pruned ones: adapters, drafts, quantised weights, cached prefixes.

Tiny random models; each engine checks several facts, and one process runs them all.
"""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Serve
from peft import LoraConfig, PeftModel, get_peft_model
from quantised import quantise
from tiny_models import NOTHING_LAST, NUM_NEW_TOKENS, PROMPTS, RAGGED_LAYERS, generate, make_checkpoint
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

pytestmark = pytest.mark.vllm

PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ALIGNED_LAYERS = [  # every input and output a multiple of 32, as the CPU's INT4 kernel asks
    {"query_heads_per_kv_head": [3, 1], "intermediate_size": 32},
    {"query_heads_per_kv_head": [], "intermediate_size": 0},
    {"query_heads_per_kv_head": [2], "intermediate_size": 64},
]
DRAFT_TOKENS, DRAFTED = 3, 25  # 1 token from the prompt, then six steps of 3 accepted drafts and 1 of the target's own
LOGPROB_TOLERANCE = 1e-4


def make_adapter(folder: Path, base: Path, **settings: Any) -> dict[str, Any]:
    """Write a random LoRA adapter for the model in `base`; return what transformers and peft generate with it."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    config = LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": PROJECTIONS, "init_lora_weights": False, **settings})
    adapted = get_peft_model(model, config).eval()
    adapted.save_pretrained(folder)
    return {"outputs": [generate(adapted, prompt) for prompt in PROMPTS]}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The folders, and what transformers makes of them."""
    root = tmp_path_factory.mktemp("engine")
    sizes = {"num_hidden_layers": len(RAGGED_LAYERS), "vocab_size": 128, "hidden_size": 48, "intermediate_size": 64}
    heads = {"num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 32, "initializer_range": 0.15}
    torch.manual_seed(3)
    dense = LlamaForCausalLM(LlamaConfig(**sizes, **heads, max_position_embeddings=256)).eval()
    dense.save_pretrained(root / "dense")
    references = {
        "ragged": make_checkpoint(root / "ragged", "Llama", RAGGED_LAYERS),
        "phi3": make_checkpoint(root / "phi3", "Phi3", RAGGED_LAYERS),
        "int8": make_checkpoint(root / "int8", "Llama", RAGGED_LAYERS, attention_bias=True, mlp_bias=True),
        "aligned": make_checkpoint(root / "aligned", "Llama", ALIGNED_LAYERS, hidden_size=64),
    }
    make_checkpoint(root / "other", "Llama", [*RAGGED_LAYERS[:5], {**RAGGED_LAYERS[5], "intermediate_size": 32}, RAGGED_LAYERS[6]])
    make_checkpoint(root / "whole", "Llama", [RAGGED_LAYERS[1], *RAGGED_LAYERS[1:]])
    shutil.copytree(root / "int8", root / "int4 of odd widths")
    return {
        "root": root,
        **references,
        "int8": quantise(root / "int8", 8),
        "int4": quantise(root / "aligned", 4),
        "adapted": make_adapter(root / "adapter", root / "ragged"),
        "adapted phi3": make_adapter(
            root / "adapter phi3", root / "phi3", target_modules=["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
        ),
        "narrower": make_adapter(root / "narrower", root / "other"),
        "on a removed block": make_adapter(root / "on a removed block", root / "whole"),
        "longer": [generate(dense, prompt, 25) for prompt in PROMPTS],
    }
