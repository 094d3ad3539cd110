"""How much faster, and is that real: pairs of measurements become a ratio, an interval and a sentence.

Each pair ran back to back, so a slow hour of the machine slows both. The ratios of the pairs are averaged on the log
scale, and a Student t interval of 95 % is put around that mean: exp(m ± t·s/√n), with n − 1 degrees of freedom.
It asks that the log ratios of the pairs are independent and roughly normal; it does not ask that machines are equal.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, log, sqrt
from statistics import fmean, median, stdev
from typing import Any

ENOUGH_PAIRS = 5
_T_975 = (  # Student's t, two-sided 95 %, for 1 … 30 degrees of freedom
    *(12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281),
    *(2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860),
    *(2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423),
)


def t_quantile(degrees: int) -> float:
    """Return the 97.5 % quantile of Student's t; beyond 30 degrees by its expansion around 1.96, good to 1e-4."""
    if degrees <= len(_T_975):
        return _T_975[degrees - 1]
    z = 1.959964
    return z + (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The answer to "how much faster?" for one pruned model at one load."""

    ratios: tuple[float, ...]
    """Pruned over dense, pair by pair; above 1 the pruned model is faster."""
    ratio: float
    """Their geometric mean."""
    low: float
    high: float
    """The 95 % interval; 0 and infinity when one pair is all there is."""

    @property
    def sentence(self) -> str:
        """The verdict in words."""
        pairs = len(self.ratios)
        if pairs < 2:
            return f"{self.ratio:.2f}× in one pair, which says nothing about the spread; measure {ENOUGH_PAIRS} pairs"
        value = with_interval(self.ratio, self.low, self.high)
        few = f" (only {pairs} pairs)" if pairs < ENOUGH_PAIRS else ""
        if self.low > 1:
            return f"{value} faster{few}"
        if self.high < 1:
            return f"{value}, slower{few}"
        return f"no measurable difference ({value}){few}"

    def to_json(self) -> dict[str, object]:
        finite = len(self.ratios) > 1
        return {
            "ratios": list(self.ratios),
            "ratio": self.ratio,
            "low": self.low if finite else None,
            "high": self.high if finite else None,
            "interval": "95 %, Student t on log ratios of pairs",
            "sentence": self.sentence,
        }


def judge(dense: Sequence[float], pruned: Sequence[float]) -> Verdict:
    """Compare paired speeds, element by element the same round; both in the same unit, more is better.

    Pass seconds in swapped order: `judge(pruned_seconds, dense_seconds)`.
    """
    assert len(dense) == len(pruned) > 0
    assert min(*dense, *pruned) > 0
    ratios = tuple(after / before for before, after in zip(dense, pruned, strict=True))
    logs = [log(ratio) for ratio in ratios]
    middle = fmean(logs)
    if len(logs) < 2:
        return Verdict(ratios=ratios, ratio=exp(middle), low=0.0, high=float("inf"))
    reach = t_quantile(len(logs) - 1) * stdev(logs) / sqrt(len(logs))
    return Verdict(ratios=ratios, ratio=exp(middle), low=exp(middle - reach), high=exp(middle + reach))


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return median, lowest and highest of repeated measurements."""
    return {"median": median(values), "lowest": min(values), "highest": max(values)}


def with_interval(ratio: float, low: float, high: float) -> str:
    """Write a ratio with its interval in two decimals, in more where two would show a bound as 1 or both as one."""
    for decimals in (2, 3, 4):
        middle, lower, upper, one = (f"{value:.{decimals}f}" for value in (ratio, low, high, 1.0))
        if len({lower, upper, one}) == 3:
            break
    return f"{middle}× [{lower}, {upper}]"


def ratio_text(verdict: Mapping[str, Any]) -> str:
    """Write the ratio of a verdict in JSON with its interval, if it has one."""
    if verdict["low"] is None:
        return f"{verdict['ratio']:.2f}× (one pair)"
    return with_interval(verdict["ratio"], verdict["low"], verdict["high"])
