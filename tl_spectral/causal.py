"""A causal check: do bridge units drive a block, and the prediction, more than units like them?"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from scipy import stats
from torch import Tensor

from tl_spectral.bridges import BridgeUnits
from tl_spectral.capture import ResidualStates, capture
from tl_spectral.errors import InputError, ProvenanceError
from tl_spectral.matching import balance, matched, standardised
from tl_spectral.model import ModelView
from tl_spectral.model.interventions import ScaledInput
from tl_spectral.model.view import by_length
from tl_spectral.results import Result
from tl_spectral.statistics import permutation_p

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go

Around = Literal["mean", "zero"]
MEASURES = ("output_change", "gain", "kl")
MIN_BRIDGES = 2
_POOR_MATCH = 0.25  # standard deviations of a covariate, the usual bound for a balanced match


@dataclass(frozen=True, eq=False)
class BridgeIntervention(Result):
    """What scaling the bridge units of a block's input does, beside matched other units.

    Attributes:
        effects: Effect of each set of units on each text: ``output_change`` = ``‖Δy‖ / ‖y‖`` of the
            block's output y; ``gain`` = ``‖Δy‖ / ‖Δx‖`` with Δx the push itself; ``kl`` =
            KL(before ‖ after) of the distribution at the position, in nats. The bridge units come
            first, then the matched sets.
        rows: One per measure: ``bridge`` and ``control`` (means over texts, and matched sets),
            ``difference`` (of the two), ``text_low`` and ``text_high`` (its 95 % interval over
            texts, paired t), ``draw_low`` and ``draw_high`` (middle 95 % of the matched sets),
            ``ratio`` and ``p`` (bridge and partner swapped at random within the pairs of the first
            match).
        balance_rows: One per covariate: see :func:`tl_spectral.matching.balance`.
        bridges: The bridge units.
        partners: Their partners in each match.
        factor: By how much they were scaled.
        around: Around what: ``"mean"`` over the texts, or ``"zero"``.
        layer: The block.
        pos: The position.
        n_texts: Number of texts.
        permutations: Number of swaps.
        notes: What to know before believing it.
    """

    effects: Float[Tensor, "measure set text"]
    rows: tuple[dict[str, Any], ...]
    balance_rows: tuple[dict[str, Any], ...]
    bridges: Int[Tensor, " pair"]
    partners: Int[Tensor, "draw pair"]
    factor: float
    around: str
    layer: int
    pos: int
    n_texts: int
    permutations: int
    notes: tuple[str, ...]

    def to_dataframe(self) -> pd.DataFrame:
        """One row per measure."""
        import pandas as pd

        return pd.DataFrame(list(self.rows)).assign(layer=self.layer, factor=self.factor)

    def balance(self) -> pd.DataFrame:
        """One row per covariate: how alike bridges and partners are."""
        import pandas as pd

        return pd.DataFrame(list(self.balance_rows))

    def plot(self, template: Any = None) -> go.Figure:
        """Effect of bridge units and of each matched set, and the quality of the match."""
        from tl_spectral.plots.causal import intervention_figure

        return intervention_figure(self, template=template)


def bridge_intervention(
    model: Any,
    texts: Any,
    layer: int,
    bridges: BridgeUnits | Tensor | Sequence[int],
    *,
    factor: float | int = 2.0,
    controls: int = 10,
    around: Around | str = "mean",
    permutations: int = 99,
    pos: int = -1,
    states: ResidualStates | None = None,
    seed: int = 0,
) -> BridgeIntervention:
    """Scale bridge units at a block's input through a hook, and matched other units likewise.

    Each bridge unit is paired with another of like deviation (size, for ``around="zero"``), norm
    gain and strength, so that both sets are pushed equally hard and read through equal gains. Only
    one position is touched. The weights are left alone and no hook stays.

    Args:
        model: A ``TransformerBridge`` or ``HookedAlbert``.
        texts: Texts or token ids.
        layer: The block.
        bridges: The bridge units: a result of :func:`tl_spectral.bridge_units`, a mask, or indices
            (which carry no strength to match on).
        factor: Units become ``centre + factor · (x − centre)``; 0 holds them at the centre.
        controls: Number of matched sets.
        around: Centre: ``"mean"`` of each unit over the texts, or ``"zero"``.
        permutations: Swaps behind each p, two forward passes each.
        pos: Position in each text; the distribution there is the next token's, for an encoder that
            of the token itself.
        states: States whose deviations and means are used, rather than those of these texts.
        seed: Seed of matches and swaps.

    Returns:
        The effects, their differences, and how good the match is.

    Raises:
        InputError: If there are fewer than 2 bridges or texts, too few other units, or an option
            is out of range.
        ProvenanceError: If the bridges are of another layer or model.
    """
    if around not in ("mean", "zero"):
        raise InputError(f'around must be "mean" or "zero", got {around!r}.')
    if not math.isfinite(factor) or factor == 1:
        raise InputError(f"factor must be a number other than 1, got {factor}.")
    if controls < 1 or permutations < 1:
        raise InputError(
            f"controls and permutations must be at least 1, got {controls} and {permutations}."
        )
    view = ModelView(model)
    layer = view.layer(layer)
    tokens = view.tokens(texts)
    if len(tokens) < 2:
        raise InputError("An interval over texts needs at least 2 texts.")
    if states is None:
        sites: Any = ("resid_pre", "resid_post")
        states = capture(model, tokens, pos, layers=[layer], sites=sites)
    else:
        states.provenance.require_same_model(view.provenance(), "States and model")
    at = states.index(layer)
    own = states.resid_pre[at].double()
    centre = own.mean(dim=0) if around == "mean" else torch.zeros(view.d_model)
    size = (own - centre).square().mean(dim=0).sqrt().numpy()
    members, usable, strength = _bridges(view, layer, bridges)
    usable &= size > 0
    covariates = {"activation_std" if around == "mean" else "activation_size": size}
    gain = view.norm_gain(layer)
    notes = []
    if gain is None:
        notes.append("no norm reads this block's input: nothing to match on there")
    else:
        covariates["norm_gain"] = gain.double().cpu().numpy()
    if strength is None:
        notes.append("strength is not matched: it is not known for a mask or indices")
    else:
        covariates["strength"] = strength
    of = np.flatnonzero(members & usable)
    pool = np.flatnonzero(~members & usable)
    if len(of) < MIN_BRIDGES:
        raise InputError(f"{len(of)} usable bridge units; at least {MIN_BRIDGES} are needed.")
    if len(of) < members.sum():
        notes.append(f"{members.sum() - len(of)} bridge units do not vary and were left out")
    rng = np.random.default_rng(seed)
    places = standardised(covariates, np.flatnonzero(usable))
    partners = matched(places, of, pool, controls, rng)
    quality = balance(tuple(covariates), places, of, pool, partners)
    poor = [row["covariate"] for row in quality if abs(row["after"]) > _POOR_MATCH]
    if poor:
        notes.append(f"bridges and partners still differ in {', '.join(poor)}")

    runs = []  # texts of one length form a batch
    groups = [np.array(group) for group in by_length(tokens).values()]
    for group in groups:
        batch = torch.stack([tokens[i] for i in group])
        where = view.position(pos, batch.shape[1], "pos")
        runs.append(ScaledInput(view, batch, layer, where))
    order = np.argsort(np.concatenate(groups))

    def effect(units: Int[np.ndarray, " unit"]) -> Float[np.ndarray, "measure text"]:
        factors = torch.ones(view.d_model, dtype=torch.float64)
        factors[torch.from_numpy(units)] = float(factor)
        return np.hstack([_measured(run, factors, centre) for run in runs])[:, order]

    effects = np.stack([effect(of), *(effect(row) for row in partners)], axis=1)
    swapped = np.stack(
        [
            effect(one).mean(axis=1) - effect(other).mean(axis=1)
            for one, other in _swaps(of, partners[0], permutations, rng)
        ],
        axis=1,
    )
    return BridgeIntervention(
        effects=torch.from_numpy(effects),
        rows=tuple(
            _row(name, effects[i], swapped[i], permutations) for i, name in enumerate(MEASURES)
        ),
        balance_rows=tuple(quality),
        bridges=torch.from_numpy(of),
        partners=torch.from_numpy(partners),
        factor=float(factor),
        around=around,
        layer=layer,
        pos=int(pos),
        n_texts=len(tokens),
        permutations=permutations,
        notes=tuple(notes),
        provenance=view.provenance(tokens, seed=seed, options={"pos": int(pos), "layer": layer}),
    )


def _bridges(
    view: ModelView, layer: int, bridges: BridgeUnits | Tensor | Sequence[int]
) -> tuple[Bool[np.ndarray, " unit"], Bool[np.ndarray, " unit"], Any]:
    """Which units are bridges, which can be used at all, and their strength if known."""
    d = view.d_model
    if isinstance(bridges, BridgeUnits):
        if bridges.layer not in (None, layer):
            raise ProvenanceError(f"These are bridges of layer {bridges.layer}, not of {layer}.")
        bridges.provenance.require_same_model(view.provenance(), "Bridges and model")
        members = bridges.is_bridge.numpy()
        if len(members) != d:
            raise InputError(f"There are {len(members)} units, {view.name} has {d}.")
        placed = np.array([reason == "" for reason in bridges.reason])
        return members.copy(), placed, bridges.strength.numpy()
    given = torch.as_tensor(bridges)
    if given.dtype == torch.bool:
        if given.shape != (d,):
            raise InputError(f"A mask of bridges has one entry per unit, {d}: {given.shape}.")
        return given.numpy().copy(), np.ones(d, dtype=bool), None
    if given.is_floating_point() or given.ndim != 1 or not len(given):
        raise InputError("bridges must be BridgeUnits, a mask, or a sequence of unit indices.")
    if int(given.min()) < 0 or int(given.max()) >= d or len(set(given.tolist())) < len(given):
        raise InputError(f"Unit indices are distinct and lie between 0 and {d - 1}: {bridges}.")
    members = np.zeros(d, dtype=bool)
    members[given.numpy()] = True
    return members, np.ones(d, dtype=bool), None


def _measured(
    run: ScaledInput, factors: Float[Tensor, " d_model"], centre: Float[Tensor, " d_model"]
) -> Float[np.ndarray, "measure text"]:
    outputs, log_probs = run.scaled(factors, centre)
    push = ((factors - 1) * (run.states - centre)).norm(dim=1)
    change = (outputs - run.outputs).norm(dim=1)
    before = run.log_probs
    kl = (before.exp() * (before - log_probs)).sum(dim=1)
    return torch.stack([change / run.outputs.norm(dim=1), change / push, kl]).numpy()


def _swaps(
    of: Int[np.ndarray, " pair"],
    partners: Int[np.ndarray, " pair"],
    count: int,
    rng: np.random.Generator,
) -> Iterator[tuple[Any, Any]]:
    """Both sets with their members swapped within random pairs."""
    for _ in range(count):
        flip = rng.random(len(of)) < 0.5
        yield np.where(flip, partners, of), np.where(flip, of, partners)


def _row(
    name: str,
    effects: Float[np.ndarray, "set text"],
    swapped: Float[np.ndarray, " swap"],
    permutations: int,
) -> dict[str, Any]:
    bridge, control = effects[0], effects[1:]
    paired = bridge - control.mean(axis=0)
    error = float(paired.std(ddof=1)) / math.sqrt(len(paired))
    half = float(stats.t.ppf(0.975, len(paired) - 1)) * error
    by_draw = bridge.mean() - control.mean(axis=1)
    low, high = np.quantile(by_draw, [0.025, 0.975])
    mean = float(paired.mean())
    return {
        "measure": name,
        "bridge": float(bridge.mean()),
        "control": float(control.mean()),
        "difference": mean,
        "text_low": mean - half,
        "text_high": mean + half,
        "draw_low": float(low),
        "draw_high": float(high),
        "ratio": float(bridge.mean() / control.mean()) if control.mean() else math.nan,
        "p": permutation_p(float(by_draw[0]), swapped),
    }
