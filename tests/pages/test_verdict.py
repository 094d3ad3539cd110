"""Pairs to ratio, interval and sentence; the known answers are scipy's `stats.t.interval` and `stats.t.ppf`."""

import pytest

from ddp_vllm.intervals import judge, t_quantile


@pytest.mark.parametrize(("degrees", "value"), [(1, 12.7062), (4, 2.7764), (31, 2.0395), (200, 1.9719)])
def test_quantiles_are_students(degrees: int, value: float) -> None:
    assert t_quantile(degrees) == pytest.approx(value, abs=1e-4)


def test_interval_of_five_known_pairs() -> None:
    verdict = judge([10, 10, 10, 10, 10], [12, 12.5, 13, 12.2, 12.8])
    assert verdict.ratio == pytest.approx(1.2494558, abs=1e-6)
    assert (verdict.low, verdict.high) == pytest.approx((1.1992921, 1.3017177), abs=1e-5)
    assert verdict.sentence == "1.25× [1.20, 1.30] faster"


@pytest.mark.parametrize(
    ("pruned", "sentence"),
    [
        ([0.99, 1.01, 1.0, 1.02, 0.98], "no measurable difference (1.00× [0.98, 1.02])"),
        ([1.3, 1.31], "1.30× [1.24, 1.37] faster (only 2 pairs)"),
        ([1.20, 1.5, 1.40], "1.36× [1.02, 1.81] faster (only 3 pairs)"),  # wider above than below; ± 0.39 would reach 1
        ([1.02, 1.03, 1.04, 1.05, 1.0], "1.028× [1.004, 1.052] faster"),  # two decimals would show 1.00
        ([1.0, 1.1, 0.95, 1.05, 1.15], "cannot tell: 1.05× [0.95, 1.15]; measure more pairs"),
        ([1.3], "1.30× in one pair, which does not show the spread; measure 5 pairs"),
    ],
)
def test_sentences(pruned: list[float], sentence: str) -> None:
    assert judge([1.0] * len(pruned), pruned).sentence == sentence
