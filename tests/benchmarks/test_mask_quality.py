"""Budgets of one-shot methods in `benchmarks/mask_quality.py`: equal, exact, and where the method puts them."""

import pytest
import torch

from ddp_prune.recipe import AlmSettings
from mask_quality import EXPERT_SCORES, even_support, read_settings

LAYERS, EXPERTS, CHANNELS, KEPT = 3, 4, 10, 73
WORTH = torch.rand(LAYERS, EXPERTS, CHANNELS, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("scope", "parts"), [("global", 1), ("layer", LAYERS), ("expert", LAYERS * EXPERTS)])
def test_the_budget_is_exact_and_even_and_the_best_stay(scope: str, parts: int) -> None:
    support = even_support(WORTH, KEPT, scope)
    assert support.shape == WORTH.shape and int(support.sum()) == KEPT
    kept, worth = support.view(parts, -1), WORTH.view(parts, -1)
    counts = kept.sum(1)
    assert counts.max() - counts.min() <= 1
    for part in range(parts):
        assert worth[part][kept[part]].min() > worth[part][~kept[part]].max()


def test_every_method_has_a_place_for_its_budget() -> None:
    assert {scope for scope, _ in EXPERT_SCORES.values()} == {"global", "layer", "expert"}


def test_settings_of_the_papers_search_go_into_its_sub_table() -> None:
    found = read_settings(["polish=0.5", "alm.learning_rate=0.1", "alm.mu_end=0.1"])
    assert found == {"polish": 0.5, "alm": AlmSettings(learning_rate=0.1, mu_end=0.1)}
    assert read_settings([])["alm"] == AlmSettings()
