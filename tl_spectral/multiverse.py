"""Does a coupling depend on how it is measured? Every reasonable choice, side by side."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float
from torch import Tensor

from tl_spectral.capture import ResidualStates, capture
from tl_spectral.errors import InputError
from tl_spectral.jacobian import sample_jacobians
from tl_spectral.model import ModelView, load_model
from tl_spectral.multiverse_grid import (
    KEYS,
    PARTS,
    Key,
    LayerSettings,
    gains_of,
    joint_null,
    layer_settings,
)
from tl_spectral.results import Result
from tl_spectral.samples import one_layer
from tl_spectral.texts import load_texts

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go

Progress = Callable[[int, int, str], None]
SIGNIFICANT = 0.05
DEFAULTS: dict[str, tuple[Any, ...]] = {
    "top_k": (5, 10, 20),
    "resolution": (0.7, 1.0, 1.4),
    "sign": ("abs", "positive", "signed"),
    "samples": (0.5, 1.0),
    "units": ("raw", "natural"),
    "context": ("full", "isolated"),
    "estimate": ("per_sample", "mean_jacobian"),
    "operator": ("J", "R"),
    "gain": ("column", "row"),
    "confounds": ("all", "none"),
}
_ALLOWED = {
    "sign": tuple(PARTS),
    **{name: DEFAULTS[name] for name in ("units", "context", "estimate", "operator", "gain")},
    "confounds": DEFAULTS["confounds"],
}


@dataclass(frozen=True, eq=False)
class Multiverse(Result):
    """The coupling under every combination of choices.

    Attributes:
        rows: One per layer and setting: ``layer``, the choices, ``rho``, ``low``, ``high`` (95 %,
            as in :class:`tl_spectral.CouplingResult`), ``p``, ``n_units``, ``n_effective``, and
            ``note`` where there is no coupling.
        summaries: One per layer, and ``layer = -1`` for all of them: ``n_settings``,
            ``median_rho``, ``share_positive``, ``share_of_sign`` (settings with the sign of the
            median), ``significant_positive`` and ``significant_negative`` (shares of settings with
            p < 0.05), and per layer two joint tests over all settings, which depend on one another:
            ``median_p`` (is the median as far from 0 as chance makes it?) and ``significant_p``
            (are as many settings significant in one direction?), after Simonsohn, Simmons & Nelson
            2020.
        choices: What was varied: name → values.
        left_out: What was not, and why.
        layers: The layers.
    """

    rows: tuple[dict[str, Any], ...]
    summaries: tuple[dict[str, Any], ...]
    choices: dict[str, tuple[Any, ...]]
    left_out: tuple[str, ...]
    layers: tuple[int, ...]

    def to_dataframe(self) -> pd.DataFrame:
        """One row per layer and setting."""
        import pandas as pd

        return pd.DataFrame(list(self.rows))

    def summary(self) -> pd.DataFrame:
        """One row per layer, and one (−1) for all."""
        import pandas as pd

        return pd.DataFrame(list(self.summaries))

    def by_choice(self) -> pd.DataFrame:
        """One row per choice and value: median coupling and shares over the settings with it."""
        import pandas as pd

        table = self.to_dataframe().dropna(subset=["rho"])
        rows = []
        for name, values in self.choices.items():
            for value in values:
                of = table[table[name] == value]
                rows.append({"choice": name, "value": str(value), **_shares(of.to_dict("records"))})
        return pd.DataFrame(rows)

    def sentence(self, layer: int) -> str:
        """What a layer shows, in words.

        Raises:
            InputError: If the layer was not analysed.
        """
        row = next((row for row in self.summaries if row["layer"] == layer), None)
        if row is None:
            raise InputError(f"Layer {layer} is not in this multiverse of layers {self.layers}.")
        if not row["n_settings"]:
            return f"Layer {layer}: no setting has a coupling."
        sign = "positive" if row["median_rho"] > 0 else "negative"
        joint = "" if math.isnan(row["median_p"]) else f", joint p = {row['median_p']:.3g}"
        return (
            f"Layer {layer}: the coupling is {sign} in {row['share_of_sign']:.0%} of "
            f"{row['n_settings']} settings (median ρ = {row['median_rho']:+.3f}{joint}); "
            f"significant in {row['significant_positive']:.0%} as positive and in "
            f"{row['significant_negative']:.0%} as negative."
        )

    def plot(self, layer: int | None = None, template: Any = None) -> go.Figure:
        """The specification curve of one layer: sorted couplings above the choices behind them."""
        from tl_spectral.plots.multiverse import multiverse_figure

        return multiverse_figure(self, layer, template=template)


def multiverse(
    source: Any,
    data: Any = None,
    *,
    layers: Sequence[int] | None = None,
    top_k: Sequence[int] = DEFAULTS["top_k"],
    resolution: Sequence[float | int] = DEFAULTS["resolution"],
    sign: Sequence[str] = DEFAULTS["sign"],
    samples: Sequence[float | int] = DEFAULTS["samples"],
    units: Sequence[str] = DEFAULTS["units"],
    context: Sequence[str] = DEFAULTS["context"],
    estimate: Sequence[str] = DEFAULTS["estimate"],
    operator: Sequence[str] = DEFAULTS["operator"],
    gain: Sequence[str] = DEFAULTS["gain"],
    confounds: Sequence[str] = DEFAULTS["confounds"],
    pos: int = -1,
    tokens_per_text: int | None = 16,
    jacobian_samples: int = 16,
    runs: int = 5,
    permutations: int = 500,
    seed: int = 0,
    progress: Progress | None = None,
) -> Multiverse:
    """Measure the coupling of bridge position and gain in every combination of choices.

    Any one setting can be called reasonable, so a finding should hold in most. The number of
    settings is the product of the numbers of choices, 3,456 a layer at the defaults; graphs,
    partitions and gains are made once each and shared.

    Args:
        source: A ``TransformerBridge``, a name for :func:`tl_spectral.load_model`, or
            ``ResidualStates``.
        data: For a model, texts as in :func:`tl_spectral.load_texts` (1,000 built-in ones by
            default). For states, the Jacobians: layer → ``[sample, d_model, d_model]`` of the full
            context, or context → such a mapping.
        layers: Which layers; all by default.
        top_k: Strongest edges kept per unit.
        resolution: γ of the community detection.
        sign: ``"abs"`` and ``"positive"`` (Louvain), ``"signed"`` (Leiden, participation over
            positive edges), ``"signed-"`` (over negative ones). Signed ones are left out, and named
            in ``left_out``, where leidenalg is not installed.
        samples: Shares of the texts behind the graph, in (0, 1].
        units: ``"raw"``, ``"natural"`` (deviations of the block's input and output).
        context: ``"full"``, ``"isolated"``; those without Jacobians are left out.
        estimate: ``"per_sample"`` (mean of the log gains of single texts), ``"mean_jacobian"``
            (log gain of the mean Jacobian).
        operator: ``"J"``, ``"R"``.
        gain: ``"column"``, ``"row"``.
        confounds: ``"all"`` regresses out all that are known, ``"none"`` none.
        pos: Position in each text (models).
        tokens_per_text: Each text is cut to its first tokens; ``None`` keeps whole texts (models).
        jacobian_samples: Texts whose Jacobians are taken (models).
        runs: Runs of the community detection per graph.
        permutations: Permutations behind each p and behind the joint tests.
        seed: Seed of samples, runs and permutations.
        progress: Called as ``progress(done, total, what)``.

    Returns:
        Every setting, and what share of them agrees.

    Raises:
        InputError: If a choice is empty, repeated or unknown, or as the pieces do.
    """
    given = {
        "samples": samples, "sign": sign, "top_k": top_k, "resolution": resolution,
        "confounds": confounds, "context": context, "estimate": estimate, "operator": operator,
        "gain": gain, "units": units,
    }  # fmt: skip
    choices, left_out = _checked(given)
    if runs < 1 or permutations < 19:
        raise InputError(
            f"runs must be at least 1 and permutations at least 19, got {runs} and {permutations}."
        )
    if isinstance(source, ResidualStates):
        states = source
        chosen = states.layers if layers is None else tuple(layers)
        stream, contexts = _from_jacobians(states, data, chosen, choices["context"])
        missing = [name for name in choices["context"] if name not in contexts]
        left_out += [f"context={name!r}: no Jacobians of it were given" for name in missing]
        choices["context"] = contexts
    else:
        model = load_model(source) if isinstance(source, (str, os.PathLike)) else source
        view = ModelView(model)
        chosen = view.layers(layers)
        texts = load_texts(data, n=1000 if data is None else None)
        rows = view.tokens(texts, first=tokens_per_text)
        sites: Any = ("resid_pre", "resid_post")
        states = capture(view.source, rows, pos, layers=chosen, sites=sites)
        stream = _from_model(view, rows[:jacobian_samples], chosen, pos, choices["context"])
    n = states.n_samples
    choices["samples"] = tuple(dict.fromkeys(max(1, round(share * n)) for share in samples))
    if min(choices["samples"]) < 3:
        raise InputError(
            f"samples={min(samples)} of {n} texts leaves fewer than 3 for a graph. Use more texts."
        )
    gains: dict[int, dict[Key, Any]] = {layer: {} for layer in chosen}
    for name, layer, matrices in stream:
        scale = (states.scale(layer), states.scale(layer, hook="resid_post"))
        gains[layer] |= gains_of(matrices, scale, choices, name)
    found, summaries = [], []
    for done, layer in enumerate(chosen):
        if progress is not None:
            progress(done, len(chosen), f"multiverse of layer {layer}")
        one = one_layer(states, layer)
        assert isinstance(one, ResidualStates)
        result = layer_settings(
            one, gains[layer], layer, choices, runs=runs, permutations=permutations, seed=seed
        )
        found += result.rows
        summaries.append({"layer": layer, **_shares(result.rows), **_joint(result)})
    nothing = {"median_p": math.nan, "significant_p": math.nan}
    summaries.append({"layer": -1, **_shares(found), **nothing})
    return Multiverse(
        rows=tuple(found),
        summaries=tuple(summaries),
        choices={name: choices[name] for name in KEYS},
        left_out=tuple(left_out),
        layers=chosen,
        provenance=dataclasses.replace(states.provenance, seed=seed),
    )


def _checked(given: Mapping[str, Sequence[Any]]) -> tuple[dict[str, tuple[Any, ...]], list[str]]:
    for name, values in given.items():
        if isinstance(values, str) or not len(values):
            raise InputError(f"{name} must be a sequence of choices, got {values!r}.")
        if len(set(values)) < len(values):
            raise InputError(f"{name} names a choice twice: {list(values)}.")
        unknown = [value for value in values if value not in _ALLOWED.get(name, values)]
        if unknown:
            raise InputError(f"{name}: {unknown[0]!r} is not one of {_ALLOWED[name]}.")
    if not all(0 < share <= 1 for share in given["samples"]):
        raise InputError(f"samples are shares in (0, 1], got {list(given['samples'])}.")
    choices = {name: tuple(values) for name, values in given.items()}
    if importlib.util.find_spec("leidenalg") is None:
        kept = tuple(value for value in choices["sign"] if not value.startswith("signed"))
        if kept != choices["sign"]:
            if not kept:
                raise InputError(
                    'Signed graphs need leidenalg: pip install "tl-spectral[leiden]". Or use '
                    'sign=("abs", "positive").'
                )
            choices["sign"] = kept
            hint = 'pip install "tl-spectral[leiden]"'
            return choices, [f"sign='signed': leidenalg is not installed ({hint})"]
    return choices, []


def _from_model(
    view: ModelView, rows: list[Any], layers: tuple[int, ...], pos: int, contexts: tuple[str, ...]
) -> Iterator[tuple[str, int, Tensor]]:
    for name in contexts:
        for layer, matrices in sample_jacobians(view.source, rows, layers, pos, context=name):
            yield name, layer, matrices


def _from_jacobians(
    states: ResidualStates, data: Any, layers: tuple[int, ...], wanted: tuple[str, ...]
) -> tuple[Iterator[tuple[str, int, Tensor]], tuple[str, ...]]:
    if not isinstance(data, Mapping) or not data:
        raise InputError(
            "With states, data holds the Jacobians: {layer: tensor [sample, d_model, d_model]}, or "
            f"{{'full': …, 'isolated': …}} of such; got {type(data).__name__}."
        )
    by_context = data if all(isinstance(key, str) for key in data) else {"full": data}
    contexts = tuple(name for name in wanted if name in by_context)
    if not contexts:
        raise InputError(f"There are Jacobians of {sorted(by_context)}, none of {wanted}.")
    d = states.resid_pre.shape[-1]

    def each() -> Iterator[tuple[str, int, Tensor]]:
        for name in contexts:
            for layer in layers:
                yield name, layer, _matrices(by_context[name], layer, d, name)

    return each(), contexts


def _matrices(
    jacobians: Mapping[Any, Any], layer: int, d: int, context: str
) -> Float[Tensor, "sample d d"]:
    if layer not in jacobians:
        raise InputError(f"There is no {context} Jacobian of layer {layer}.")
    found = jacobians[layer]
    matrices: Tensor = getattr(found, "matrix", found)
    matrices = matrices[None] if matrices.ndim == 2 else matrices
    if matrices.ndim != 3 or matrices.shape[1:] != (d, d) or not len(matrices):
        raise InputError(
            f"The {context} Jacobians of layer {layer} must be [sample, {d}, {d}], got "
            f"{tuple(matrices.shape)}."
        )
    return matrices


def _shares(rows: Sequence[Mapping[Any, Any]]) -> dict[str, Any]:
    rho = np.array([row["rho"] for row in rows], dtype=float)
    p = np.array([row["p"] for row in rows], dtype=float)
    known = ~np.isnan(rho)
    rho, p = rho[known], p[known]
    if not rho.size:
        shares = ("share_positive", "share_of_sign", "significant_positive", "significant_negative")
        return {"n_settings": 0, "median_rho": math.nan, **dict.fromkeys(shares, math.nan)}
    median, clear = float(np.median(rho)), p < SIGNIFICANT
    return {
        "n_settings": int(rho.size),
        "median_rho": median,
        "share_positive": float((rho > 0).mean()),
        "share_of_sign": float((np.sign(rho) == np.sign(median)).mean()),
        "significant_positive": float((clear & (rho > 0)).mean()),
        "significant_negative": float((clear & (rho < 0)).mean()),
    }


def _joint(layer: LayerSettings) -> dict[str, float]:
    """Tests of all settings at once: under each permutation, the same figures as observed."""
    known, null = joint_null(layer)
    if not known.any():
        return {"median_p": math.nan, "significant_p": math.nan}
    rho = np.array([row["rho"] for row in layer.rows])[known]
    every = np.vstack([rho, null])
    median = np.abs(np.median(every, axis=1))
    # each arrangement is judged as the observed one is: by its rank among all of them
    size = np.abs(every)
    bar = np.quantile(size, 1 - SIGNIFICANT, axis=0)
    clear = size > bar
    one_way = np.maximum((clear & (every > 0)).mean(axis=1), (clear & (every < 0)).mean(axis=1))
    return {
        "median_p": float((median >= median[0] - 1e-12).mean()),
        "significant_p": float((one_way >= one_way[0] - 1e-12).mean()),
    }
