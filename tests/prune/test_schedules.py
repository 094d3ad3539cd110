"""The values of every schedule: how many gates close by when, and how fast scales and weights move."""

import math
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM

from ddp_prune.core.alm import learning_rate, sharpness_at
from ddp_prune.core.budget import keep_schedule
from ddp_prune.core.trainer import natural_step
from ddp_prune.core.weights import BETAS, LARGEST_GRADIENT, WARMUP, TrainedWeights, rate_of
from ddp_prune.recipe import Recipe
from ddp_prune.run import Run, schedule


def test_gates_close_on_a_quadratic_that_ends_at_85_percent_of_the_search() -> None:
    values = [keep_schedule(progress, 0.6) for progress in (0.0, 0.25, 0.5, 0.85, 1.0)]
    assert values == pytest.approx([1.0, 0.799308, 0.667820, 0.6, 0.6], abs=1e-6)
    assert keep_schedule(0.0, 0.4, start=0.6) == pytest.approx(0.6)  # a size that starts where another ended


def test_the_rate_of_weights_rises_for_a_tenth_and_falls_along_a_cosine() -> None:
    assert (WARMUP, BETAS, LARGEST_GRADIENT) == (0.1, (0.9, 0.95), 1.0)
    rates = [rate_of(step, 100, 1.0, WARMUP) for step in (0, 5, 9, 10, 55, 99)]
    assert rates == pytest.approx([1 / 11, 6 / 11, 10 / 11, 1.0, 0.5, 0.000305], abs=1e-6)
    assert rate_of(59, 100, 1.0, WARMUP, flat_until=60) == 1.0  # of a size family, until its search ends
    assert rate_of(80, 100, 1.0, WARMUP, flat_until=60) == pytest.approx(0.5)


def test_the_papers_rates_and_sharpness() -> None:
    """Eq. 14: from 0.5 to 0.05 with the root of the progress."""
    assert [sharpness_at(progress, 0.5, 0.05) for progress in (0.0, 0.25, 1.0)] == pytest.approx([0.5, 0.275, 0.05])
    run = Run.alone(Recipe(model="m", sparsity=0.2, controller="alm", polish=0.0, steps=100))
    assert [learning_rate(step, run, 2e-2) for step in (0, 4, 52)] == pytest.approx(
        [0.2 * 2e-2, 2e-2, 2e-2 * 0.5 * (1 + math.cos(math.pi * 47 / 95))]
    )


def test_steps_of_sizes_follow_from_what_they_remove() -> None:
    sizes = [Recipe(model="m", sparsity=sparsity, steps=100) for sparsity in (0.1, 0.2, 0.4)]
    assert schedule(sizes) == [(0, 16, 37), (16, 32, 53), (32, 65, 86)]
    assert schedule(sizes[:1]) == [(0, 65, 100)]


def test_a_natural_step_divides_by_information_and_prior() -> None:
    z, gradient = torch.ones(3), torch.tensor([10.0, 10.0, -10.0])
    information, assumed = torch.tensor([0.0, 50.0, 50.0]), torch.tensor([0.0, 0.0, 1.0])
    moved = natural_step(z, gradient, information, assumed)
    assert moved.tolist() == pytest.approx([1 - 10 / 50, 1 - 10 / 100, 1 + 10 / 150])


def test_gradients_are_clipped_to_norm_1() -> None:
    """AdamW's first step does not depend on the gradient's size, its second moment does."""
    config: dict[str, Any] = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**config, num_attention_heads=2))
    weights = TrainedWeights(model, Accelerator(cpu=True))
    weights.sums = {name: torch.ones_like(master) for name, master in weights.masters.items()}
    norm = weights.reduce_gradients()
    assert norm == pytest.approx(math.sqrt(sum(master.numel() for master in weights.masters.values())), rel=1e-6)
    weights.step(1e-3, norm)
    second = next(iter(weights.optimizer.state.values()))["exp_avg_sq"]
    assert float(second.flatten()[0]) == pytest.approx(0.05 / norm**2, rel=1e-4)
