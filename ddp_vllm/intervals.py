"""Means with their uncertainty: of paired measurements as a ratio, and of losses over blocks of text.

The two runs of a pair follow each other, so a slow hour of the machine slows both. The ratios of
the pairs are averaged on the log scale, with a 95 % Student t interval around the mean: exp(m ±
t·s/√n), with n − 1 degrees of freedom. It requires that the log ratios are independent and roughly
normal; the speed of the machine may change between pairs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import exp, inf, log, sqrt
from statistics import fmean, stdev

from ddp_vllm.schema import AtLeastZero, Positive

Interval = tuple[float, float, float]
"""A value and the ends of its interval."""
ENOUGH_PAIRS = 5
LEVEL = 0.05  # an interval within this distance of 1 is reported as no measurable difference
_T_975 = (  # Student's t, two-sided 95 %, for 1 … 30 degrees of freedom
    *(12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281),
    *(2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860),
    *(2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423),
)


def t_quantile(degrees: int) -> float:
    """Return the 97.5 % quantile of Student's t; beyond 30 degrees by its expansion around 1.96,
    good to 1e-4."""
    if degrees <= len(_T_975):
        return _T_975[degrees - 1]
    z = 1.959964
    return z + (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The speedup of one pruned model at one load, as results files store it."""

    ratios: list[float] = field(default_factory=list)
    """Pruned over dense, per pair; above 1 the pruned model is faster."""
    ratio: Positive
    """Their geometric mean."""
    low: AtLeastZero | None
    high: AtLeastZero | None
    """The ends of the 95 % interval; None for a single pair."""
    interval: str = "95 %, Student t on log ratios of pairs"
    sentence: str
    """The verdict in words."""

    @property
    def bounds(self) -> tuple[float, float | None, float | None]:
        """The ratio and the ends of its interval."""
        return self.ratio, self.low, self.high


def judge(dense: Sequence[float], pruned: Sequence[float], unit: str = "pair") -> Verdict:
    """Compare paired speeds of the same rounds, in the same unit; more is better.

    Pass seconds in swapped order: `judge(pruned_seconds, dense_seconds)`. unit: what the option of
    their number calls one of them, in the singular.
    """
    assert len(dense) == len(pruned) > 0
    assert min(*dense, *pruned) > 0
    ratios = [after / before for before, after in zip(dense, pruned, strict=True)]
    logs = [log(ratio) for ratio in ratios]
    middle, pairs = fmean(logs), len(logs)
    if pairs < 2:
        sentence = f"{exp(middle):.2f}× in one {unit}, which does not show the spread; measure {ENOUGH_PAIRS} {unit}s"
        return Verdict(ratios=ratios, ratio=exp(middle), low=None, high=None, sentence=sentence)
    reach = t_quantile(pairs - 1) * stdev(logs) / sqrt(pairs)
    low, ratio, high = map(ratio_of, (middle - reach, middle, middle + reach))
    value, few = with_interval(ratio, low, high), f" (only {pairs} {unit}s)" if pairs < ENOUGH_PAIRS else ""
    sentence = f"cannot tell: {value}; measure more {unit}s"
    if low > 1:
        sentence = f"{value} faster{few}"
    elif high < 1:
        sentence = f"{value}, slower{few}"
    elif low >= 1 - LEVEL and high <= 1 + LEVEL:
        sentence = f"no measurable difference ({value}){few}"
    return Verdict(ratios=ratios, ratio=ratio, low=low, high=high, sentence=sentence)


def ratio_of(log_ratio: float) -> float:
    """Return the ratio of a log ratio; infinity where a float cannot hold it."""
    return exp(log_ratio) if log_ratio < 700 else inf


def with_interval(ratio: float, low: float | None, high: float | None) -> str:
    """Write a ratio and its interval with two decimals, or with more if a bound would read 1 or
    both would be equal; without an interval it is of one pair."""
    if low is None or high is None:
        return f"{ratio:.2f}× (one pair)"
    for decimals in (2, 3, 4):
        middle, lower, upper, one = (f"{value:.{decimals}f}" for value in (ratio, low, high, 1.0))
        if len({lower, upper, one}) == 3:
            break
    return f"{middle}× [{lower}, {upper}]"


def mean_loss(block_losses: Sequence[float], block_tokens: Sequence[float] | None = None) -> tuple[float, float | None]:
    """Return the mean loss per token over blocks of text and its standard error; None for a single
    block.

    block_losses: the mean loss of each block, or a difference of two. block_tokens: the tokens that
        each mean is over;
    None: equally many in each block. The mean m = Σ n·l / Σ n is a ratio of two sums over B blocks,
    so its variance is B/(B − 1) · Σ n²(l − m)² / (Σ n)² (delta method; Cochran, Sampling
    Techniques, Eq. 2.39).
    """
    tokens: Sequence[float] = [1] * len(block_losses) if block_tokens is None else block_tokens
    pairs, total, blocks = list(zip(tokens, block_losses, strict=True)), sum(tokens), len(block_losses)
    mean = sum(n * loss for n, loss in pairs) / total
    if blocks < 2:
        return mean, None
    return mean, sqrt(blocks / (blocks - 1) * sum((n * (loss - mean)) ** 2 for n, loss in pairs)) / total


def mean_interval(values: Sequence[float], weights: Sequence[float] | None) -> Interval:
    """Return `mean_loss` and the ends of its 95 % interval by Student t, which are infinite for a single block."""
    mean, error = mean_loss(values, weights)
    reach = inf if error is None else t_quantile(len(values) - 1) * error
    return mean, mean - reach, mean + reach
