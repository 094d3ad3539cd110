"""Budgets of one-shot methods in `benchmarks/mask_quality.py`: equal, exact, and where the method puts them."""

import pytest
import torch

from mask_quality import EXPERT_SCORES, even_support

LAYERS, EXPERTS, CHANNELS, KEPT = 3, 4, 10, 73
WORTH = torch.rand(LAYERS, EXPERTS, CHANNELS, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("group", "rows"), [("global", 1), ("layer", LAYERS), ("expert", LAYERS * EXPERTS)])
def test_the_budget_is_exact_and_even_and_the_best_stay(group: str, rows: int) -> None:
    support = even_support(WORTH, KEPT, group)
    assert support.shape == WORTH.shape and int(support.sum()) == KEPT
    kept, worth = support.view(rows, -1), WORTH.view(rows, -1)
    counts = kept.sum(1)
    assert counts.max() - counts.min() <= 1
    for row in range(rows):
        assert worth[row][kept[row]].min() > worth[row][~kept[row]].max()


def test_every_method_has_a_place_for_its_budget() -> None:
    assert {group for group, _ in EXPERT_SCORES.values()} == {"global", "layer", "expert"}
