"""What users of plain transformers and peft do with pruned models after loading them and generating text."""

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import add_remote_code
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


def test_the_kv_cache_of_uneven_groups_is_as_compact_as_the_weights(llama: Any) -> None:
    assert llama(TOKENS).past_key_values.layers[0].keys.shape[1] == 3  # not 5, the query heads


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


def test_experts_can_be_compiled(mixture: Any) -> None:
    """Without a backend; what depends on the routing is not frozen. To trace attention too takes several times as
    long, and it is transformers' own."""
    block = mixture.model.layers[0].mlp
    compiled, x = torch.compile(block, backend="eager"), torch.randn(2, 20, 64)
    with torch.no_grad():
        for inputs in (x, -x):
            torch.testing.assert_close(compiled(inputs), block(inputs))


PEFT = """
import json, sys
for name in ("ddp_vllm", "ddp_prune", "ddp_plugins", "ddp_benchmarks"):
    sys.modules[name] = None  # an editable install would make them importable
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

def load():
    return AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True, dtype=torch.float32)

torch.manual_seed(0)
model, tokens = get_peft_model(load(), LoraConfig(r=4, target_modules="all-linear")), torch.arange(1, 21)[None]
optimizer, losses = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2), []
for _ in range(4):
    losses.append(model(input_ids=tokens, labels=tokens).loss)
    losses[-1].backward()
    optimizer.step()
    optimizer.zero_grad()
model.save_pretrained(sys.argv[2])
with torch.no_grad():
    expected = model.eval()(input_ids=tokens).logits
    merged = PeftModel.from_pretrained(load(), sys.argv[2]).merge_and_unload().eval()(tokens).logits
shapes = [list(part.shape) for name, part in model.named_parameters() if "0.self_attn.k_proj.lora_B" in name]
print(json.dumps([[loss.item() for loss in losses], (merged - expected).abs().max().item(), shapes]))
"""


@pytest.mark.nightly
def test_peft_needs_no_patch(llama: Any, tmp_path: Path) -> None:
    """In a process of its own, where nothing of ddp-vllm can be imported."""
    llama.save_pretrained(tmp_path / "model")
    add_remote_code(tmp_path / "model")
    command = [sys.executable, "-I", "-c", PEFT, str(tmp_path / "model"), str(tmp_path / "adapter")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    (first, *_, last), merged, shapes = json.loads(done.stdout.splitlines()[-1])
    assert last < first - 0.1  # adapters on every projection learn
    assert merged < 1e-4 and shapes == [[3 * 8, 4]]
