"""What steering buys at which price: alignment, KL and perplexity over the gap, beside rivals."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from jaxtyping import Float
from torch import Tensor

from tl_spectral.errors import InputError
from tl_spectral.model import ModelView
from tl_spectral.results import Result
from tl_spectral.steering.checks import check_count, check_cutoff, check_gap, checked_sequence
from tl_spectral.steering.edit import Editor, RankOne, Shift
from tl_spectral.steering.measurement import Meter, Outcome, subject_of
from tl_spectral.steering.rivals import EqualKL
from tl_spectral.steering.rivals import random_directions as unit_vectors

if TYPE_CHECKING:
    import pandas as pd
    from plotly.graph_objects import Figure

_STEERED = "steered"
_COLUMNS = (
    "method", "gap", "condition", "strength", "alignment", "alignment_se", "alignment_before",
    "alignment_plus", "alignment_minus", "positive", "follows_sign", "kl", "kl_se", "nll",
    "perplexity", "perplexity_before", "chance", "note",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class SteeringSweep(Result):
    """The trade-off of steering: what each gap costs, and what the rivals give for it.

    Attributes:
        direction: w, unit length.
        rows: One entry per method, gap and condition, see :meth:`to_dataframe`.
        reach: Method → share of w that can be read.
        layer: Layer edited.
        skip: Whether dominance is by ``|1 + λ|``.
        source: What the direction was made from.
        tokens: ``"text"``, or ``"random ids"`` if no texts were given.
        n_tokens: Number of tokens measured.
    """

    direction: Float[Tensor, " d_model"]
    rows: tuple[Mapping[str, Any], ...]
    reach: Mapping[str, float]
    layer: int
    skip: bool
    source: str
    tokens: str
    n_tokens: int

    def to_dataframe(self) -> pd.DataFrame:
        """One row per method, gap and condition.

        ``condition`` is ``"steered"``, ``"additive at equal KL"`` (+w added to ``resid_post`` at
        every position, as long as costs the KL of the edit), or ``"random direction i"`` (the edit
        of the same method and gap towards a random direction; its alignment is with that
        direction). ``alignment_before`` and ``perplexity_before`` are of the original model; the
        other columns are those of :meth:`SteeringReport.to_dataframe`.
        """
        import pandas as pd

        return pd.DataFrame(list(self.rows), columns=list(_COLUMNS))

    def plot(self, template: str | None = None) -> Figure:
        """Alignment against KL, and perplexity against alignment where there is one."""
        from tl_spectral.plots.steering import sweep_figure

        return sweep_figure(self.to_dataframe(), template=template)


def steering_sweep(
    model: Any,
    direction: Any,
    layer: int = -1,
    *,
    gaps: Sequence[float] = (1.2, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0),
    methods: Sequence[str] = ("weights", "hook"),
    texts: Any = None,
    random_directions: int = 3,
    skip: bool = True,
    cutoff: float = 0.05,
    seed: int = 0,
    progress: Callable[[int, int, str], None] | None = None,
) -> SteeringSweep:
    """Alignment, KL and perplexity over the gap, beside an additive vector and random directions.

    The model is bit for bit what it was afterwards.

    Args:
        model: A ``TransformerBridge`` or ``HookedAlbert`` with standard attention.
        direction: As for :func:`tl_spectral.steer`.
        layer: Layer; the last by default.
        gaps: Ratios of the dominant modulus to the next, each above 1.
        methods: Of ``"weights"`` and ``"hook"``.
        texts: What to measure on; 4 sequences of 16 random token ids if not given. Perplexity
            needs texts and a causal model.
        random_directions: Random directions steered towards at each gap.
        skip: Dominance by ``|1 + λ|`` instead of ``|λ|``.
        cutoff: As for :func:`tl_spectral.steer`.
        seed: Seed of the random directions and ids.
        progress: Called with points done, points in all, and what comes next.

    Returns:
        The table of all points.

    Raises:
        InputError: As :func:`tl_spectral.steer`; or if there is no gap or method, or one twice.
        ProvenanceError: If the direction is a result of another model or weight basis.
        UnsupportedModelError: If the layer has no value and output weights per head.
    """
    view = ModelView(model)
    layer = view.layer(layer)
    gaps, methods = checked_sequence("gaps", gaps), checked_sequence("methods", methods)
    for gap in gaps:
        check_gap(gap)
    for method in methods:
        if method not in ("weights", "hook"):
            raise InputError(f"methods must be of weights and hook, got {method!r}.")
    check_count("random_directions", random_directions)
    check_cutoff(cutoff)
    editors = {m: Editor(view, layer, method=m, cutoff=cutoff, skip=skip) for m in methods}
    subject = subject_of(view, direction, layer, texts, skip=skip, seed=seed)
    drawn = islice(unit_vectors(view.d_model, seed + 2), random_directions)
    directions = {_STEERED: subject.direction}
    directions |= {f"random direction {i}": u for i, u in enumerate(drawn)}
    solvers = {m: {name: editors[m].solver(w) for name, w in directions.items()} for m in methods}
    meter = Meter(subject)
    rival, rows = EqualKL.along_direction(meter), []
    points = [(m, gap, name) for m in methods for gap in gaps for name in directions]
    for done, (method, gap, name) in enumerate(points):
        if progress is not None:
            progress(done, len(points), f"{method}, gap {gap:g}, {name}")
        w, alpha = directions[name], solvers[method][name].alpha(float(gap))
        point = {"method": method, "gap": float(gap)}
        edit = editors[method].edit(w, w, alpha)
        outcome = meter.run(edit)
        rows.append(point | _row(meter, name, outcome, edit, w))
        if name == _STEERED:
            length, note = rival.length(outcome.kl)
            shift = Shift(length * w)
            added = meter.run(shift)
            rows.append(point | _row(meter, "additive at equal KL", added, shift, w, note))
    if progress is not None:
        progress(len(points), len(points), "done")
    reach = {m: editors[m].reading(subject.direction)[0].square().sum().item() for m in methods}
    options = {"layer": layer, "methods": methods, "gaps": gaps, "skip": skip, "cutoff": cutoff}
    options["direction"] = subject.source
    return SteeringSweep(
        direction=subject.direction,
        rows=tuple(rows),
        reach=reach,
        layer=layer,
        skip=skip,
        source=subject.source,
        tokens="text" if subject.given else "random ids",
        n_tokens=len(meter.original.states),
        provenance=view.provenance(subject.tokens, seed=seed, options=options),
    )


def _row(
    meter: Meter,
    name: str,
    outcome: Outcome,
    edit: RankOne | Shift,
    target: Float[Tensor, " d_model"],
    note: str = "",
) -> dict[str, Any]:
    row = meter.row(name, outcome, edit=edit, target=target, note=note)
    before = meter.row("original", meter.original, target=target)
    row |= {f"{column}_before": before[column] for column in ("alignment", "perplexity")}
    return {column: row[column] for column in _COLUMNS if column in row}
