"""The options of a run: everything that changes a number, and nothing else."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from tl_spectral.errors import InputError
from tl_spectral.jacobian.blocks import CONTEXTS

CONTROLS = (None, "random-init")


@dataclass(frozen=True)
class RunOptions:
    """Options of :func:`tl_spectral.analyze`; they are written into the run directory.

    Attributes:
        layers: Layers analysed.
        samples: Texts whose states make the unit graphs and the natural units.
        jacobian_samples: Texts (the first of them) whose Jacobians are averaged.
        spectrum_samples: Texts (the first of those) whose Jacobians are decomposed one by one.
        tokens_per_text: Each text is cut to its first tokens; ``None`` keeps whole texts.
        pos: Position in each text.
        context: Jacobian context.
        control: ``"random-init"`` analyses a re-initialised twin beside the model.
        seed: Seed of everything random.
        top_k: Strongest correlations kept per unit of the graph.
        resolution: Louvain resolution.
        louvain_runs: Louvain runs per graph, over which participation and coupling are averaged.
        permutations: Permutations behind each p.
        chunk: Prompts per Jacobian task.
        power_texts: Texts (the first of them) whose tokens are followed towards the dominant modes.
    """

    layers: tuple[int, ...]
    samples: int
    jacobian_samples: int
    spectrum_samples: int
    tokens_per_text: int | None
    pos: int
    context: str
    control: str | None
    seed: int
    top_k: int = 10
    resolution: float = 1.0
    louvain_runs: int = 20
    permutations: int = 2000
    chunk: int = 8
    power_texts: int = 32

    def __post_init__(self) -> None:
        """Refuse what cannot be analysed, before any work."""
        if self.context not in CONTEXTS:
            raise InputError(f"context must be one of {CONTEXTS}, got {self.context!r}.")
        if self.control not in CONTROLS:
            raise InputError(f"control must be 'random-init' or None, got {self.control!r}.")
        if self.samples < 3:
            raise InputError(
                f"{self.samples} texts are too few: a correlation over samples needs at least 3, "
                "and a meaningful one several hundred."
            )
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise InputError(f"seed must be an integer, got {self.seed!r}.")
        counts = ("jacobian_samples", "spectrum_samples", "top_k", "louvain_runs", "chunk")
        for name in (*counts, "power_texts"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if self.permutations < 100:
            raise InputError(f"permutations must be at least 100, got {self.permutations}.")

    @property
    def variants(self) -> tuple[str, ...]:
        """What is analysed: the model, and its control if there is one."""
        return ("trained",) if self.control is None else ("trained", "control")

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {**asdict(self), "layers": list(self.layers)}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> RunOptions:
        """From :meth:`to_json`."""
        return cls(**{**values, "layers": tuple(values["layers"])})
