"""A short hash of all weights; finding it also finds weights that are not finite."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from tl_spectral.errors import ModelStateError
from tl_spectral.model.memo import spread_values

_SAMPLE = 1024


def weights_fingerprint(model: Any) -> str:
    """Hash of every parameter's name, shape, float64 sum, and an evenly spaced sample of values.

    Reading a sample instead of everything keeps the cost at one pass of sums.

    Raises:
        ModelStateError: If a parameter holds NaN or infinity.
    """
    digest = hashlib.sha256()
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters(), key=lambda item: item[0]):
            total = parameter.sum(dtype=torch.float64).item()
            if total - total != 0:  # NaN and infinity are the numbers for which this holds
                raise ModelStateError(
                    f"{name} of {model.cfg.model_name} holds NaN or infinite values. Every number "
                    "would be one too. Load the weights again."
                )
            sample = spread_values(parameter, _SAMPLE).double().cpu().numpy()
            digest.update(f"{name}{tuple(parameter.shape)}{total!r}".encode() + sample.tobytes())
    return digest.hexdigest()[:16]
