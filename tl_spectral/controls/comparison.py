"""A number beside its null: how far out it lies, and what that is worth."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from tl_spectral.controls.base import Null
from tl_spectral.controls.registry import null_of
from tl_spectral.errors import InputError
from tl_spectral.metrics import METRICS
from tl_spectral.results import Provenance, Result
from tl_spectral.spectrum import spectrum

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go

_COVER = 39  # draws at which the second smallest and largest no longer bound the 95 % range


@dataclass(frozen=True, eq=False)
class NullComparison(Result):
    """A metric of an object and of draws from a null model.

    Attributes:
        metric: Name of the metric.
        value: Of the object itself.
        null: Name of the null model.
        acts_on: What the null acts on.
        keeps: What draws have in common with the object.
        breaks: What they have not.
        null_mean: Mean over the draws; the closed form where nothing was drawn.
        null_std: Standard deviation over the draws (n − 1).
        z: ``(value − null_mean) / null_std``.
        p: Two-sided ``(b + 1)/(m + 1)`` (Phipson & Smyth 2010): b of m draws lie at least as far
            from the mean of all m + 1 values as the value does.
        interval: Range in which a further draw falls with 95 % probability, from the order of the
            draws alone; with fewer than 39 draws their whole range, see ``note``.
        closed_form: Mean of the null in closed form, where there is one (for some nulls a limit of
            large d; the mean of the draws is of this d).
        values: The metric of every draw.
        note: Why a figure is missing, or what to mind.
    """

    metric: str
    value: float
    null: str
    acts_on: str
    keeps: str
    breaks: str
    null_mean: float
    null_std: float
    z: float
    p: float
    interval: tuple[float, float]
    closed_form: float | None
    values: Float[Tensor, " draw"]
    note: str = ""

    @property
    def n_draws(self) -> int:
        """Number of draws."""
        return self.values.numel()

    @property
    def smallest_p(self) -> float:
        """What p can reach at best."""
        return 1 / (self.n_draws + 1)

    @property
    def excess(self) -> float:
        """``value − null_mean``."""
        return self.value - self.null_mean

    @property
    def excess_interval(self) -> tuple[float, float]:
        """``value`` less either end of ``interval``: excludes 0 if the null cannot reach it."""
        return self.value - self.interval[1], self.value - self.interval[0]

    @property
    def sentence(self) -> str:
        """The comparison in words."""
        head = f"{self.metric.replace('_', ' ')} {self.value:.4g}"
        if math.isnan(self.p):
            return f"{head}; null ({self.null}) {self.null_mean:.4g}. {self.note}".strip()
        low, high = self.interval
        far = "" if math.isnan(self.z) else f", z = {self.z:+.1f}"
        return (
            f"{head}; null ({self.null}) {self.null_mean:.4g}, range {low:.4g} to {high:.4g}{far}, "
            f"p = {self.p:.3g} from {self.n_draws} draws."
        )

    def to_dataframe(self) -> pd.DataFrame:
        """One row with every figure."""
        import pandas as pd

        row = {
            "metric": self.metric,
            "value": self.value,
            "null": self.null,
            "null_mean": self.null_mean,
            "null_sd": self.null_std,
            "z": self.z,
            "p": self.p,
            "smallest_p": self.smallest_p,
            "low": self.interval[0],
            "high": self.interval[1],
            "closed_form": math.nan if self.closed_form is None else self.closed_form,
            "n_draws": self.n_draws,
            "keeps": self.keeps,
            "breaks": self.breaks,
            "note": self.note,
        }
        return pd.DataFrame([row])

    def plot(self, template: Any = None) -> go.Figure:
        """The draws as a histogram, and where the value lies."""
        from tl_spectral.plots.controls import null_figure

        return null_figure(self, template=template)


def compare_with_null(
    metric: Callable[[Any], float] | str,
    x: Any,
    null: Null | str,
    *,
    draws: int = 99,
    seed: int = 0,
    name: str | None = None,
    k: int = 10,
) -> NullComparison:
    """Measure something, and the same on draws from a null model.

    Args:
        metric: A function of one object to a number; or, for a single matrix, the name of one of
            :data:`tl_spectral.metrics.METRICS`.
        x: The object, of the kind on which the null acts.
        null: A null model or its name, see :func:`null_of`.
        draws: How many. Where the null has fewer different draws than that (circular shifts, a
            surgery without random numbers), each of them is taken once. 0 gives the closed form.
        seed: Seed of the draws.
        name: Name of the metric in the result; by default the function's.
        k: Dimension of the subspaces, for ``"self_alignment"``.

    Returns:
        The value beside its null.

    Raises:
        InputError: If metric or null do not exist, the metric gives no number for ``x``, nothing
            can be drawn and no closed form is known, or ``x`` is nothing that the null acts on.
    """
    null = null_of(null) if isinstance(null, str) else null
    if type(draws) is not int or draws < 0:
        raise InputError(f"draws must be an integer of at least 0, got {draws!r}.")
    measure, title = _metric(metric, name, k)
    value = measure(x)
    if not math.isfinite(value):
        raise InputError(f"{title} of the object itself is {value}; there is nothing to compare.")
    closed = null.expected(x, metric, k) if isinstance(metric, str) else None
    if draws == 0 and closed is None:
        raise InputError(f"No closed form of {title} under {null.name!r} is known; set draws.")
    available = null.n_draws(x)
    if available is not None and available <= draws:
        seeds = list(range(available))
    else:
        seeds = [int(s) for s in np.random.SeedSequence(seed).generate_state(draws)]
    drawn = np.array([measure(null.draw(x, s)) for s in seeds], dtype=np.float64)
    figures = _figures(value, drawn[np.isfinite(drawn)], closed, null.random)
    lost = int(np.sum(~np.isfinite(drawn)))
    notes = [figures.pop("note"), f"{lost} draws gave no number and are left out" if lost else ""]
    source = getattr(x, "provenance", None) or Provenance()
    options = {"null": null.name, **dataclasses.asdict(null)}
    return NullComparison(
        metric=title,
        value=value,
        null=null.name,
        acts_on=null.acts_on,
        keeps=null.keeps,
        breaks=null.breaks,
        closed_form=closed,
        values=torch.from_numpy(drawn[np.isfinite(drawn)]),
        note="; ".join(note for note in notes if note),
        provenance=dataclasses.replace(
            source, seed=seed, options={**source.options, "control": options}
        ),
        **figures,
    )


def _metric(
    metric: Callable[[Any], float] | str, name: str | None, k: int
) -> tuple[Callable[[Any], float], str]:
    if not isinstance(metric, str):
        title = name or str(getattr(metric, "__name__", "metric"))
        return lambda x: _number(metric(x)), title
    if metric not in METRICS:
        raise InputError(f"There is no metric {metric!r}. There are {', '.join(METRICS)}.")
    return lambda x: _number(getattr(spectrum(x, k=k), metric)), name or metric


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)


def _figures(
    value: float, drawn: Float[np.ndarray, " draw"], closed: float | None, random: bool
) -> dict[str, Any]:
    nan = math.nan
    nothing: dict[str, Any] = {"null_std": nan, "z": nan, "p": nan, "interval": (nan, nan)}
    m = drawn.size
    if m == 0:
        if closed is None:
            return nothing | {"null_mean": nan, "note": "no draw gave a number"}
        return nothing | {"null_mean": closed, "note": "closed form, nothing drawn"}
    mean = float(drawn.mean())
    if not random:
        note = "the null has one value: there is no spread to judge by"
        return nothing | {"null_mean": mean, "interval": (mean, mean), "note": note}
    std = float(drawn.std(ddof=1)) if m > 1 else nan
    centre = (drawn.sum() + value) / (m + 1)
    size = 1e-12 * max(abs(value), float(np.abs(drawn).max()), 1.0)  # rounding is no difference
    p = (1 + int(np.sum(np.abs(drawn - centre) >= abs(value - centre) - size))) / (m + 1)
    notes = []
    if m < _COVER:
        notes.append(f"the interval covers {(m - 1) / (m + 1):.0%}: more draws are needed for 95 %")
    z = nan
    if std > size:
        z = (value - mean) / std
    else:
        notes.append("no z: " + ("one draw" if m == 1 else "all draws give the same number"))
    low, high = np.quantile(drawn, [0.025, 0.975], method="weibull")
    return {
        "null_mean": mean,
        "null_std": std,
        "z": z,
        "p": p,
        "interval": (float(low), float(high)),
        "note": "; ".join(notes),
    }
