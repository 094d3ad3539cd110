"""The chain on the real model: masked in transformers = exported through remote code = served by vLLM and llama.cpp.

SmolLM2-135M, or the dense model in the folder DDP_VLLM_REAL_MODEL, with random gates: whole blocks removed, widths that
are not multiples of 8, scales away from 1. Mild ones: a model that random cuts have broken amplifies rounding, and
nothing could be said to 1e-4.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import invoke, passed
from seams import Masks, Source, export, gated, open_source
from serving import Serve, job
from test_gguf import Server, assert_same_tokens
from transformers import AutoModelForCausalLM, AutoTokenizer

from ddp_vllm.checkpoint import read_checkpoint
from ddp_vllm.dimensions import unit_shapes

# by day each part of the chain is tested on tiny models: in test_exported, in test_dense and in test_gguf
pytestmark = [pytest.mark.real_model, pytest.mark.vllm, pytest.mark.nightly]
PROMPTS = ("The capital of France is", "def fibonacci(n):", "Once upon a time there was a fox who")
NEW_TOKENS = 12


def _emptied(source: Source) -> tuple[int, int, int]:
    return tuple(round(share * source.sizes.num_layers) for share in (0.4, 0.67, 0.9))  # type: ignore[return-value]


def _gates(source: Source) -> Masks:
    generator = torch.Generator().manual_seed(0)
    gates = {}
    for kind, shape in unit_shapes(source.sizes, "query-head").items():
        alive = torch.rand(shape, generator=generator) < 0.995
        gates[kind] = (0.95 + 0.1 * torch.rand(shape, generator=generator)) * alive
    first, second, third = _emptied(source)
    for layer in (first, second):  # attention gone: alone, and with the MLP
        gates["attn"][layer] = 0
    for layer in (second, third):  # MLP gone: with the attention, and alone
        gates["mlp"][layer] = 0
    gates["attn"][1, 0] = 0  # which leaves uneven groups
    return gates


@pytest.fixture(scope="module")
def dense(smollm2: Path) -> Path:
    return Path(os.environ.get("DDP_VLLM_REAL_MODEL", smollm2))


@pytest.fixture(scope="module")
def exported(dense: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Source, Masks, Path]:
    """The dense model in float32, its gates, and the pruned folder made of both."""
    folder = tmp_path_factory.mktemp("chain")
    AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32).save_pretrained(folder / "dense")
    AutoTokenizer.from_pretrained(dense).save_pretrained(folder / "dense")
    source = open_source(str(folder / "dense"))
    gates = _gates(source)
    export(source, gates, folder / "pruned", head_unit="query-head", provenance={})
    return source, gates, folder / "pruned"


def test_masked_equals_exported_equals_vllm_in_float32(exported: Any, serve: Serve) -> None:
    source, gates, folder = exported
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = [tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    answers = serve({"pruned": job(folder, dtype="float32", prompts=prompts, num_tokens=NEW_TOKENS)})
    widths = read_checkpoint(folder).layers
    first, _, third = _emptied(source)
    assert not widths[first].num_kv_heads and not widths[third].intermediate_size
    assert any(layer.intermediate_size % 8 for layer in widths)
    assert any(len({*layer.query_heads_per_kv_head}) > 1 for layer in widths)
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    masked = gated(source, "query-head")
    for prompt, answer in zip(prompts, answers["pruned"]["outputs"], strict=True):
        ids = torch.tensor([prompt + answer["tokens"]])
        with torch.no_grad(), masked.masks(gates):
            expected = masked.model(ids).logits[0]
        with torch.no_grad():
            plain = model(ids).logits[0]
            generated = model.generate(
                torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1
            )
        assert (plain - expected).abs().max() < 1e-4
        assert generated[0, len(prompt) :].tolist() == answer["tokens"]
        chosen = plain.log_softmax(-1)[len(prompt) - 1 : -1].gather(1, torch.tensor(answer["tokens"])[:, None])
        assert answer["logprobs"] == pytest.approx(chosen.flatten().tolist(), abs=1e-4)


def test_llama_cpp_writes_the_same_text(exported: Any, tmp_path: Path) -> None:
    folder = exported[2]
    passed(invoke("export", folder, "--outtype", "F32", "-o", tmp_path / "model.gguf"))
    tokenizer, server = AutoTokenizer.from_pretrained(folder), Server(tmp_path / "model.gguf")
    assert_same_tokens(tokenizer, server)
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    for text in PROMPTS:
        batch = tokenizer(text, return_tensors="pt")
        expected = model.generate(**batch, max_new_tokens=24, do_sample=False, pad_token_id=2)
        answer = server.ask("/completion", prompt=text, n_predict=24, temperature=0, return_tokens=True)
        assert answer["tokens"] == expected[0, batch["input_ids"].shape[1] :].tolist()
