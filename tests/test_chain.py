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
from transformers import AutoModelForCausalLM, AutoTokenizer

from ddp_models.loading import load_model
from ddp_models.source import Source, open_source
from ddp_prune.export import export
from ddp_prune.gates import GatedModel, Masks
from ddp_vllm.checkpoint import read_checkpoint
from ddp_vllm.families import unit_shapes

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
def exported(dense: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Source, Masks, Path]]:
    """The dense model in each dtype, its gates, and the pruned folder made of both."""
    folder = tmp_path_factory.mktemp("chain")
    wide = folder / "dense-float32"
    model = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32)
    model.save_pretrained(wide)
    AutoTokenizer.from_pretrained(dense).save_pretrained(wide)
    made = {}
    for dtype, origin in (("float32", wide), ("bfloat16", dense)):
        source = open_source(str(origin))
        gates = _gates(source)
        output = folder / f"pruned-{dtype}"
        export(source, gates, output, head_unit="kv-group", provenance={})
        made[dtype] = (source, gates, output)
    return made


@pytest.fixture(scope="module")
def served(exported: Any, serve: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    """Return the prompts, and vLLM's greedy tokens and their log-probabilities, in each dtype."""
    prompts = [AutoTokenizer.from_pretrained(exported["float32"][2])(prompt)["input_ids"] for prompt in PROMPTS]
    jobs = {
        dtype: {"folder": str(folder), "options": {"dtype": dtype}, "prompts": prompts, "num_tokens": NEW_TOKENS}
        for dtype, (_, _, folder) in exported.items()
    }
    results = serve(jobs)
    return {dtype: [*zip(prompts, results[dtype]["outputs"], strict=True)] for dtype in jobs}


def _masked(source: Source, gates: Masks, ids: list[int]) -> torch.Tensor:
    """Return logits [tokens, V] of the stock dense model with the gates in its hooks."""
    gated = GatedModel(load_model(source, "auto"), source.family, source.sizes, "kv-group")
    with torch.no_grad(), gated.masks(gates):
        return gated.model(torch.tensor([ids])).logits[0].float()


def _chosen(logits: torch.Tensor, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """Return the log-probabilities of the tokens after a prompt."""
    chosen = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    return chosen.gather(1, torch.tensor(tokens)[:, None]).flatten()


def test_masked_equals_exported_equals_vllm_in_float32(exported: Any, served: Any) -> None:
    source, gates, folder = exported["float32"]
    widths = read_checkpoint(folder).layers
    first, _, third = _emptied(source)
    assert not widths[first].num_kv_heads and not widths[third].intermediate_size
    assert any(layer.intermediate_size % 8 for layer in widths)
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    for prompt, answer in served["float32"]:
        ids = prompt + answer["tokens"]
        with torch.no_grad():
            plain = model(torch.tensor([ids])).logits[0]
            generated = model.generate(
                torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1
            )
        assert (plain - _masked(source, gates, ids)).abs().max() < 1e-4
        assert generated[0, len(prompt) :].tolist() == answer["tokens"]
        assert answer["logprobs"] == pytest.approx(_chosen(plain, prompt, answer["tokens"]).tolist(), abs=1e-4)


def test_bfloat16_is_as_near_as_bfloat16_itself(exported: Any, served: Any) -> None:
    """The yardstick is the masked dense model in bfloat16: how far its rounding is from float32."""
    source, gates, folder = exported["bfloat16"]
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    errors: dict[str, list[float]] = {"masked": [], "exported": [], "vLLM": []}
    for prompt, answer in served["bfloat16"]:
        ids = prompt + answer["tokens"]
        with torch.no_grad():
            plain = model(torch.tensor([ids])).logits[0].float()
        exact = _chosen(_masked(exported["float32"][0], gates, ids), prompt, answer["tokens"])
        masked = _chosen(_masked(source, gates, ids), prompt, answer["tokens"])
        found = (masked, _chosen(plain, prompt, answer["tokens"]), torch.tensor(answer["logprobs"]))
        for name, logprobs in zip(errors, found, strict=True):
            errors[name] += (logprobs - exact).abs().tolist()
    own, *others = (sum(each) / len(each) for each in errors.values())
    assert own < 0.1 and max(others) < 2 * own + 1e-3, errors
