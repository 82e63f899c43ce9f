"""Overlap of what one block writes with what the next reads."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tl_spectral.alignment import ForwardAlignment, forward_alignment
from tl_spectral.errors import InputError, ProvenanceError
from tl_spectral.jacobian import BlockJacobian
from tl_spectral.results import Provenance


def gaussian(d=30, seed=0):
    return torch.randn(d, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def block(matrix, model="tensors"):
    return BlockJacobian(
        matrix=matrix, layer=0, stop=1, pos=2, source_pos=2, context="full", scope="block",
        n_samples=1, norm_gain=None, engine="fast", engine_reason="",
        provenance=Provenance(model=model),
    )  # fmt: skip


def test_a_reader_made_for_its_writer_and_one_made_against_it():
    writer = gaussian()
    U, sigma, _ = torch.linalg.svd(writer)
    same = forward_alignment(writer, gaussian(seed=1) @ torch.diag(sigma) @ U.T, k=4)
    aligned = forward_alignment(writer, U @ torch.diag(sigma) @ U.T, k=4)
    opposed = forward_alignment(writer, U @ torch.diag(sigma.flip(0)) @ U.T, k=4)
    assert aligned.value == pytest.approx(1)
    torch.testing.assert_close(aligned.cosines, torch.ones(4, dtype=torch.float64))
    assert opposed.value < 1e-20
    assert 0 < same.value < 1
    assert aligned.chance == pytest.approx(4 / 30)


def test_unrelated_blocks_align_by_chance():
    values = [forward_alignment(gaussian(seed=i), gaussian(seed=100 + i), 5) for i in range(60)]
    standard_error = np.std([v.value for v in values]) / 60**0.5
    assert np.mean([v.value for v in values]) == pytest.approx(5 / 30, abs=4 * standard_error)


def test_of_block_jacobians_the_update_is_taken():
    one, two = gaussian(), gaussian(seed=1)
    eye = torch.eye(30, dtype=torch.float64)
    assert forward_alignment(block(one + eye), block(two + eye), 3).value == pytest.approx(
        forward_alignment(one, two, 3).value
    )


@pytest.mark.parametrize(("d", "k"), [(20, 1), (20, 6), (12, 11)])
def test_the_chance_range_holds_unrelated_subspaces(d, k):
    """Mean, deviation, range and p of the closed form against 400 draws."""
    drawn = [
        forward_alignment(gaussian(d, seed), gaussian(d, 10_000 + seed), k) for seed in range(400)
    ]
    values = np.array([a.value for a in drawn])
    assert values.mean() == pytest.approx(k / d, abs=4 * values.std() / 400**0.5)
    assert values.std() == pytest.approx(drawn[0].chance_std, rel=0.15)
    low, high = drawn[0].chance_interval
    assert np.mean((values >= low) & (values <= high)) == pytest.approx(0.95, abs=0.033)
    assert np.mean([a.p <= 0.05 for a in drawn]) == pytest.approx(0.05, abs=0.033)
    assert drawn[0].z == pytest.approx((values[0] - k / d) / drawn[0].chance_std)


def test_a_planted_alignment_is_beyond_chance():
    writer = gaussian()
    U, sigma, _ = torch.linalg.svd(writer)
    aligned = forward_alignment(writer, U @ torch.diag(sigma) @ U.T, k=4)
    assert aligned.p < 1e-6
    assert aligned.z > 10
    whole = forward_alignment(writer, gaussian(seed=1), k=30)
    assert whole.value == pytest.approx(1)
    assert whole.chance_interval == (1, 1)
    assert np.isnan(whole.z)
    assert np.isnan(whole.p)


def test_refusals():
    with pytest.raises(InputError, match="30 × 30"):
        forward_alignment(gaussian(), gaussian(20))
    with pytest.raises(InputError, match="from 1 to 30"):
        forward_alignment(gaussian(), gaussian(), 31)
    with pytest.raises(ProvenanceError, match="different models"):
        forward_alignment(block(gaussian(), "a"), block(gaussian(), "b"))


def test_round_trip(tmp_path):
    a = forward_alignment(gaussian(), gaussian(seed=1), 3)
    assert ForwardAlignment.load(a.save(tmp_path / "a")).value == a.value
