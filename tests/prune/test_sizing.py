"""Estimates for GPUs that are not here describe the run that would follow, with all of its options."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from ddp_prune.fit import CARDS, MODES, Devices, Fit, Mode, SizedModel, choose, fit, flops_per_token, held_bytes
from ddp_prune.models.source import Source, open_source
from ddp_prune.plan import estimate
from ddp_prune.recipe import Recipe
from ddp_vllm import plan
from ddp_vllm.errors import SettingError
from ddp_vllm.families import dimensions_of, family_of

MASKS = Mode("masks", "")


class Found(NamedTuple):
    fit: Fit
    tokens: float
    seconds: float


def on(
    model: Path | str, cards: str = "h100-80gb", sizes: tuple[float, ...] = (0.2,), **settings: Any
) -> dict[Mode, Found]:
    """Return the estimate of each mode."""
    source = open_source(str(model))
    recipes = [Recipe(model=str(model), sparsity=sparsity, **settings) for sparsity in sizes]
    found = estimate(recipes, source, Devices.of_cards(cards))
    return {each[0].mode: Found(*each) for each in found}


def test_an_estimate_follows_the_options(tiny_model: Path) -> None:
    """The tiny model is stored in float32; 8,192 tokens are in flight on a GPU unless options say otherwise."""
    found = on(tiny_model)
    assert found[MASKS].fit.num_sequences == 4 and found[MASKS].tokens == 1000 * 16 * 2048
    assert found[MODES[0]].tokens > found[MASKS].tokens  # with trials of the learning rate
    half = on(tiny_model, dtype="bfloat16")
    assert half[MASKS].fit.peak < found[MASKS].fit.peak
    assert on(tiny_model, sizes=(0.1, 0.2))[MASKS].tokens == pytest.approx(1.3 * found[MASKS].tokens, rel=0.01)
    assert on(tiny_model, batch_size=1, seq_len=256)[MASKS].fit.num_sequences == 1
    assert on(tiny_model, seq_len=8192)[MASKS].fit.num_sequences == 1
    assert on(tiny_model, micro_batch_size=2)[MASKS].fit.num_sequences == 2
    off, again = (on(tiny_model, activation_checkpointing=setting)[MASKS].fit for setting in ("off", "on"))
    assert off.peak > again.peak and found[MASKS].fit == off  # memory holds the activations
    assert list(on(tiny_model, train="lora")) == [MODES[2]]
    assert list(on(tiny_model, optimizer="adamw-8bit", train="weights")) == [MODES[1]]
    assert on(tiny_model, minutes=60)[MASKS].seconds == 3600
    assert on(tiny_model, minutes=60)[MASKS].tokens != found[MASKS].tokens
    assert choose([row.fit for row in found.values()]).mode == MODES[0]
    with pytest.raises(SettingError, match="batch_size is 2, which 4 processes"):
        on(tiny_model, "4xh100-80gb", batch_size=2)


def test_hours_follow_from_dtype_recomputation_and_attention() -> None:
    """A Llama-3.1-8B on an H100: 67 TFLOP/s in float32 and 989 in bfloat16; at 32k tokens attention's products are
    half as many as all others."""
    config = {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072,
    }  # fmt: skip
    shapes = {f"model.layers.0.x{number}.weight": [4096, 4096] for number in range(480)}  # 8.05 B parameters
    source = Source(folder=Path(), config=config, family=family_of(config), sizes=dimensions_of(config), shapes=shapes)
    weights = 2 * 480 * 4096**2

    def flops(mode: Mode = MASKS, checkpointed: bool = True, **settings: Any) -> float:
        found = Fit(mode=mode, checkpointed=checkpointed, num_sequences=1, held=0, passing=0, free=0, leaves_out=False)
        return flops_per_token(Recipe(model="m", sparsity=0.2, **settings), source, found)

    attention = 4 * 32 * 4096 * 16384
    assert flops(seq_len=32768) == 4 * weights + 5.5 * attention and attention == pytest.approx(weights / 2, rel=0.1)
    assert flops(seq_len=32768, checkpointed=False) == 3 * weights + 4.5 * attention
    assert flops(MODES[0], seq_len=32768, distillation=0.0) == 4 * weights + 4.5 * attention


def test_float_32_takes_as_much_longer_as_the_card_is_slower(tiny_model: Path) -> None:
    """The tiny model is stored in float32."""
    seconds = [on(tiny_model, dtype=dtype)[MASKS].seconds for dtype in ("auto", "float32", "bfloat16", "float16")]
    assert seconds[0] == seconds[1] == pytest.approx(989 / 67 * seconds[2]) and seconds[2] == seconds[3]


def test_gemma_2_is_sized_with_the_attention_that_it_runs_with(tiny_model: Path, tmp_path: Path) -> None:
    """Soft caps require eager attention, whose weights grow with the square of the length."""
    config = json.loads((tiny_model / "config.json").read_text())
    peaks = []
    for name, own in (("gemma2", {"model_type": "gemma2"}), ("llama", {})):
        folder = tmp_path / name
        folder.mkdir()
        values = config | {"dtype": "bfloat16", "max_position_embeddings": 8192} | own
        (folder / "config.json").write_text(json.dumps(values | {"attn_logit_softcapping": 50.0} if own else values))
        values = json.loads((folder / "config.json").read_text())
        shapes = open_source(str(tiny_model)).shapes
        source = Source(
            folder=folder, config=values, family=family_of(values), sizes=dimensions_of(values), shapes=shapes
        )
        recipe = Recipe(model=name, sparsity=0.2, seq_len=8192, activation_checkpointing="on")
        peaks.append(fit(recipe, source, Devices.of_cards("h100-80gb"), MASKS).peak)
    eager_weights = 8192 * 8192 * config["num_attention_heads"] * 6
    assert peaks[0] - peaks[1] > 0.8 * eager_weights


def test_cards_that_share_a_mixture_gather_only_its_weights(tiny_experts: Path) -> None:
    """Not what training keeps of them: a layer is gathered in 16 bits, and its gradient summed in float32."""
    source = open_source(str(tiny_experts))
    recipe = Recipe(model=str(tiny_experts), sparsity=0.2, dtype="bfloat16")
    devices = Devices(8, "cuda", CARDS["h100-80gb"].memory, 8)
    found = fit(recipe, source, devices, MODES[0])
    passing = SizedModel.of(recipe, source, MODES[0], devices).pass_bytes(found.num_sequences, found.checkpointed)
    assert found.held == held_bytes(source, MODES[0], 2, 8, teacher=True)
    layers = [
        sum(torch.Size(shape).numel() for name, shape in source.shapes.items() if f"layers.{number}." in name)
        for number in range(source.sizes.num_layers)
    ]
    assert found.passing - passing == 10 * max(layers)


def test_a_dry_run_on_cards_returns_numbers_and_marks_the_mode(tiny_model: Path) -> None:
    found = plan(tiny_model, sparsity=0.2, on="h100-80gb")
    assert found.peak_bytes and found.seconds
    assert sum("(--train auto takes this)" in line for line in found.lines) == 1


def test_a_dry_run_here_counts_the_logits_of_a_cpu(tiny_model: Path) -> None:
    """Those of a GPU take 1.3 GB."""
    found = plan(tiny_model, sparsity=0.2, train="masks", batch_size=1, seq_len=16)
    assert found.peak_bytes and found.peak_bytes < 3e8
