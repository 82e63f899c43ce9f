"""Does the next block read what this one writes?"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from scipy import stats
from torch import Tensor

from tl_spectral.decompose import to_matrix
from tl_spectral.errors import InputError
from tl_spectral.results import Result
from tl_spectral.threads import one_blas_thread


@dataclass(frozen=True, eq=False)
class ForwardAlignment(Result):
    """Overlap of a written and a read subspace.

    Attributes:
        value: ``‖U_kᵀV_k‖_F²/k``, in [0, 1].
        chance: ``k/d``, its mean for unrelated subspaces.
        chance_std: Its standard deviation for them, ``√(2(d−k)²/((d−1)(d+2)))/d``: that of
            ``tr(PQ)/k`` for a fixed and a uniformly random projector of rank k.
        chance_interval: Range that holds 95 % of unrelated subspaces (the beta distribution of that
            mean and deviation, for the smaller of k and d − k; exact for 1).
        z: ``(value − chance)/chance_std``; NaN for k = d, where both are the whole space.
        p: Two-sided p of that distribution.
        cosines: Cosines of the k principal angles, descending.
        k: Dimension of the subspaces.
        d: Dimension of the space.
    """

    value: float
    chance: float
    chance_std: float
    chance_interval: tuple[float, float]
    z: float
    p: float
    cosines: Float[Tensor, " k"]
    k: int
    d: int


def forward_alignment(writer: Any, reader: Any, k: int = 10) -> ForwardAlignment:
    """Overlap between what one block writes and what the next one reads.

    ``U_k`` are the top left singular vectors of the writer's update, ``V_k`` the top right ones of
    the reader's. [A] (arXiv 2605.14258) names the quantity; the formula is ours.

    Args:
        writer: Update ``R_l``; of a :class:`BlockJacobian` its update is taken.
        reader: Update ``R_{l+1}``, likewise.
        k: Dimension of the subspaces.

    Returns:
        The overlap beside what unrelated subspaces have.

    Raises:
        InputError: If the sizes differ, or k does not lie in 1 … d.
        ProvenanceError: If the blocks are of different models.
    """
    first, second = (to_matrix(getattr(M, "update", M)) for M in (writer, reader))
    if hasattr(writer, "provenance") and hasattr(reader, "provenance"):
        writer.provenance.require_same_model(reader.provenance, "Writer and reader")
    d = first.size
    if second.size != d:
        raise InputError(f"The writer is {d} × {d}, the reader {second.size} × {second.size}.")
    if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= d:
        raise InputError(f"k must be an integer from 1 to {d}, got {k!r}.")
    with one_blas_thread(d):
        written = np.linalg.svd(first.values)[0][:, :k]
        read = np.linalg.svd(second.values)[2][:k]
        cosines = np.linalg.svd(read @ written, compute_uv=False)
    value = float(np.sum(cosines**2)) / k
    std = math.sqrt(2 / ((d - 1) * (d + 2))) * (d - k) / d
    interval, z, p = (1.0, 1.0), math.nan, math.nan
    if k < d:
        # what is left out overlaps as well: m − tr(P'Q') = k − tr(PQ) for the complements
        m = min(k, d - k)
        mean, deviation = m / d, std * k / m
        spread = mean * (1 - mean) / deviation**2 - 1  # a + b of the beta distribution
        unrelated = stats.beta(mean * spread, (1 - mean) * spread)
        low, high = (1 - (1 - float(unrelated.ppf(q))) * m / k for q in (0.025, 0.975))
        own = 1 - (1 - value) * k / m
        interval, z = (low, high), (value - k / d) / std
        p = min(1.0, 2 * min(float(unrelated.cdf(own)), float(unrelated.sf(own))))
    return ForwardAlignment(
        value=value,
        chance=k / d,
        chance_std=std,
        chance_interval=interval,
        z=z,
        p=p,
        cosines=torch.from_numpy(cosines),
        k=k,
        d=d,
        **({"provenance": writer.provenance} if hasattr(writer, "provenance") else {}),
    )
