"""The hash of the weights: exact, and independent of layout and of the number of threads.

Changed to see these tests fail: floating-point sums for the checksum; no look at the entries when
their sum overflows; infinities that cancel.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from tl_spectral.errors import ModelStateError
from tl_spectral.model.fingerprint import weights_fingerprint


def fingerprint(weight: Tensor) -> str:
    named = [("weight", torch.nn.Parameter(weight, requires_grad=False))]
    return weights_fingerprint(
        SimpleNamespace(named_parameters=lambda: named, cfg=SimpleNamespace(model_name="toy"))
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_layout_and_threads_do_not_matter_but_one_bit_does(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(400, 300, generator=generator) * 1e3).to(dtype)
    own = fingerprint(weight)
    assert fingerprint(weight.T.contiguous().T) == own
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert fingerprint(weight) == own
    finally:
        torch.set_num_threads(threads)
    changed = weight.clone()
    bits = changed.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[weight.element_size()])
    bits[7, 11] ^= 1  # the last digit of an entry that is not in the sample
    assert fingerprint(changed) != own


def test_what_is_not_finite_is_refused_and_what_is_large_is_not() -> None:
    for spoiled in ([1, float("nan")], [float("inf"), -float("inf")]):
        with pytest.raises(ModelStateError, match="weight of toy holds NaN or infinite"):
            fingerprint(torch.tensor(spoiled))
    assert fingerprint(torch.full((3,), 3e38))  # whose sum overflows
    assert fingerprint(torch.full((3,), 6e4, dtype=torch.float16))
