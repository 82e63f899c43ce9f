"""Chains after surgery, and growth over depth: closed forms, controls, refusals."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from oracles import prompts
from torch import Tensor

import tl_spectral as tls
from tl_spectral.chain import chain
from tl_spectral.errors import InputError
from tl_spectral.growth import Growth, growth
from tl_spectral.surgery import schur_surgery
from tl_spectral.surgery_chains import KINDS, SurgeryTable, fixed_skip, surgery_table

D = 14


def blocks(depth: int = 4, size: float = 0.4, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(depth, D, D, generator=generator, dtype=torch.float64)
    falling = size * torch.linspace(1.5, 0.5, depth, dtype=torch.float64)
    return list(torch.eye(D, dtype=torch.float64) + falling[:, None, None] * noise)


def norms(factors: list[Tensor]) -> list[float]:
    return [float((J - torch.eye(D)).norm()) for J in factors]


# ----------------------------------------------------------------------------- parts of the update


def test_symmetric_and_antisymmetric_halves() -> None:
    J = blocks(1)[0]
    eye = torch.eye(D, dtype=torch.float64)
    R = J - eye
    torch.testing.assert_close(schur_surgery(J, "symmetric"), eye + (R + R.T) / 2)
    torch.testing.assert_close(schur_surgery(J, "antisymmetric"), eye + (R - R.T) / 2)
    both = schur_surgery(J, "symmetric") + schur_surgery(J, "antisymmetric") - eye
    torch.testing.assert_close(both, J)
    halves = chain(blocks(), surgery="symmetric").effective_rank
    torch.testing.assert_close(halves, table()["symmetric"])


def test_fixed_skip_gives_every_update_one_norm() -> None:
    factors = blocks()
    fixed = fixed_skip(factors)
    size = math.exp(np.mean(np.log(norms(factors))))
    assert norms(fixed) == pytest.approx([size] * 4)
    for before, after in zip(factors, fixed, strict=True):
        one, two = (M - torch.eye(D) for M in (before, after))
        torch.testing.assert_close(one / one.norm(), two / two.norm())
    assert norms(fixed_skip(factors, 2.0)) == pytest.approx([2] * 4)
    again = fixed_skip(fixed)
    torch.testing.assert_close(torch.stack(again), torch.stack(fixed))
    with pytest.raises(InputError, match="Block 1 is the identity"):
        fixed_skip([factors[0], torch.eye(D)])
    with pytest.raises(InputError, match="norm must be positive"):
        fixed_skip(factors, 0.0)


# ------------------------------------------------------------------------------------------ table


def table(**options: Any) -> dict[str, Tensor]:
    found = surgery_table(blocks(), seeds=(3,), **options)
    return dict(zip(found.kind, found.effective_rank, strict=True))


def test_every_row_is_the_chain_of_its_factors() -> None:
    """Each kind against :func:`chain` of factors built one by one."""
    factors, found = blocks(), table()
    expected: dict[str, list[Tensor]] = {
        "original": factors,
        "fixed_skip": fixed_skip(factors),
        **{k: [schur_surgery(J, k) for J in factors]
           for k in ("normal", "matched", "symmetric", "antisymmetric")},
    }  # fmt: skip
    for kind, built in expected.items():
        torch.testing.assert_close(found[kind], chain(built).effective_rank)
    for kind in ("shuffled", "rotated"):  # the same seeds as the chain's own
        torch.testing.assert_close(found[kind], chain(factors, surgery=kind, seed=3).effective_rank)
    assert list(found) == list(KINDS)


def test_random_updates_have_the_norms_of_the_blocks() -> None:
    found = surgery_table(blocks(), seeds=(0, 1))
    rows = {kind: found.norm_ratio[i] for i, kind in enumerate(found.kind)}
    n = torch.tensor(norms(blocks()), dtype=torch.float64)
    # ‖I + G‖² = d + 2 tr G + ‖G‖², and tr G is of the order of r
    expected = n / (D + n**2).sqrt()
    torch.testing.assert_close(rows["random_update"], expected, rtol=0.15, atol=0)
    falling = rows["original"]
    assert float(falling[-1]) < 0.7 * float(falling[0])
    assert float(rows["fixed_skip"].std()) < 0.3 * float(falling.std())
    assert found.kind.count("random_update") == 2
    first, second = (found.effective_rank[i] for i in range(-2, 0))
    assert not torch.equal(first, second)


def test_fixed_norm_is_said() -> None:
    found = surgery_table(blocks(), kinds=["fixed_skip"], seeds=())
    assert found.kind == ("original", "fixed_skip")
    assert math.isnan(found.fixed_norm[0])
    assert float(found.fixed_norm[1]) == pytest.approx(norms(fixed_skip(blocks()))[0])


def test_natural_units_act_before_the_surgery() -> None:
    scale = torch.linspace(0.5, 3, D, dtype=torch.float64)
    scale[2] = 0
    kept = [i for i in range(D) if i != 2]
    factors = [(J[kept][:, kept] * scale[kept]) / scale[kept][:, None] for J in blocks()]
    found = surgery_table(blocks(), kinds=["normal", "symmetric"], scale=scale)
    assert (found.units, found.n_dropped, found.d_model) == ("natural", 1, D - 1)
    for i, kind in enumerate(found.kind):
        built = factors if i == 0 else [schur_surgery(J, kind) for J in factors]
        torch.testing.assert_close(found.effective_rank[i], chain(built).effective_rank)
    moved = growth(blocks(), scale=scale, draws=0)
    assert moved.n_dropped == 1
    np.testing.assert_allclose(moved.log_sigma, chain(factors).log_singular_values[:, 0])


def test_summary_over_prompts_and_over_seeds(gpt2: Any) -> None:
    texts = prompts(4, 5)
    found = surgery_table(gpt2, texts, kinds=["normal", "rotated"], seeds=(0, 1))
    summary = found.summary().set_index(["estimate", "kind"])
    assert sorted(set(found.sample)) == [-1, 0, 1, 2, 3]
    row = summary.loc["per_sample", "normal"]
    ratios = [
        float(chain(gpt2, t, surgery="normal").effective_rank[-1]
              / chain(gpt2, t).effective_rank[-1]) for t in texts
    ]  # fmt: skip
    assert row["ratio"] == pytest.approx(math.exp(np.mean(np.log(ratios))))
    logs = np.log(ratios)
    half = 3.182446 * logs.std(ddof=1) / 2  # t quantile of 3 degrees of freedom
    assert row["low"] == pytest.approx(math.exp(logs.mean() - half), rel=1e-5)
    assert row["high"] == pytest.approx(math.exp(logs.mean() + half), rel=1e-5)
    assert row["of"] == "95 % interval over prompts"
    mean = summary.loc["mean_jacobian", "rotated"]
    means = list(tls.block_jacobians(gpt2, texts))
    drawn = [float(chain(means, surgery="rotated", seed=s).effective_rank[-1]) for s in (0, 1)]
    whole = float(chain(means).effective_rank[-1])
    assert mean["low"] == pytest.approx(min(drawn) / whole)
    assert mean["high"] == pytest.approx(max(drawn) / whole)
    assert mean["of"] == "range over seeds"
    assert math.isnan(summary.loc["mean_jacobian", "normal"]["low"])
    assert summary.loc["per_sample", "original"]["ratio"] == 1
    given = surgery_table(tls.block_jacobians(gpt2, texts), kinds=["normal"])
    assert given.sample == (-1, -1)  # blocks that are means say so
    frame = found.to_dataframe()
    assert len(frame) == len(found.kind) * 3
    assert frame["layer"].tolist()[:3] == [0, 1, 2]
    assert set(frame["estimate"]) == {"per_sample", "mean_jacobian"}


def test_tables_that_cannot_be() -> None:
    with pytest.raises(InputError, match="no surgery 'usual'"):
        surgery_table(blocks(), kinds=["usual"])
    with pytest.raises(InputError, match="at least one seed"):
        surgery_table(blocks(), seeds=())
    with pytest.raises(InputError, match="no factors"):
        surgery_table([])
    with pytest.raises(InputError, match="options of chain"):
        surgery_table(blocks(), context="isolated")


def test_table_round_trip_and_figure(tmp_path: Path) -> None:
    found = surgery_table(blocks(), seeds=(0, 1))
    again = SurgeryTable.load(found.save(tmp_path / "surgery"))
    assert again.to_dataframe().equals(found.to_dataframe())
    fig = found.plot()
    names = [t.name for t in fig.data if t.showlegend is not False]
    assert names == [*(kind.replace("_", " ") for kind in KINDS), "random blocks"]
    original = next(t for t in fig.data if t.name == "original")
    np.testing.assert_allclose(original.y, found.effective_rank[0], rtol=1e-6)
    assert {t.xaxis for t in fig.data} == {"x", "x2"}


# ----------------------------------------------------------------------------------------- growth


def test_growth_of_normal_blocks_is_in_their_eigenvalues() -> None:
    """Symmetric blocks of one basis: all four measures of growth are one."""
    Q = torch.linalg.qr(blocks(1)[0])[0]
    values = torch.linspace(0.5, 1.5, D, dtype=torch.float64)
    found = growth([Q @ torch.diag(values) @ Q.T] * 3, draws=0)
    expected = math.log(1.5) * torch.arange(1, 4, dtype=torch.float64)
    for name in ("log_sigma", "log_sigma_bound", "log_radius_sum", "log_radius"):
        torch.testing.assert_close(getattr(found, name), expected)
    torch.testing.assert_close(found.numerical_abscissa, torch.full((3,), 0.5).double())
    torch.testing.assert_close(found.spectral_abscissa, torch.full((3,), 0.5).double())
    assert "baseline_log_sigma" not in found.to_dataframe()


def test_transient_growth_of_a_jordan_block() -> None:
    """Eigenvalues ½, σ₁ of the powers of [[½, b], [0, ½]] in closed form."""
    b, a = 8.0, 0.5
    J = torch.tensor([[a, b], [0, a]], dtype=torch.float64)
    found = growth([J] * 5, draws=0)
    for n in range(1, 6):
        power = torch.tensor([[a**n, n * a ** (n - 1) * b], [0, a**n]])
        assert float(found.log_sigma[n - 1]) == pytest.approx(
            math.log(float(torch.linalg.matrix_norm(power, 2))), rel=1e-6
        )
    torch.testing.assert_close(
        found.log_radius_sum, math.log(a) * torch.arange(1, 6, dtype=torch.float64)
    )
    np.testing.assert_allclose(found.log_radius, found.log_radius_sum, atol=1e-6)
    np.testing.assert_allclose(found.numerical_abscissa, a - 1 + b / 2)
    np.testing.assert_allclose(found.spectral_abscissa, a - 1)
    assert bool((found.transient > 2).all())
    np.testing.assert_allclose(found.reactivity, b / 2)


def test_growth_bounds_and_baselines() -> None:
    found = growth(blocks(), draws=4, seed=2)
    assert bool((found.log_sigma <= found.log_sigma_bound + 1e-12).all())
    assert bool((found.transient >= -1e-12).all())
    assert bool((found.reactivity >= -1e-12).all())
    torch.testing.assert_close(found.log_sigma, chain(blocks()).log_singular_values[:, 0])
    r = torch.tensor(norms(blocks()), dtype=torch.float64) / math.sqrt(D)
    torch.testing.assert_close(found.baseline_spectral_abscissa, r)
    torch.testing.assert_close(found.baseline_numerical_abscissa, r * math.sqrt(2))
    # these blocks are of the kind of their baseline
    low, high = found.baseline_log_sigma.min(0).values, found.baseline_log_sigma.max(0).values
    assert bool(((found.log_sigma > low - 0.6) & (found.log_sigma < high + 0.6)).all())
    again, other = growth(blocks(), draws=4, seed=2), growth(blocks(), draws=4, seed=3)
    assert torch.equal(again.baseline_log_sigma, found.baseline_log_sigma)
    assert not torch.equal(other.baseline_log_sigma, found.baseline_log_sigma)
    table = found.to_dataframe()
    assert (table["baseline_low"] <= table["baseline_log_sigma"]).all()
    assert (table["baseline_log_sigma"] <= table["baseline_high"]).all()


def test_deep_chains_neither_overflow_nor_pretend() -> None:
    strong = growth([20 * J for J in blocks(1)] * 300, draws=0)
    assert bool(strong.log_sigma.isfinite().all())
    assert float(strong.log_sigma[-1]) > 700  # beyond exp in float64
    nilpotent = torch.zeros(D, D, dtype=torch.float64)
    nilpotent[torch.arange(D - 1), torch.arange(1, D)] = 1.0
    lost = growth([nilpotent, nilpotent], draws=0)
    assert math.isnan(lost.log_radius[0])
    assert "below rounding error through layers [0, 1]" in lost.note
    assert float(lost.log_radius_sum[0]) == -math.inf
    tiny = torch.tensor([[1e-17, 1], [0, 1e-17]], dtype=torch.float64)
    assert math.isnan(growth([tiny], draws=0).log_radius[0])  # not log 1e-17: rounding error


def test_growth_of_a_model(gpt2: Any) -> None:
    prompt = prompts(1, 5)
    found = growth(gpt2, prompt, draws=2)
    assert found.layers == (0, 1, 2)
    given = growth(list(tls.block_jacobians(gpt2, prompt)), draws=2)
    torch.testing.assert_close(found.log_sigma, given.log_sigma)
    assert found.provenance.texts
    with pytest.raises(InputError, match="takes one prompt"):
        growth(gpt2, prompts(2, 5))


def test_growth_that_cannot_be() -> None:
    with pytest.raises(InputError, match="draws must be"):
        growth(blocks(), draws=-1)
    with pytest.raises(InputError, match="zero from layer 1 on"):
        growth([torch.eye(3), torch.zeros(3, 3), torch.eye(3)], draws=0)


def test_growth_round_trip_and_figure(tmp_path: Path) -> None:
    found = growth(blocks(), draws=3)
    again = Growth.load(found.save(tmp_path / "growth"))
    assert again.to_dataframe().equals(found.to_dataframe())
    fig = found.plot()
    names = [t.name for t in fig.data if t.name]
    assert names[:2] == ["σ₁ of the product", "product of σ₁"]
    assert "numerical abscissa of R" in names
    top = next(t for t in fig.data if t.name == "σ₁ of the product")
    np.testing.assert_allclose(top.y, found.log_sigma / math.log(10), rtol=1e-6)
    assert len(growth(blocks(), draws=0).plot().data) == len(fig.data) - 2
