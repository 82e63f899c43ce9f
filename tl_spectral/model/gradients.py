"""Gradients that work wherever the caller stands."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def differentiable() -> Iterator[None]:
    """Derivatives are recorded inside, also when the caller is under ``no_grad`` or inference."""
    with torch.inference_mode(False), torch.enable_grad():
        yield
