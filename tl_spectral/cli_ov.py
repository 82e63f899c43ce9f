"""What ``tl-spectral ov`` prints and writes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    import pandas as pd

    from tl_spectral.ov import OVCircuits


def tell(circuits: OVCircuits, heads: pd.DataFrame, modes: pd.DataFrame) -> None:
    """Copying scores of all heads and the dominant mode of each layer, beside their baselines."""
    through = circuits.vocab_copying_score_sd is not None
    measure = "vocab_copying_score" if through else "copying_score"
    spread = circuits.vocab_copying_score_sd if through else circuits.copying_score_sd
    where = "through the vocabulary" if through else "on the residual basis"
    folded = f", {' and '.join(circuits.folded)} folded in" if circuits.folded else ""
    vague = int(heads["degenerate"].sum())
    table = Table(
        "layer",
        f"copying score by head, {where}",
        "λ₁, skip kept",
        "λ₁, no skip",
        "‖F‖",
        title=f"OV circuits of {circuits.provenance.model}{folded}",
        caption=f"Random heads score 0 ± {spread:.3f}; bold is beyond two standard deviations. "
        "A λ in brackets is no larger than a random matrix of that norm would have. "
        f"{vague} of {len(heads)} heads have no eigenvalue that can be named reliably.",
    )
    leading = modes[modes["rank"] == 1]
    for layer, group in heads.groupby("layer"):
        scores = [_score(value, spread or 0.0) for value in group[measure]]
        rows = {row["rule"]: row for row in leading[leading["layer"] == layer].to_dict("records")}
        table.add_row(
            str(layer),
            Text(" ").join(scores),
            _eigenvalue(rows["with_skip"]),
            _eigenvalue(rows["without_skip"]),
            f"{rows['with_skip']['frobenius']:.3g}",
        )
    Console().print(table)


def write(circuits: OVCircuits, heads: pd.DataFrame, modes: pd.DataFrame, out: Path) -> None:
    """``heads.csv``, ``layers.csv`` and the layer matrices."""
    from safetensors.torch import save_file

    out.mkdir(parents=True, exist_ok=True)
    heads.to_csv(out / "heads.csv", index=False)
    modes.to_csv(out / "layers.csv", index=False)
    matrices = {f"F.{layer}": circuits.layer_matrix(layer) for layer in circuits.layers}
    save_file(matrices, out / "F.safetensors")


def _score(value: float, spread: float) -> Text:
    return Text(f"{value:+.2f}", style="bold" if abs(value) > 2 * spread else "dim")


def _eigenvalue(mode: dict[Any, Any]) -> str:
    real, imaginary = mode["eigenvalue_re"], mode["eigenvalue_im"]
    text = f"{real:.3g} ± {imaginary:.3g}i" if mode["kind"] == "complex" else f"{real:.3g}"
    return text if mode["strength"] > mode["baseline_strength"] else f"({text})"
