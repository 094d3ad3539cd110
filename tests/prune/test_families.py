"""Every dense family: a random model of the real config class, masked = exported through remote code."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

from ddp_prune.export import export
from ddp_prune.families import FAMILIES
from ddp_prune.gates import GatedModel, unit_shapes
from ddp_prune.source import load_model, open_source
from ddp_vllm.checkpoint import read_checkpoint

SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 72, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 4, "initializer_range": 0.2, "eos_token_id": 0, "bos_token_id": None, "pad_token_id": None,
}  # fmt: skip
CASES = {
    "llama": LlamaConfig(**SIZES, head_dim=8),
    "mistral": MistralConfig(**SIZES, head_dim=24, sliding_window=6),  # heads wider than hidden / heads, as in Nemo
    "qwen2": Qwen2Config(**SIZES),  # biases on q, k and v
    "qwen3": Qwen3Config(**SIZES, head_dim=16),  # a norm on each query and key head
    "smollm3": SmolLM3Config(**SIZES, no_rope_layers=[1, 0, 1, 0]),  # layers without positions
    "granite": GraniteConfig(  # scales on blocks, embeddings, scores and logits; biases everywhere
        **SIZES, attention_bias=True, mlp_bias=True, residual_multiplier=0.4, embedding_multiplier=3.0,
        attention_multiplier=0.2, logits_scaling=4.0,
    ),
    "gemma2": Gemma2Config(  # norms around blocks, caps on scores and logits, windows in every other layer
        **SIZES, head_dim=16, attention_bias=True, sliding_window=6, query_pre_attn_scalar=16,
        attn_logit_softcapping=4.0, final_logit_softcapping=3.0,
    ),
    "gemma3_text": Gemma3TextConfig(  # also a norm on each query and key head
        **SIZES, head_dim=16, sliding_window=6, query_pre_attn_scalar=16,
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
    "phi3": Phi3Config(**SIZES, sliding_window=6),  # q, k and v in one projection, gate and up in one
}  # fmt: skip


def test_every_row_has_a_case() -> None:
    assert set(CASES) == {name for name, family in FAMILIES.items() if not family.expert_rows}


@pytest.mark.parametrize("head_unit", ["kv-group", "query-head"])
@pytest.mark.parametrize("model_type", CASES)
def test_masked_equals_exported(model_type: str, head_unit: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CASES[model_type])
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name:  # initialised to 0 or 1, where nothing could go wrong
            torch.nn.init.normal_(parameter, mean=float(parameter.detach().mean()), std=0.5)
    model.save_pretrained(tmp_path / "dense")
    source = open_source(str(tmp_path / "dense"))
    gates = {
        kind: (torch.rand(shape) + 0.5) * (torch.rand(shape) < 0.7)
        for kind, shape in unit_shapes(source.sizes, head_unit).items()
    }
    gates["attn"][1], gates["mlp"][2] = 0.0, 0.0  # whole blocks
    gates["attn"][3, 0], gates["mlp"][0, :7] = 1.0, 1.0  # none is gone by chance
    export(source, gates, tmp_path / "pruned", head_unit=head_unit, provenance={})
    tokens = torch.randint(1, 96, (2, 17))
    gated = GatedModel(load_model(source, "float32"), source.family, source.sizes, head_unit)
    pruned = AutoModelForCausalLM.from_pretrained(tmp_path / "pruned", trust_remote_code=True).eval()
    with torch.no_grad(), gated.masks(gates):
        masked = gated.model(tokens).logits
        exported = pruned(tokens).logits
    torch.testing.assert_close(exported, masked, atol=2e-5, rtol=0)
    assert (masked - gated.model(tokens).logits).abs().max() > 0.1  # the masks do something
    leftover = ("layers.1.self_attn.", "layers.1.input_layernorm.", "layers.2.mlp.", "layers.2.pre_feedforward")
    assert not [name for name in read_checkpoint(tmp_path / "pruned").shapes if any(part in name for part in leftover)]
