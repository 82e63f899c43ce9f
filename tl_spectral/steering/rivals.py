"""The rivals of an edit: the same vector simply added, and random edits of the same size."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from tl_spectral.steering.edit import Shift
from tl_spectral.steering.measurement import Meter

_NO_COST = 1e-12  # KL, in nats, that is rounding
_LONGEST = 1e4  # lengths of the stream beyond which nothing is looked for


def random_directions(d: int, seed: int) -> Iterator[Float[Tensor, " d"]]:
    """Isotropic unit vectors without end, by seed."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        vector = torch.randn(d, generator=generator, dtype=torch.float64)
        yield vector / vector.norm()


class EqualKL:
    """Finds how long a vector must be to cost a given KL; every price asked for is remembered.

    Args:
        cost: KL by length, in nats.
        scale: Length of what the vector is added to.
    """

    def __init__(self, cost: Callable[[float], float], scale: float) -> None:
        self._cost, self._scale = cost, scale
        self._known: dict[float, float] = {0.0: 0.0}

    @classmethod
    def along_direction(cls, meter: Meter) -> EqualKL:
        """For the direction of the subject, added to ``resid_post``."""
        w = meter.subject.direction
        return cls(lambda length: meter.run(Shift(length * w)).kl, meter.mean_norm)

    def length(self, kl: float) -> tuple[float, str]:
        """The length, and what fell short.

        Interpolates on log-log axes: KL grows about as the square of a short vector.
        """
        if kl <= _NO_COST:
            return 0.0, "the edit costs nothing"
        step = 0.01 * self._scale
        while self._bracket(kl)[1] == math.inf:
            step = max(4 * max(self._known), step)
            if step > _LONGEST * self._scale:
                note = "no length of vector costs as much KL; this is the longest tried"
                return max(self._known), note
            self._measure(step)
        for turn in range(24):
            low, high = self._bracket(kl)
            for end in (low, high):
                if abs(self._known[end] - kl) <= 0.01 * kl:
                    return end, ""
            if self._known[low] <= 0:
                middle = high * min(max((kl / self._known[high]) ** 0.5, 0.05), 0.9)
            else:
                at, start, end = (math.log(x) for x in (kl, self._known[low], self._known[high]))
                weight = 0.5 if turn % 3 == 2 else (at - start) / (end - start)
                middle = low * (high / low) ** weight
            self._measure(middle)
        return self._bracket(kl)[1], "KL jumps here; this length costs a little more"

    def _bracket(self, kl: float) -> tuple[float, float]:
        """The longest known vector that costs less, below the shortest that costs as much."""
        high = min((b for b, cost in self._known.items() if cost >= kl), default=math.inf)
        return max(b for b in self._known if b < high), high

    def _measure(self, length: float) -> None:
        self._known[length] = self._cost(length)
