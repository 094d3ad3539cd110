"""What users of plain transformers do with pruned models beside loading them and generating text."""

import pickle
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.auto.auto_factory import add_generation_mixin_to_remote_model

from ddp_vllm.remote_code.configuration_ddp import DDPLlamaConfig, DDPPhi3Config
from ddp_vllm.remote_code.files import WidthsError
from ddp_vllm.remote_code.modeling_ddp import DDPLlamaForCausalLM, DDPPhi3ForCausalLM
from ddp_vllm.remote_code.ragged_experts import RaggedExperts

pytestmark = pytest.mark.slow

SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 4,
    "intermediate_size": 40, "max_position_embeddings": 64, "initializer_range": 0.2, "eos_token_id": None,
    "bos_token_id": None, "pad_token_id": None,
}  # fmt: skip
UNEVEN = [
    {"query_heads_per_kv_head": [2, 1, 2], "intermediate_size": 7},
    {"query_heads_per_kv_head": [], "intermediate_size": 40},
    {"query_heads_per_kv_head": [1], "intermediate_size": 0},
]
WIDTHS = [24, 0, 5, 1, 17, 16, 2, 8]
TOKENS = torch.randint(1, 96, (2, 20), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def llama() -> Any:
    torch.manual_seed(0)
    return DDPLlamaForCausalLM(DDPLlamaConfig(**SIZES, ddp_layers=UNEVEN)).eval()


@pytest.fixture
def mixture() -> Any:
    torch.manual_seed(0)
    experts = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "head_dim": 8}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **experts)).eval()
    for layer in model.model.layers:
        layer.mlp.experts = RaggedExperts(layer.mlp.experts, WIDTHS, ("gate_proj", "up_proj"), "down_proj")
    return model


def _answer(model: Any, **settings: Any) -> torch.Tensor:
    return model.generate(TOKENS, max_new_tokens=8, do_sample=False, pad_token_id=0, **settings)


@pytest.mark.parametrize("settings", [{}, {"prefill_chunk_size": 8}])
def test_a_static_cache_takes_layers_of_different_heads(settings: dict[str, Any], llama: Any) -> None:
    assert torch.equal(_answer(llama, cache_implementation="static", **settings), _answer(llama))


def test_continuous_batching_is_refused_where_heads_differ(llama: Any, mixture: Any) -> None:
    """It would end every request with an empty answer."""
    with pytest.raises(WidthsError, match=r"equal KV heads in all layers; use generate\(\) or vLLM"):
        llama.generate_batch([[1, 2, 3]], generation_config=GenerationConfig(max_new_tokens=2, eos_token_id=-1))
    assert mixture.init_continuous_batching(generation_config=GenerationConfig(eos_token_id=-1)) is not None


def test_a_model_can_be_pickled() -> None:
    """Phi-3's class has a method that makes transformers wrap it, unless it names GenerationMixin itself."""
    torch.manual_seed(0)
    wrapped = add_generation_mixin_to_remote_model(DDPPhi3ForCausalLM)
    model = wrapped(DDPPhi3Config(**SIZES, ddp_layers=[{"query_heads_per_kv_head": [2], "intermediate_size": 3}] * 3))
    again = pickle.loads(pickle.dumps(model.eval()))
    assert torch.equal(again(TOKENS).logits, model(TOKENS).logits)


def test_every_expert_gets_a_gradient(mixture: Any) -> None:
    """Data-parallel training waits for all of them; few tokens reach few experts."""
    mixture.train()(TOKENS[:1, :2], labels=TOKENS[:1, :2]).loss.backward()
    gradients = {name: weight.grad for name, weight in mixture.named_parameters() if ".experts." in name}
    assert len(gradients) == 3 * 3 * 7 and all(gradient is not None for gradient in gradients.values())
    assert not all(gradient.any() for gradient in gradients.values())


def test_a_mixture_can_be_compiled(mixture: Any) -> None:
    """Without a backend; what depends on the routing is not frozen."""
    del mixture.model.layers[1:]  # to trace one layer takes 10 s of a busy core
    compiled = torch.compile(mixture, backend="eager")
    with torch.no_grad():
        for tokens in (TOKENS, TOKENS.flip(1)):
            torch.testing.assert_close(compiled(tokens, use_cache=False).logits, mixture(tokens).logits)
