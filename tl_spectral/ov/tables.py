"""Tidy tables of heads and of layer modes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from tl_spectral.ov.heads import DEGENERATE, NILPOTENT

if TYPE_CHECKING:
    import pandas as pd

    from tl_spectral.ov.circuits import OVCircuits

_MEASURES = (
    *("copying_score", "rotation_index", "complex_fraction", "spectral_radius", "frobenius"),
    *("symmetry_score", "antisymmetric_energy", "rank", "effective_rank"),
    *("leading_gap", "eigenvalue_share"),
)


def heads_table(ov: OVCircuits) -> pd.DataFrame:
    """One row per layer and head (see :meth:`OVCircuits.to_dataframe`)."""
    import pandas as pd

    d_model, d_head = ov.W_V.shape[2:]
    random = ov.baseline
    fixed = {
        "baseline_copying_score": 0.0,
        "baseline_sd": ov.copying_score_sd,
        "baseline_rotation_index": 2 / math.pi,
        "baseline_complex_fraction": 1 - (2 / (math.pi * d_head)) ** 0.5,
        "baseline_symmetry_score": 1 / d_model,
        "baseline_symmetry_sd": random["symmetry_score"][1],
        "baseline_antisymmetric_energy": 0.5 - 0.5 / d_model,
        "baseline_rank": float(d_head),
        "baseline_effective_rank": random["effective_rank"][0],
        "baseline_effective_rank_sd": random["effective_rank"][1],
        "baseline_leading_gap": random["leading_gap"][0],
        "baseline_eigenvalue_share": random["eigenvalue_share"][0],
        "baseline_degenerate": random["degenerate"][0],
    }
    measures = {name: getattr(ov, name).tolist() for name in _MEASURES}
    if ov.vocab_copying_score is not None and ov.vocab_copying_score_sd is not None:
        measures["vocab_copying_score"] = ov.vocab_copying_score.tolist()
        fixed["baseline_vocab_copying_score"] = 0.0
        fixed["baseline_vocab_sd"] = ov.vocab_copying_score_sd
    degenerate = ov.degenerate.tolist()
    rows: list[dict[str, Any]] = []
    for row, layer in enumerate(ov.layers):
        for head in range(ov.W_V.shape[1]):
            own = {name: values[row][head] for name, values in measures.items()}
            rows.append(
                {
                    "layer": layer,
                    "head": head,
                    **own,
                    "degenerate": degenerate[row][head],
                    "note": _head_note(own),
                    **fixed,
                    "baseline_spectral_radius": own["frobenius"] / math.sqrt(d_model),
                }
            )
    return pd.DataFrame(rows)


def _head_note(own: dict[str, float]) -> str:
    if own["frobenius"] == 0:
        return "the head is zero: it has no scores"
    if own["spectral_radius"] == 0:
        return "every eigenvalue is zero (it writes where it does not read): no copying score"
    remarks = []
    if own["eigenvalue_share"] <= NILPOTENT:
        remarks.append("eigenvalues are next to nothing: the copying score's sign is an accident")
    if own["leading_gap"] < DEGENERATE:
        remarks.append("leading moduli within 1 %: which eigenvalue leads is an accident")
    if math.isinf(own["leading_gap"]):
        remarks.append("one eigenvalue or pair: nothing to compare it with")
    return "; ".join(remarks)


def modes_table(ov: OVCircuits, k: int, method: str) -> pd.DataFrame:
    """One row per layer, rule and mode (see :meth:`OVCircuits.modes_dataframe`)."""
    import pandas as pd

    rows = []
    for layer in ov.layers:
        norm = ov.layer_matrix(layer).norm().item()
        radius = norm / math.sqrt(ov.W_V.shape[2])
        for skip in (True, False):
            for mode in ov.modes(layer, skip, k, method=method):
                notes = [mode.note, "" if mode.gap is not None else "no other mode: no gap"]
                rows.append(
                    {
                        "layer": layer,
                        "rule": "with_skip" if skip else "without_skip",
                        "rank": mode.rank,
                        "eigenvalue_re": mode.eigenvalue.real,
                        "eigenvalue_im": mode.eigenvalue.imag,
                        "gap": mode.gap,
                        "kind": mode.kind,
                        "frobenius": norm,
                        "strength": mode.strength,
                        "baseline_strength": radius + skip,
                        "condition": mode.condition,
                        "multiplicity": mode.multiplicity,
                        "degenerate": mode.degenerate,
                        "residual": mode.residual,
                        "method": mode.method,
                        "note": "; ".join(filter(None, notes)),
                    }
                )
    return pd.DataFrame(rows).astype({"gap": "float64", "condition": "float64"})
