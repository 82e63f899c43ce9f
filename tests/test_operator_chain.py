"""Chains from products alone, against the exact ones.

Changed to see these tests fail: factors in the reverse order; the ranks of the first depth for all;
unconverged values without a warning; the error of the quadrature left out.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import tl_spectral as tls
from tl_spectral.chain import OperatorChain, chain
from tl_spectral.errors import InputError, TLSpectralWarning
from tl_spectral.jacobian import Operator
from tl_spectral.results import Provenance


class Known(Operator):
    """An operator whose matrix is known."""

    def __init__(self, matrix: Tensor) -> None:
        self.matrix = matrix
        self.shape = (len(matrix), len(matrix))
        self.dtype = matrix.dtype
        self.provenance = Provenance()

    def _push(self, rows: Tensor) -> Tensor:
        return rows @ self.matrix.T

    def _pull(self, rows: Tensor) -> Tensor:
        return rows @ self.matrix

    def _dense(self) -> Tensor:
        return self.matrix


def factors(depth: int = 6, d: int = 90, strength: float = 0.6, seed: int = 0) -> list[Tensor]:
    """Identity, noise, and a few directions that grow: their product forgets the rest."""
    rng = np.random.default_rng(seed)
    out = []
    for _ in range(depth):
        u, v = rng.standard_normal((2, d, 3)) / d**0.5
        J = np.eye(d) + strength * rng.standard_normal((d, d)) / d**0.5 + 4 * u @ v.T
        out.append(torch.from_numpy(J))
    return out


def known(matrices: list[Tensor]) -> list[Known]:
    return [Known(matrix) for matrix in matrices]


def test_leading_values_at_every_depth_are_those_of_the_exact_chain() -> None:
    matrices = factors()
    exact, free = chain(matrices, k=5), chain(known(matrices), k=5, rtol=1e-6, subspace=90)
    assert isinstance(free, OperatorChain)
    assert bool(free.converged.all())
    torch.testing.assert_close(free.log_singular_values, exact.log_singular_values)
    torch.testing.assert_close(free.growth_rates, exact.growth_rates)
    assert free.layers == exact.layers
    assert torch.equal(free.baseline_effective_rank, exact.baseline_effective_rank)


def test_errors_cover() -> None:
    """Ranks and norms within 1.96 errors, values within theirs, whether converged or not."""
    hits: dict[str, list[bool]] = {}
    for seed in range(12):
        matrices = factors(depth=4, d=60, strength=(0.2, 0.6, 1.5)[seed % 3], seed=seed)
        exact = chain(matrices, k=4)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", TLSpectralWarning)
            free = chain(known(matrices), k=4, subspace=24, seed=seed)
        for name in ("effective_rank", "participation_ratio", "log_frobenius"):
            miss = (getattr(free, name) - getattr(exact, name)).abs()
            hits.setdefault(name, []).extend(
                (miss <= 1.96 * getattr(free, name + "_error")).tolist()
            )
        sigma = [
            torch.linalg.svdvals(torch.linalg.multi_dot([torch.eye(60).double(), *matrices[i::-1]]))
            for i in range(4)
        ]
        near = torch.stack([
            (free.log_singular_values[i, :, None] - s.log()).abs().amin(dim=1)
            for i, s in enumerate(sigma)
        ])  # fmt: skip
        assert bool((near <= free.log_singular_errors * 1.01 + 1e-9).all())
    assert min(np.mean(hit) for hit in hits.values()) >= 0.9, hits


def test_what_has_not_converged_is_said() -> None:
    noise = [torch.randn(80, 80, generator=torch.Generator().manual_seed(i)) for i in range(2)]
    with pytest.warns(TLSpectralWarning, match=r"at 2 of 2 depths \(the first: 1 factors\)"):
        free = chain(known(noise), k=3, subspace=16)
    assert not bool(free.converged.all())


def test_what_drowns_in_rounding_is_not_claimed() -> None:
    graded = torch.diag(10.0 ** -torch.arange(30, dtype=torch.float32))
    free = chain(known([graded]), k=12, subspace=30)
    final = free.log_singular_values[0] / math.log(10)
    assert final[:6].tolist() == pytest.approx(list(range(0, -6, -1)), abs=1e-4)
    assert bool(final[8:].isnan().all())
    assert bool(free.log_singular_errors[0, 8:].isnan().all())
    assert bool(free.converged.all())


def test_rotations_keep_every_direction() -> None:
    rotations = [torch.linalg.qr(matrix)[0] for matrix in factors(3, 50)]
    free = chain(known(rotations), k=2)
    assert free.effective_rank.tolist() == pytest.approx([50] * 3)
    assert free.log_singular_values.abs().max() < 1e-12


def test_blocks_of_a_model(llama: Any, prompt: Tensor, tmp_path: Any) -> None:
    ops = [tls.jacobian_operator(llama, prompt, layer) for layer in range(3)]
    free, exact = tls.chain(ops, k=4), tls.chain(llama, prompt, k=4)
    torch.testing.assert_close(
        free.log_singular_values, exact.log_singular_values, atol=1e-4, rtol=0
    )
    torch.testing.assert_close(free.effective_rank, exact.effective_rank, rtol=1e-3, atol=0)
    assert free.layers == (0, 1, 2)
    assert free.provenance.model == exact.provenance.model
    assert free.n_products > 0
    loaded = OperatorChain.load(free.save(tmp_path / "chain"))
    assert torch.equal(loaded.log_singular_values, free.log_singular_values)
    assert list(free.to_dataframe()["all_converged"]) == [True] * 3
    assert len(free.plot().data) > 3


def test_seeds_decide() -> None:
    runs = [chain(known(factors(2)), k=3, seed=seed).effective_rank for seed in (1, 1, 2)]
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"surgery": "normal"}, r"\['surgery'\] cannot be had of operators"),
        ({"truncate": 3}, r"\['truncate'\]"),
        ({"context": "full"}, r"\['context'\]"),
        ({"k": 0}, "k must be an integer from 1 to 10"),
        ({"k": 3, "subspace": 11}, "subspace must be an integer from 3 to 10"),
        ({"k": 3, "rtol": 1.0}, "rtol must lie"),
    ],
)
def test_refusals(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        chain(known(factors(2, 10)), **options)


def test_mixtures_and_zero_are_refused() -> None:
    with pytest.raises(InputError, match="cannot be mixed"):
        chain([*known(factors(1, 10)), *factors(1, 10)])
    with pytest.raises(InputError, match="zero"):
        chain(known([torch.zeros(5, 5)]), k=2)
    with pytest.raises(InputError, match="9 wide, the first one 10"):
        chain([*known(factors(1, 10)), *known(factors(1, 9))])
