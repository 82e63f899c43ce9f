"""What a run shows, claim by claim: effect, baseline, uncertainty, verdict, and a sentence.

Verdicts: ``holds`` (the effect is there, beyond its baseline, and beyond the control if one was
run), ``not learned`` (the re-initialised control shows it too), ``no effect`` (it cannot be told
from its baseline), ``cannot tell`` (too few layers or samples, or no standard attention).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

import numpy as np
import pandas as pd
from scipy import stats

from tl_spectral.analysis.options import RunOptions
from tl_spectral.analysis.power_findings import growing_alike, tilting
from tl_spectral.analysis.verdicts import (
    CANNOT_TELL,
    HOLDS,
    NO_EFFECT,
    NOT_LEARNED,
    Finding,
    Interval,
    Tables,
    controlled,
    geometric_interval,
    has_control,
    mean_interval,
    signed,
    unjudged,
)

MIN_LAYERS = 6  # fewer make no early and late third
MIN_DEPTH = 3
MIN_PROMPTS = 4  # the interval of two or three is as wide as the world
_FEW_PROMPTS = f"the spread over prompts needs {MIN_PROMPTS} at least; raise spectrum_samples"


def findings(tables: Tables, options: RunOptions) -> pd.DataFrame:
    """Judge every claim that the tables can speak to.

    Args:
        tables: The tables of the run.
        options: Its options.

    Returns:
        One row per claim.
    """
    judges: tuple[Callable[[Tables, RunOptions], Finding], ...] = (
        _headline,
        _unit_coupling,
        _gradient,
        _complex,
        _near_symmetric,
        _funnel,
        _averaging,
        _modules,
        _copying,
        tilting,
        growing_alike,
    )
    return pd.DataFrame([asdict(judge(tables, options)) for judge in judges])


def _profile(
    tables: Tables, variant: str, metric: str, operator: str, units: str, column: str = "value"
) -> pd.Series[float]:
    """A metric over layers, the mean over samples."""
    table = tables["spectra"]
    chosen = table[
        (table["variant"] == variant)
        & (table["metric"] == metric)
        & (table["operator"] == operator)
        & (table["units"] == units)
        & (table["estimate"] == "per_sample")
    ]
    return chosen.set_index("layer")[column].astype(float).sort_index()


def _early_minus_late(profile: pd.Series[float]) -> Interval:
    """Difference of the means of the first and last third of the layers, Welch interval."""
    third = max(2, len(profile) // 3)
    early, late = profile.to_numpy()[:third], profile.to_numpy()[-third:]
    interval = stats.ttest_ind(early, late, equal_var=False).confidence_interval(0.95)
    return Interval(float(early.mean() - late.mean()), float(interval.low), float(interval.high))


def _headline(tables: Tables, options: RunOptions) -> Finding:
    claim = "bridge units follow the operator"
    question = (
        "Are bridge units suppressed where a layer rotates and amplified where it is symmetric?"
    )
    trend = tables["trend"]
    primary = trend[
        (trend["character"] == "antisymmetric_energy")
        & (trend["operator"] == "R")
        & (trend["units"] == "natural")
    ]
    by_variant = {str(row["variant"]): row for row in primary.to_dict(orient="records")}
    row = by_variant["trained"]
    if row["verdict"] == CANNOT_TELL:
        return unjudged(claim, question, f"{row['n_layers']} layers with a coupling are too few")
    interval = Interval(row["rho"], row["low"], row["high"])
    # The claim has a direction: the more rotational, the lower the coupling.
    holds = row["verdict"] == HOLDS and row["rho"] < 0
    baseline, control_holds = "0 (no trend)", None
    if has_control(options):
        control = by_variant["control"]
        baseline += f"; control {Interval(control['rho'], control['low'], control['high'])}"
        control_holds = control["verdict"] == HOLDS and control["rho"] < 0
    verdict = controlled(holds, control_holds)
    if row["verdict"] == HOLDS and row["rho"] > 0:
        sentence = (
            f"The coupling of participation and gain rises with the antisymmetric energy of R "
            f"(ρ = {interval}): the opposite of the claim."
        )
    elif verdict == NO_EFFECT:
        sentence = (
            f"No effect: over {int(row['n_layers'])} layers the coupling of participation and gain "
            f"does not follow the antisymmetric energy of R beyond chance (ρ = {interval}, "
            f"p = {row['p_shift']:.3f} over circular shifts)."
        )
    else:
        sentence = (
            f"The more rotational a layer, the lower the coupling of participation and gain: "
            f"ρ = {interval} over {int(row['n_layers'])} layers."
        )
        if verdict == NOT_LEARNED:
            sentence += " The re-initialised control shows it too."
    raw = Interval(row["raw_rho"], row["raw_low"], row["raw_high"])
    sentence += f" With no confound regressed out the trend is {raw}."
    return Finding(
        claim,
        question,
        f"Spearman ρ = {signed(row['rho'])} over layers",
        baseline,
        f"95 % {interval.bounds}, p = {row['p_shift']:.3f} (circular "
        f"shifts; least possible {row['smallest_p_shift']:.3f})",
        verdict,
        sentence,
    )


def _unit_coupling(tables: Tables, options: RunOptions) -> Finding:
    claim = "participation predicts gain"
    question = "Within a layer, are units between communities amplified more, or less?"
    by_variant = dict(iter(tables["coupling"].groupby("variant")))
    table = by_variant["trained"].dropna(subset=["unit_rho"])
    if table.empty:
        return unjudged(claim, question, "no layer has a coupling (see the notes of the table)")
    significant = table[table["unit_q"] < 0.05]
    mean = mean_interval(table["unit_rho"].to_numpy())
    baseline, control_holds = "0 of layers at q < 0.05 if there is no coupling", None
    if has_control(options):
        control = by_variant["control"]
        count = int((control["unit_q"] < 0.05).sum())
        baseline += f"; control {count} of {len(control)}"
        control_holds = count >= max(1, len(significant))
    verdict = controlled(len(significant) > 0, control_holds)
    up = int((significant["unit_rho"] > 0).sum())
    sentence = (
        f"After norm gain, variance, strength and massive activations are regressed out, "
        f"participation and gain are correlated in {len(significant)} of {len(table)} layers at "
        f"q < 0.05 ({up} positive, {len(significant) - up} negative); mean ρ over layers {mean}."
    )
    if verdict == NO_EFFECT:
        sentence = "No effect in any single layer. " + sentence
    return Finding(
        claim,
        question,
        f"{len(significant)} of {len(table)} layers; mean partial ρ = {signed(mean.value)}",
        baseline,
        f"95 % of the mean {mean.bounds}",
        verdict,
        sentence,
    )


def _gradient(tables: Tables, options: RunOptions) -> Finding:
    claim = "rotation falls with depth"
    question = "Does the antisymmetric energy of the update R fall with depth?"
    profile = _profile(tables, "trained", "antisymmetric_energy", "R", "natural")
    if len(profile) < MIN_LAYERS:
        return unjudged(claim, question, f"{len(profile)} layers make no early and late third")
    random = _profile(tables, "trained", "antisymmetric_energy", "R", "natural", "baseline").mean()
    effect = _early_minus_late(profile)
    raw = _early_minus_late(_profile(tables, "trained", "antisymmetric_energy", "R", "raw"))
    baseline, control_holds = f"0; a random update has {random:.3f} at every layer", None
    if has_control(options):
        control = _early_minus_late(
            _profile(tables, "control", "antisymmetric_energy", "R", "natural")
        )
        baseline += f"; control {control}"
        control_holds = control.above and control.value >= effect.value / 2
    verdict = controlled(effect.above, control_holds)
    third = max(2, len(profile) // 3)
    sentence = (
        f"The antisymmetric energy of R (natural units) is {profile.to_numpy()[:third].mean():.3f} "
        f"in the first and {profile.to_numpy()[-third:].mean():.3f} in the last third of the "
        f"layers (difference {effect}); in raw units the difference is {raw}."
    )
    if verdict == NO_EFFECT:
        sentence = "No effect: it does not fall with depth. " + sentence
    return Finding(
        claim,
        question,
        f"early − late = {signed(effect.value)}",
        baseline,
        f"95 % {effect.bounds} (Welch, over layers)",
        verdict,
        sentence,
    )


def _complex(tables: Tables, options: RunOptions) -> Finding:
    claim = "most eigenvalues are complex"
    question = "Does J have more complex eigenvalues than a random matrix?"
    profile = _profile(tables, "trained", "complex_fraction", "J", "raw")
    random = _profile(tables, "trained", "complex_fraction", "J", "raw", "baseline").mean()
    difference = mean_interval(profile.to_numpy() - random)
    control = ""
    if has_control(options):
        value = _profile(tables, "control", "complex_fraction", "J", "raw").mean()
        control = f"; control {value:.4f}"
    verdict = HOLDS if difference.above else NO_EFFECT
    sentence = (
        f"{profile.mean():.1%} of the eigenvalues of J are complex; a random matrix of this size "
        f"has {random:.1%}. "
    )
    sentence += (
        "That is more than chance gives."
        if difference.above
        else "By itself the share is no evidence of learned rotation."
    )
    return Finding(
        claim,
        question,
        f"{profile.mean():.4f} of eigenvalues",
        f"real Ginibre matrix {random:.4f}{control}",
        f"difference {difference} (over layers)",
        verdict,
        sentence,
    )


def _near_symmetric(tables: Tables, options: RunOptions) -> Finding:
    claim = "late symmetry is more than the skip"
    question = "Is J more symmetric in late layers than identity plus a random update of that size?"
    profile = _profile(tables, "trained", "antisymmetric_energy", "J", "natural")
    if len(profile) < MIN_LAYERS:
        return unjudged(claim, question, f"{len(profile)} layers make no last third")
    skip = _profile(tables, "trained", "antisymmetric_energy", "J", "natural", "skip_baseline")
    third = max(2, len(profile) // 3)
    late = skip.to_numpy()[-third:] - profile.to_numpy()[-third:]
    effect = mean_interval(late)
    baseline, control_holds = f"I + random update {skip.to_numpy()[-third:].mean():.3f}", None
    if has_control(options):
        ours = _profile(tables, "control", "antisymmetric_energy", "J", "natural").to_numpy()
        theirs = _profile(
            tables, "control", "antisymmetric_energy", "J", "natural", "skip_baseline"
        ).to_numpy()
        control = mean_interval(theirs[-third:] - ours[-third:])
        baseline += f"; control's excess {control}"
        control_holds = control.above and control.value >= effect.value / 2
    verdict = controlled(effect.above, control_holds)
    sentence = (
        f"In the last third the antisymmetric energy of J is "
        f"{profile.to_numpy()[-third:].mean():.3f}; identity plus a random update of the same norm "
        f"has {skip.to_numpy()[-third:].mean():.3f} (excess symmetry {effect}): "
    )
    sentence += (
        "the update itself is more symmetric than chance."
        if effect.above
        else "the skip connection alone explains it."
    )
    return Finding(
        claim,
        question,
        f"excess symmetry {signed(effect.value)}",
        baseline,
        f"95 % {effect.bounds} (over layers)",
        verdict,
        sentence,
    )


def _ranks(tables: Tables, variant: str, estimate: str, *, first: bool = False) -> np.ndarray:
    """Effective rank of each chain after the last block (or after the first), raw units."""
    chain = tables["chain"]
    layers = chain["layer"]
    chosen = chain[
        (chain["variant"] == variant)
        & (chain["estimate"] == estimate)
        & (chain["units"] == "raw")
        & (layers == (layers.min() if first else layers.max()))
    ]
    ranks: np.ndarray = chosen["effective_rank"].to_numpy(dtype=float)
    return ranks


def _funnel(tables: Tables, options: RunOptions) -> Finding:
    claim = "the stack funnels into few dimensions"
    question = "Is the effective rank of the product of Jacobians over depth below chance?"
    ranks = _ranks(tables, "trained", "per_sample") if len(tables["chain"]) else np.array([])
    if not len(ranks):
        return unjudged(claim, question, "the layers analysed are not consecutive")
    if len(ranks) < MIN_PROMPTS:
        return unjudged(claim, question, _FEW_PROMPTS)
    if len(options.layers) < MIN_DEPTH:
        return unjudged(claim, question, f"{len(options.layers)} layers are no stack")
    chain = tables["chain"]
    last = chain[(chain["variant"] == "trained") & (chain["layer"] == chain["layer"].max())]
    random = float(last["baseline_effective_rank"].dropna().iloc[0])
    first = geometric_interval(_ranks(tables, "trained", "per_sample", first=True))
    mean = geometric_interval(ranks)
    baseline = f"I + random updates of the same norms {random:.1f}"
    control_holds = None
    if has_control(options):
        control = geometric_interval(_ranks(tables, "control", "per_sample")).value
        baseline += f"; control {control:.1f}"
        control_holds = control <= mean.value * 1.25
    verdict = controlled(mean.high < random, control_holds)
    sentence = (
        f"The effective rank of the chain goes from {first.value:.1f} after the first block to "
        f"{mean.value:.1f} after the last (geometric mean of {len(ranks)} prompts); the skip "
        f"connection and random updates of the same norms give {random:.1f}."
    )
    if verdict == NO_EFFECT:
        sentence = "No effect: " + sentence[0].lower() + sentence[1:]
    if verdict == NOT_LEARNED:
        sentence += " The re-initialised control funnels as much."
    return Finding(
        claim,
        question,
        f"{first.value:.1f} → {mean.value:.1f}",
        baseline,
        f"95 % [{mean.low:.1f}, {mean.high:.1f}] ({len(ranks)} prompts)",
        verdict,
        sentence,
    )


def _averaging(tables: Tables, options: RunOptions) -> Finding:
    claim = "averaging over prompts raises the rank"
    question = "Does the chain of mean Jacobians have more dimensions than a prompt's own chain?"
    if not len(tables["chain"]):
        return unjudged(claim, question, "the layers analysed are not consecutive")
    ranks = _ranks(tables, "trained", "per_sample")
    mean = float(_ranks(tables, "trained", "mean_jacobian")[0])
    if len(ranks) < MIN_PROMPTS:
        return unjudged(claim, question, _FEW_PROMPTS)
    own = geometric_interval(ranks)
    baseline = f"1 (own chains {own.value:.1f})"
    if has_control(options):
        ratio = float(_ranks(tables, "control", "mean_jacobian")[0])
        ratio /= geometric_interval(_ranks(tables, "control", "per_sample")).value
        baseline += f"; control ratio {ratio:.2f}"
    holds = mean > own.high
    sentence = (
        f"The chain of Jacobians averaged over {options.jacobian_samples} prompts has effective "
        f"rank {mean:.1f}, a single prompt's chain {own.value:.1f}: "
    )
    sentence += (
        "a figure from mean Jacobians is not a per-prompt figure."
        if holds
        else "here the two agree within the spread over prompts."
    )
    return Finding(
        claim,
        question,
        f"ratio {mean / own.value:.2f}",
        baseline,
        f"own chains 95 % [{own.low:.1f}, {own.high:.1f}] ({len(ranks)} prompts)",
        HOLDS if holds else NO_EFFECT,
        sentence,
    )


def _modules(tables: Tables, options: RunOptions) -> Finding:
    claim = "units form communities"
    question = "Is the unit graph more modular than a rewired graph of the same degrees?"
    by_variant = dict(iter(tables["communities"].groupby("variant")))
    table = by_variant["trained"]
    n_units = int((tables["units"]["layer"] == options.layers[0]).sum()) // len(options.variants)
    if options.samples <= n_units:
        why = f"{options.samples} texts correlate {n_units} units by their number alone"
        return unjudged(claim, question, f"{why}; use more texts than units")
    z = table["z_score"].dropna().to_numpy()
    if not len(z):
        return unjudged(claim, question, "no layer has a null distribution")
    share = float((z > 2).mean())
    baseline, control_note = f"rewired graphs Q = {table['null_mean'].mean():.3f}, z = 0", ""
    if has_control(options):
        control = by_variant["control"]
        baseline += f"; control Q = {control['modularity'].mean():.3f}"
        control_note = (
            f" The re-initialised control has Q = {control['modularity'].mean():.3f}: "
            "communities as such need no training."
            if (control["z_score"] > 2).mean() >= share / 2
            else ""
        )
    verdict = controlled(share > 0.5, bool(control_note) if has_control(options) else None)
    sentence = (
        f"Modularity is {table['modularity'].mean():.3f} on average, {np.median(z):.0f} standard "
        f"deviations above rewired graphs in the median layer; {share:.0%} of the layers exceed 2. "
        f"Louvain runs agree with ARI = {table['stability_ari'].mean():.2f} on average."
        f"{control_note}"
    )
    return Finding(
        claim,
        question,
        f"Q = {table['modularity'].mean():.3f}, median z = {np.median(z):.1f}",
        baseline,
        f"sd over Louvain runs {table['modularity_sd'].mean():.3f}",
        verdict,
        sentence,
    )


def _copying(tables: Tables, options: RunOptions) -> Finding:
    claim = "heads copy or suppress"
    question = "Do more heads than chance have an OV circuit of one sign?"
    table = tables["ov"]
    if "copying_score" not in table.columns:
        return unjudged(claim, question, "the model has no value and output weights per head")
    shares = {}
    for variant, part in table.groupby("variant"):
        shares[variant] = float((part["copying_score"].abs() > 2 * part["baseline_sd"]).mean())
    part = table[table["variant"] == "trained"]
    n = len(part)
    test = stats.binomtest(round(shares["trained"] * n), n, 0.05, alternative="greater")
    interval = stats.binomtest(round(shares["trained"] * n), n).proportion_ci(0.95)
    control_holds = None
    baseline = "0.05 of random heads"
    if has_control(options):
        baseline += f"; control {shares['control']:.2f}"
        control_holds = shares["control"] >= shares["trained"] / 2
    verdict = controlled(bool(test.pvalue < 0.05), control_holds)
    copiers = int((part["copying_score"] > 2 * part["baseline_sd"]).sum())
    sentence = (
        f"{shares['trained']:.0%} of {n} heads have a copying score beyond 2 standard deviations "
        f"of random heads: {copiers} copy, {round(shares['trained'] * n) - copiers} suppress."
    )
    if verdict == NO_EFFECT:
        sentence = "No effect: " + sentence
    return Finding(
        claim,
        question,
        f"{shares['trained']:.2f} of heads",
        baseline,
        f"95 % [{interval.low:.2f}, {interval.high:.2f}]",
        verdict,
        sentence,
    )
