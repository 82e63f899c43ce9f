"""What a run shows of the power method."""

from __future__ import annotations

import pandas as pd

from tl_spectral.analysis.options import RunOptions
from tl_spectral.analysis.verdicts import (
    NO_EFFECT,
    Finding,
    Interval,
    Tables,
    controlled,
    has_control,
    mean_interval,
    signed,
    unjudged,
)


def _rho(table: pd.DataFrame, target: str, tokens: str) -> pd.Series[float]:
    """ρ by layer for one target and class of tokens."""
    rows = table[(table["target"] == target) & (table["tokens"] == tokens)]
    return rows.set_index("layer")["rho"].astype(float).sort_index()


def _excess(table: pd.DataFrame) -> Interval:
    """Mean over layers of ρ towards a layer's own mode minus ρ towards another layer's."""
    own, other = _rho(table, "v1", "all"), _rho(table, "other layer", "all")
    return mean_interval((own - other).dropna().to_numpy())


def tilting(tables: Tables, options: RunOptions) -> Finding:
    """Do text tokens tilt to the dominant mode of the layer they pass, and to no other?

    Args:
        tables: The tables of the run.
        options: Its options.
    """
    claim = "tokens tilt to the layer's mode"
    question = "Do more text tokens tilt to the layer's own dominant OV mode than to another's?"
    table = tables["power"]
    if "rho" not in table:
        return unjudged(claim, question, "the model has no value and output weights per head")
    by_variant = dict(iter(table[table["rho"].notna()].groupby("variant")))
    part = by_variant["trained"]
    if part["layer"].nunique() < 2 or _rho(part, "other layer", "all").empty:
        return unjudged(claim, question, "one layer has no other to compare with")
    effect = _excess(part)
    own, other = _rho(part, "v1", "all").mean(), _rho(part, "other layer", "all").mean()
    baseline, control_holds = f"towards another layer's mode {other:.3f}", None
    if has_control(options):
        control = _excess(by_variant["control"])
        baseline += f"; control's excess {control}"
        control_holds = control.above and control.value >= effect.value / 2
    verdict = controlled(effect.above, control_holds)
    drawn, random = _rho(part, "v1", "random").mean(), _rho(part, "random F", "random").mean()
    sentence = (
        f"{own:.0%} of text tokens tilt towards the dominant mode of the layer they pass, "
        f"{other:.0%} towards that of another layer (difference {effect} over layers). Isotropic "
        f"random tokens prove nothing: {drawn:.0%} of them tilt, and {random:.0%} with a random "
        "matrix in the layer's place."
    )
    if verdict == NO_EFFECT:
        verb = "The opposite of the claim" if effect.high < 0 else "No effect"
        sentence = f"{verb}. {sentence}"
    return Finding(
        claim,
        question,
        f"ρ = {own:.3f}, excess {signed(effect.value)}",
        baseline,
        f"95 % {effect.bounds} (over layers)",
        verdict,
        sentence,
    )


def _likeness(table: pd.DataFrame) -> tuple[Interval, Interval]:
    """Mean pairwise cosine at the first and at the last boundary, without the first token."""
    rows = table[(table["measure"] == "mean_cosine") & (table["tokens"] == "rest")]
    ordered = rows.sort_values("boundary").to_dict("records")
    ends = [Interval(row["value"], row["low"], row["high"]) for row in (ordered[0], ordered[-1])]
    return ends[0], ends[1]


def growing_alike(tables: Tables, options: RunOptions) -> Finding:
    """Do the tokens of a text grow alike with depth?

    Args:
        tables: The tables of the run.
        options: Its options.
    """
    claim = "tokens grow alike with depth"
    question = "Is the mean cosine between a text's tokens higher after the last block?"
    table = tables["oversmoothing"]
    if "value" not in table or table["low"].isna().all():
        return unjudged(claim, question, "it takes two texts of three tokens at least")
    by_variant = dict(iter(table.groupby("variant")))
    first, last = _likeness(by_variant["trained"])
    baseline, control_holds = "0 for random directions", None
    if has_control(options):
        before, after = _likeness(by_variant["control"])
        baseline += f"; control {before.value:.3f} → {after.value:.3f}"
        control_holds = (
            after.low > before.high and after.value - before.value >= (last.value - first.value) / 2
        )
    verdict = controlled(last.low > first.high, control_holds)
    sentence = (
        f"Without the first token, the mean cosine between the tokens of a text is {first} before "
        f"the first block and {last} after the last."
    )
    if verdict == NO_EFFECT:
        sentence = "No effect: they do not grow alike. " + sentence
    return Finding(
        claim,
        question,
        f"{first.value:.3f} → {last.value:.3f}",
        baseline,
        f"95 % {first.bounds} → {last.bounds} (over texts)",
        verdict,
        sentence,
    )
