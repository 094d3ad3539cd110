"""A pruned checkpoint is an ordinary model to transformers and peft: nothing of ddp-vllm is imported there.

SmolLM2-135M, real weights, query heads cut at random: blocks gone, groups uneven, widths odd.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from seams import export, open_source
from transformers import AutoModelForCausalLM, AutoTokenizer

from ddp_vllm.dimensions import unit_shapes

pytestmark = pytest.mark.real_model
PROMPTS = ["Once upon a time there was a fox who", "def fibonacci(n):"]
PLAIN = Path(__file__).with_name("plain_transformers.py")


@pytest.fixture(scope="module")
def folder(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    source, generator = open_source(str(smollm2)), torch.Generator().manual_seed(0)
    gates = {}
    for kind, shape in unit_shapes(source.sizes, "query-head").items():
        gates[kind] = (torch.rand(shape, generator=generator) < 0.98).float()
    gates["attn"][[0, 12]] = 0  # the first layer's KV cache is the one that counts the tokens
    gates["mlp"][[12, 27]] = 0
    gates["attn"][3] = torch.tensor([1, 1, 0, 1, 0, 0, 1, 1, 1.0])
    output = tmp_path_factory.mktemp("plain") / "pruned"
    export(source, gates, output, head_unit="query-head", provenance={})
    assert json.loads((output / "config.json").read_text())["ddp_layers"][3]["query_heads_per_kv_head"] == [2, 1, 3]
    return output


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder, padding_side="left")


def generate(model: Any, batch: Any, **settings: Any) -> torch.Tensor:
    """Return the 12 greedy tokens after each prompt."""
    return model.generate(**batch, max_new_tokens=12, do_sample=False, pad_token_id=2, **settings)[:, -12:]


def test_a_padded_batch_answers_as_its_prompts_do_alone(model: Any, tokenizer: Any) -> None:
    batch = tokenizer(PROMPTS, padding=True, return_tensors="pt")
    assert not batch["attention_mask"].all()
    together = generate(model, batch)
    for prompt, answer in zip(PROMPTS, together, strict=True):
        alone = tokenizer([prompt], return_tensors="pt")
        assert torch.equal(generate(model, alone)[0], answer)
        assert torch.equal(generate(model, alone, use_cache=False)[0], answer)


def test_the_kv_cache_of_uneven_groups_is_as_compact_as_the_weights(model: Any, tokenizer: Any) -> None:
    cache = model(**tokenizer(PROMPTS[:1], return_tensors="pt")).past_key_values
    assert cache.layers[3].keys.shape[1] == 3  # not 6, the query heads


@pytest.mark.nightly
def test_peft_needs_no_patch(folder: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-I", str(PLAIN), str(folder), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads((tmp_path / "said.json").read_text())
    first, *_, last = said["losses"]
    assert last < first - 0.1  # adapters on every projection learn
    assert said["merged"] < 1e-3  # logits reach 30
    assert said["shapes"]["3.self_attn.k_proj"] == [3 * 64, 4]
