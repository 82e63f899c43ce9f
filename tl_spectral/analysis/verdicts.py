"""The form of a finding, and the rules by which its verdict is given."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy import stats

from tl_spectral.analysis.options import RunOptions

Tables = dict[str, pd.DataFrame]
HOLDS, NO_EFFECT, NOT_LEARNED, CANNOT_TELL = "holds", "no effect", "not learned", "cannot tell"


@dataclass(frozen=True)
class Finding:
    """One row of the findings table."""

    claim: str
    question: str
    effect: str
    baseline: str
    uncertainty: str
    verdict: str
    sentence: str


def signed(value: float) -> str:
    """Three decimals and a true minus sign; what rounds to zero has no sign."""
    text = f"{value:+.3f}".replace("-", "−")
    return "0.000" if text in ("+0.000", "−0.000") else text


@dataclass(frozen=True)
class Interval:
    """An effect with its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{signed(self.value)} {self.bounds}"

    @property
    def bounds(self) -> str:
        """The interval in words."""
        return f"[{signed(self.low)}, {signed(self.high)}]"

    @property
    def above(self) -> bool:
        """Whether it excludes zero from above."""
        return self.low > 0

    @property
    def differs(self) -> bool:
        """Whether it excludes zero."""
        return self.low > 0 or self.high < 0


def unjudged(claim: str, question: str, why: str) -> Finding:
    """A claim that this run cannot speak to."""
    return Finding(claim, question, "", "", "", CANNOT_TELL, f"Cannot be told here: {why}.")


def mean_interval(values: np.ndarray) -> Interval:
    """Mean with its t interval."""
    mean, sem = float(np.mean(values)), float(stats.sem(values)) if len(values) > 1 else np.nan
    half = float(stats.t.ppf(0.975, max(len(values) - 1, 1))) * sem
    return Interval(mean, mean - half, mean + half)


def geometric_interval(values: np.ndarray) -> Interval:
    """Geometric mean of positive numbers, its t interval taken over their logarithms."""
    logs = mean_interval(np.log(values))
    return Interval(float(np.exp(logs.value)), float(np.exp(logs.low)), float(np.exp(logs.high)))


def controlled(holds: bool, control_holds: bool | None) -> str:
    """The verdict, given whether the claim holds here and in the control (None: there is none)."""
    if not holds:
        return NO_EFFECT
    return NOT_LEARNED if control_holds else HOLDS


def has_control(options: RunOptions) -> bool:
    """Whether a control was run."""
    return "control" in options.variants
