"""Does the next block read what this one writes?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
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
        cosines: Cosines of the k principal angles, descending.
        k: Dimension of the subspaces.
        d: Dimension of the space.
    """

    value: float
    chance: float
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
        The overlap and its chance value.

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
    return ForwardAlignment(
        value=float(np.sum(cosines**2)) / k,
        chance=k / d,
        cosines=torch.from_numpy(cosines),
        k=k,
        d=d,
        **({"provenance": writer.provenance} if hasattr(writer, "provenance") else {}),
    )
