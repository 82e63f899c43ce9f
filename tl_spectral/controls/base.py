"""What every null model can do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass(frozen=True)
class Null(ABC):
    """A null model: what to compare a number with, and what that comparison can show.

    Attributes:
        name: Its name, as :func:`tl_spectral.controls.null_of` takes it.
        acts_on: What :meth:`draw` takes and gives: ``"matrix"``, ``"model"``, ``"graph"``,
            ``"units"``, ``"layers"`` or ``"activations"``.
        keeps: What a draw has in common with the original.
        breaks: What it has not: a metric beyond its null owes itself to this.
        random: Whether draws differ from seed to seed.
    """

    name: ClassVar[str]
    acts_on: ClassVar[str]
    keeps: ClassVar[str]
    breaks: ClassVar[str]
    random: ClassVar[bool] = True

    @abstractmethod
    def draw(self, x: Any, seed: int) -> Any:
        """One draw: an object of the same kind as ``x``, which is left as it is.

        Args:
            x: The original.
            seed: The same seed gives the same draw.

        Raises:
            InputError: If ``x`` is nothing this null acts on.
        """

    def n_draws(self, x: Any) -> int | None:
        """Number of draws there are, if they can be enumerated by seeds that count from 0."""
        return None if self.random else 1

    def expected(self, x: Any, metric: str, k: int) -> float | None:
        """Closed form of the mean of a spectral metric over draws, where there is one.

        Args:
            x: The original.
            metric: One of :data:`tl_spectral.metrics.METRICS`.
            k: Dimension of the subspaces in ``self_alignment``.
        """
        return None
