"""Sharding: what it requires, and that a sharded model equals the whole one. `test_processes.py` uses two processes."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Gemma2Config, Gemma2ForCausalLM

from ddp_models.loading import check_sharding, load_model, load_sharded
from ddp_models.source import open_source
from ddp_prune.recipe import Recipe
from ddp_training.memory import pending_bytes
from ddp_vllm.errors import ModelError, SettingError

TOKENS = torch.randint(1, 320, (4, 64), generator=torch.Generator().manual_seed(0))


def test_sharding_requires_several_processes_with_equal_batches() -> None:
    with pytest.raises(SettingError, match="there is one; start with: accelerate launch"):
        check_sharding(Recipe(model="m", sparsity=0.2, shard=True), 1)
    with pytest.raises(SettingError, match=r"batch_size is 10, which 4 processes .* make it 12"):
        check_sharding(Recipe(model="m", sparsity=0.2, shard=True, batch_size=10), 4)
    check_sharding(Recipe(model="m", sparsity=0.2, shard=True), 8)


@pytest.fixture
def group_of_one(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'group'}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_a_sharded_model_equals_the_model_loaded_whole(group_of_one: None, tmp_path: Path) -> None:
    """Gemma-2's cap on scores, so tight that it shows, and float16, which is trained in bfloat16."""
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=320, hidden_size=64, intermediate_size=32, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=4, head_dim=8, attn_logit_softcapping=0.5, initializer_range=0.5, query_pre_attn_scalar=1,
    )  # fmt: skip
    Gemma2ForCausalLM(config).half().save_pretrained(tmp_path / "gemma")
    source = open_source(str(tmp_path / "gemma"))
    for dtype, used in (("auto", torch.bfloat16), ("float32", torch.float32)):
        whole, sharded = load_model(source, dtype), load_sharded(source, dtype, torch.device("cpu"), 1)
        assert sharded.config._attn_implementation == whole.config._attn_implementation == "eager"
        assert {parameter.dtype for parameter in sharded.parameters()} == {used} == {whole.dtype}
        layer = sum(parameter.nbytes for parameter in whole.get_decoder().layers[0].parameters())
        assert pending_bytes(sharded) == 2 * layer  # the layer in use and the next one
        with torch.no_grad():
            capped = whole(TOKENS).logits
            assert torch.equal(sharded(TOKENS).logits, capped)
    whole.set_attn_implementation("sdpa")
    with torch.no_grad():
        assert (whole(TOKENS).logits - capped).abs().max() > 0.1
    weights = load_file(tmp_path / "gemma" / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "gemma" / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks model\.layers\.1\.mlp\.up_proj\.weight.*1 weights in all"):
        load_sharded(source, "auto", torch.device("cpu"), 1)
