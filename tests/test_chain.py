"""The chain on the real model: masked in transformers = exported through remote code = served by vLLM.

SmolLM2-135M, or the dense model in the folder DDP_VLLM_REAL_MODEL, with random gates: whole blocks removed, widths that
are not multiples of 8, scales away from 1. Mild ones: a model that random cuts have broken amplifies rounding, and
nothing could be said to 1e-4.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from seams import GatedModel, Masks, Source, export, load_model, open_source
from transformers import AutoModelForCausalLM, AutoTokenizer

import ddp_vllm
from ddp_vllm.checkpoint import read_checkpoint
from ddp_vllm.dimensions import unit_shapes

pytestmark = [pytest.mark.real_model, pytest.mark.vllm]
PROMPTS = ("The capital of France is", "def fibonacci(n):", "Once upon a time there was a fox who")
NEW_TOKENS = 12


def _gates(source: Source) -> Masks:
    generator = torch.Generator().manual_seed(0)
    gates = {}
    for kind, shape in unit_shapes(source.sizes, "kv-group").items():
        alive = torch.rand(shape, generator=generator) < 0.995
        gates[kind] = (0.95 + 0.1 * torch.rand(shape, generator=generator)) * alive
    first, second, third = _emptied(source)
    for layer in (first, second):  # attention gone: alone, and with the MLP
        gates["attn"][layer] = 0
    for layer in (second, third):  # MLP gone: with the attention, and alone
        gates["mlp"][layer] = 0
    return gates


def _emptied(source: Source) -> tuple[int, int, int]:
    return tuple(round(share * source.sizes.num_layers) for share in (0.4, 0.67, 0.9))  # type: ignore[return-value]


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
    export(source, gates, folder / "pruned", head_unit="kv-group", provenance={})
    return source, gates, folder / "pruned"


def _masked(source: Source, gates: Masks, ids: list[int]) -> torch.Tensor:
    """Return logits [tokens, V] of the stock dense model with the gates in its hooks."""
    gated = GatedModel(load_model(source, "auto"), source.widths, source.sizes, "kv-group")
    with torch.no_grad(), gated.masks(gates):
        return gated.model(torch.tensor([ids])).logits[0].float()


def test_masked_equals_exported_equals_vllm_in_float32(exported: Any, serve: Callable[..., dict[str, Any]]) -> None:
    source, gates, folder = exported
    prompts = [AutoTokenizer.from_pretrained(folder)(prompt)["input_ids"] for prompt in PROMPTS]
    job = {"folder": str(folder), "options": {"dtype": "float32"}, "prompts": prompts, "num_tokens": NEW_TOKENS}
    answers = serve({"pruned": job})["pruned"]["outputs"]
    widths = read_checkpoint(folder).layers
    first, _, third = _emptied(source)
    assert not widths[first].num_kv_heads and not widths[third].intermediate_size
    assert any(layer.intermediate_size % 8 for layer in widths)
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = prompt + answer["tokens"]
        with torch.no_grad():
            plain = model(torch.tensor([ids])).logits[0]
            generated = model.generate(
                torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1
            )
        assert (plain - _masked(source, gates, ids)).abs().max() < 1e-4
        assert generated[0, len(prompt) :].tolist() == answer["tokens"]
        chosen = plain.log_softmax(-1)[len(prompt) - 1 : -1].gather(1, torch.tensor(answer["tokens"])[:, None])
        assert answer["logprobs"] == pytest.approx(chosen.flatten().tolist(), abs=1e-4)


@pytest.mark.nightly
def test_a_folder_that_prune_trained_is_served_as_transformers_computes_it(
    exported: Any, serve: Callable[..., dict[str, Any]], tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights and masks are trained together, and the kept scales are folded into the trained weights."""
    monkeypatch.setattr("seams.evaluation_module.SAMPLE_TOKENS", 2)
    source, _, _ = exported
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog, number by number. " * 200)
    settings: Any = {"steps": 2, "batch_size": 1, "seq_len": 64, "heldout_blocks": 1, "train": "weights"}
    settings |= {"learning_rate": 1e-4, "sparsity": 0.1, "data": tmp_path / "text.txt"}
    checkpoint = ddp_vllm.prune(source.folder, output=tmp_path / "out", **settings)
    assert checkpoint.provenance["run"]["train"] == "weights"
    prompts = [AutoTokenizer.from_pretrained(source.folder)(prompt)["input_ids"] for prompt in PROMPTS]
    job = {"folder": str(tmp_path / "out"), "options": {"dtype": "float32"}, "prompts": prompts, "num_tokens": 4}
    answers = serve({"trained": job})["trained"]["outputs"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=True).eval()
    dense = AutoModelForCausalLM.from_pretrained(source.folder).eval()
    name = "model.layers.0.input_layernorm.weight"
    assert not torch.equal(model.state_dict()[name], dense.state_dict()[name])  # trained
    for prompt, answer in zip(prompts, answers, strict=True):
        with torch.no_grad():
            plain = model(torch.tensor([prompt + answer["tokens"]])).logits[0].log_softmax(-1)
        chosen = plain[len(prompt) - 1 : -1].gather(1, torch.tensor(answer["tokens"])[:, None])
        assert answer["logprobs"] == pytest.approx(chosen.flatten().tolist(), abs=1e-4)
