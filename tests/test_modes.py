"""Layer matrices and their modes: planted truth, both rules, dense against Arnoldi.

Changed to see these tests fail: F not transposed; dominance by |λ| with skip; −1 not taken off
after Arnoldi on I + F; left vectors conjugated; condition without the projector; the
eigendecomposition done once per rule.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import plotly.graph_objects as go
import pytest
import scipy.linalg
import torch
from torch import Tensor
from transformer_lens import FactoredMatrix

from tl_spectral.arnoldi import FactoredMap, arnoldi_modes
from tl_spectral.errors import InputError, TLSpectralError
from tl_spectral.modes import dominant_modes
from tl_spectral.ov import OVCircuits, PrincipalMode, layers, ov_circuits

METHODS = pytest.mark.parametrize("method", ["dense", "arnoldi"])


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def planted(F: Tensor, heads: int = 4) -> OVCircuits:
    """One layer whose heads add up to F."""
    W_V = torch.eye(len(F), dtype=F.dtype).unflatten(1, (heads, -1)).transpose(0, 1)
    W_O = F.T.unflatten(0, (heads, -1))
    return ov_circuits(FactoredMatrix(W_V, W_O))


def rotation(modulus: float, angle: float) -> Tensor:
    c, s = modulus * math.cos(angle), modulus * math.sin(angle)
    return torch.tensor([[c, -s], [s, c]], dtype=torch.float64)


def with_blocks(*blocks: Tensor, d: int = 24, skew: bool = True) -> tuple[Tensor, Tensor]:
    """A matrix with the given diagonal blocks (the rest is small), and its basis."""
    D = torch.block_diag(*blocks)
    rest = torch.diag(torch.linspace(-0.2, 0.2, d - len(D), dtype=torch.float64))
    X = gaussian(d, d, seed=5)
    if not skew:
        X = torch.linalg.qr(X)[0]
    return X @ torch.block_diag(D, rest) @ torch.linalg.inv(X), X


def number(value: float) -> Tensor:
    return torch.tensor([[value]], dtype=torch.float64)


def angle_between(one: Tensor, other: Tensor) -> float:
    """Sine of the largest principal angle."""
    P, Q = torch.linalg.qr(one)[0], torch.linalg.qr(other)[0]
    return (Q - P @ (P.T @ Q)).norm().item()


# --------------------------------------------------------------------------------- planted modes


def test_layer_matrix_is_in_column_convention() -> None:
    F = gaussian(8, 8)
    torch.testing.assert_close(planted(F).layer_matrix(0), F)


@METHODS
def test_dominance_depends_on_the_skip_connection(method: str) -> None:
    F, X = with_blocks(number(-3), number(2.5), number(0.9))
    kept, left_out = (planted(F).principal(0, skip, method=method) for skip in (True, False))
    assert kept.eigenvalue == pytest.approx(2.5)  # |1 + 2.5| > |1 − 3|
    assert left_out.eigenvalue == pytest.approx(-3.0)
    assert (kept.gap, kept.strength) == (pytest.approx(3.5 / 2), pytest.approx(3.5))
    assert (left_out.gap, left_out.strength) == (pytest.approx(3 / 2.5), pytest.approx(3))
    assert angle_between(kept.subspace, X[:, 1:2]) < 1e-9
    assert angle_between(left_out.subspace, X[:, :1]) < 1e-9
    assert (kept.kind, kept.multiplicity, kept.degenerate, kept.note) == ("real", 1, False, "")
    assert (kept.skip, kept.rank, kept.method) == (True, 1, method)


@METHODS
@pytest.mark.parametrize("skip", [True, False])
def test_further_modes_and_planes(method: str, skip: bool) -> None:
    F, X = with_blocks(number(2.5), rotation(2, 0.5), number(1.2))
    one, two, three = planted(F).modes(0, skip, 3, method=method)
    pair = complex(2 * math.cos(0.5), 2 * math.sin(0.5))
    assert [m.rank for m in (one, two, three)] == [1, 2, 3]
    assert [m.kind for m in (one, two, three)] == ["real", "complex", "real"]
    assert (two.eigenvalue, two.multiplicity) == (pytest.approx(pair), 2)
    assert angle_between(two.subspace, X[:, 1:3]) < 1e-8
    assert two.gap == pytest.approx(abs(skip + pair) / (skip + 1.2))
    for mode in (one, two, three):
        assert mode.residual < 1e-11
        assert mode.strength == pytest.approx(abs(skip + mode.eigenvalue))
        # Against SciPy's left and right vectors.
        values, left, right = scipy.linalg.eig(F.numpy(), left=True, right=True)
        i = np.argmin(np.abs(values - mode.eigenvalue))
        assert mode.condition == pytest.approx(1 / abs(np.vdot(left[:, i], right[:, i])), rel=1e-6)


@METHODS
def test_condition_of_a_normal_matrix_is_one_and_bounds_the_move(method: str) -> None:
    F, _ = with_blocks(number(2.5), rotation(2, 0.5), skew=False)
    for mode in planted(F).modes(0, k=2, method=method):
        assert mode.condition == pytest.approx(1)
    F, _ = with_blocks(number(2.5), number(1.5))
    mode = planted(F).principal(0, method=method)
    values, left, right = scipy.linalg.eig(F.numpy(), left=True, right=True)
    i = np.argmax(values.real)
    worst = 1e-6 * torch.from_numpy(np.outer(left[:, i], right[:, i]).real)  # of norm 1e-6
    moved = planted(F + worst).principal(0, method=method).eigenvalue.real - 2.5
    assert abs(moved) == pytest.approx(1e-6 * mode.condition, rel=1e-3)
    assert mode.condition > 2


def test_what_has_no_direction_of_its_own_is_said() -> None:
    F, X = with_blocks(number(2), number(2), number(1))
    repeated = planted(F).principal(0)
    assert (repeated.multiplicity, repeated.subspace.shape[1]) == (2, 2)
    assert (repeated.defective, repeated.degenerate) == (False, True)
    assert angle_between(repeated.subspace, X[:, :2]) < 1e-8
    assert "any direction of 2 dimensions" in repeated.note
    projector = X[:, :2] @ torch.linalg.inv(X)[:2]
    expected = torch.linalg.matrix_norm(projector, ord=2).item()
    assert repeated.condition == pytest.approx(expected, rel=1e-6)

    jordan = torch.tensor([[2.0, 1], [0, 2]], dtype=torch.float64)
    for skew in (True, False):
        mode = planted(with_blocks(jordan, number(1), skew=skew)[0]).principal(0)
        assert (mode.defective, mode.degenerate, mode.condition) == (True, True, None)
        assert mode.eigenvalue == pytest.approx(2)
        assert "defective" in mode.note

    close = planted(with_blocks(number(2), number(1.999), number(1))[0]).modes(0, k=3)
    assert [mode.degenerate for mode in close] == [True, True, False]
    assert "within 1 %" in close[0].note
    assert "within 1 %" in close[1].note


def test_an_exact_jordan_block_does_not_spoil_its_neighbours() -> None:
    D = torch.diag(torch.tensor([5.0, 0, 0, 0], dtype=torch.float64))
    D[0, 1], D[1, 2], D[2, 3] = 4, 1, 1
    five, nought = dominant_modes(D, count=2, skip=False)
    assert (five.eigenvalue, nought.eigenvalue) == (5, 0)
    left = torch.tensor([1, 0.8, 0.16, 0.032])  # and the right vector is the first axis
    assert five.condition == pytest.approx(left.norm().item(), rel=1e-6)
    assert nought.defective
    assert nought.condition == math.inf


@METHODS
def test_ill_conditioned_modes_are_flagged(method: str) -> None:
    F = torch.diag(torch.linspace(0, 0.5, 24, dtype=torch.float64))
    F[:2, :2] = torch.tensor([[2, 1], [0, 2 - 4e-7]], dtype=torch.float64)  # almost a Jordan block
    mode = planted(F).principal(0, method=method)
    assert mode.condition == pytest.approx(1 / 4e-7, rel=0.05)
    assert not mode.defective
    assert "ill-conditioned" in mode.note


def test_nothing_beside_the_mode_means_no_gap() -> None:
    F = torch.zeros(8, 8, dtype=torch.float64)
    F[0, 0] = 2
    ov = planted(F)
    assert ov.principal(0, skip=False).gap is None
    assert ov.principal(0, skip=True).gap == pytest.approx(3)
    table = ov.modes_dataframe()
    assert table["gap"].isna().tolist() == [False, True]
    assert "no gap" in table["note"][1]


# --------------------------------------------------------------------------------- Arnoldi


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("d", [32, 96])
def test_arnoldi_agrees_with_dense(d: int, skip: bool) -> None:
    ov = ov_circuits(FactoredMatrix(gaussian(4, d, d // 4), gaussian(4, d // 4, d, seed=1) / d))
    dense, krylov = (ov.modes(0, skip, 4, method=m) for m in ("dense", "arnoldi"))
    assert {mode.method for mode in krylov} == {"arnoldi"}
    for one, other in zip(dense, krylov, strict=True):
        assert abs(one.eigenvalue - other.eigenvalue) < 1e-10
        assert one.gap == pytest.approx(other.gap, rel=1e-9)
        assert one.condition == pytest.approx(other.condition, rel=1e-6)
        assert angle_between(one.subspace, other.subspace) < 1e-7
        assert (one.kind, one.degenerate) == (other.kind, other.degenerate)
        assert other.residual < 1e-9 * ov.layer_matrix(0).norm()


def test_arnoldi_on_a_wide_planted_map() -> None:
    """Known eigenvalues at d = 2048, where auto leaves the dense method; d × d is never formed."""
    d, k = 2048, 8
    X = gaussian(d, k, seed=2)
    D = torch.block_diag(number(3), rotation(2.5, 1), number(-2), 0.5 * torch.eye(4).double())
    Y = torch.linalg.pinv(X)
    ov = ov_circuits(FactoredMatrix((Y.T @ D.T).reshape(1, d, k), X.T.reshape(1, k, d)))
    first, second = ov.modes(0, skip=False, k=2)
    assert (first.method, second.method) == ("arnoldi", "arnoldi")
    assert first.eigenvalue == pytest.approx(3)
    assert second.eigenvalue == pytest.approx(complex(2.5 * math.cos(1), 2.5 * math.sin(1)))
    assert angle_between(first.subspace, X[:, :1]) < 1e-9
    assert angle_between(second.subspace, X[:, 1:3]) < 1e-9
    assert first.residual < 1e-10
    assert "_latest" not in vars(ov)


def test_arnoldi_is_deterministic_and_says_when_it_fails(monkeypatch: Any) -> None:
    F = FactoredMap(gaussian(4, 64, 16), gaussian(4, 16, 64, seed=1))
    one, two = (arnoldi_modes(F, count=2) for _ in range(2))
    assert all(torch.equal(a.subspace, b.subspace) for a, b in zip(one, two, strict=True))
    assert F.frobenius() == pytest.approx(np.linalg.norm(F.write @ F.read))
    with pytest.raises(InputError, match="at most 6 eigenvalues"):
        arnoldi_modes(FactoredMap(gaussian(1, 8, 8), gaussian(1, 8, 8)), count=2)
    monkeypatch.setattr("tl_spectral.arnoldi._RESTARTS", 1)
    F = FactoredMap(gaussian(4, 200, 50), gaussian(4, 50, 200, seed=1))
    with pytest.raises(TLSpectralError, match="method='dense'"):
        arnoldi_modes(F, count=2)


def test_left_vectors_that_are_not_found_leave_the_condition_open(monkeypatch: Any) -> None:
    module = pytest.importorskip("tl_spectral.arnoldi")
    found = module._leading

    def other(apply: Any, d: int, count: int, skip: bool) -> Any:
        values, vectors = found(apply, d, count, skip)
        return (values + 9, vectors) if apply.__name__ == "backward" else (values, vectors)

    monkeypatch.setattr(module, "_leading", other)
    mode = planted(with_blocks(number(2.5), number(1))[0]).principal(0, method="arnoldi")
    assert mode.eigenvalue == pytest.approx(2.5)
    assert mode.condition is None
    assert "condition unknown" in mode.note


# --------------------------------------------------------------------------------- models


def test_one_decomposition_per_layer(model_of: Any, monkeypatch: Any) -> None:
    calls = []
    real = layers.eigensystem
    monkeypatch.setattr(layers, "eigensystem", lambda F: calls.append(1) or real(F))
    ov = ov_circuits(model_of("gpt2"))
    ov.modes_dataframe(3)
    assert len(calls) == 3
    assert list(ov._latest) == [2]  # the vectors of one layer are kept, not of all
    ov.modes(2, skip=False)
    values = ov.layer_eigenvalues(0)
    assert len(calls) == 3
    expected = torch.linalg.eigvals(ov.layer_matrix(0))
    assert (values[:, None] - expected[None]).abs().amin(0).max() < 1e-9
    fresh = ov_circuits(model_of("gpt2")).layer_eigenvalues(1)
    assert (fresh[:, None] - ov.layer_eigenvalues(1)[None]).abs().amin(0).max() < 1e-9


@pytest.mark.parametrize("name", ["gpt2", "llama", "olmo2"])
def test_modes_do_not_depend_on_the_basis(name: str, model_of: Any) -> None:
    ov = ov_circuits(model_of(name))
    Q = torch.linalg.qr(gaussian(24, 24))[0]
    turned = ov_circuits(FactoredMatrix(Q @ ov.W_V.double(), ov.W_O.double() @ Q.T))
    for skip in (True, False):
        for one, other in zip(ov.modes(1, skip), turned.modes(1, skip), strict=True):
            assert abs(one.eigenvalue - other.eigenvalue) < 1e-9
            assert one.condition == pytest.approx(other.condition, rel=1e-5)
            assert angle_between(Q @ one.subspace, other.subspace) < 1e-7


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2", "pythia"])
def test_folded_layer_has_the_modes_of_compatibility_mode(name: str) -> None:
    from zoo import tiny

    model = tiny(name)
    folded = ov_circuits(model, fold="norm")
    model.enable_compatibility_mode(disable_warnings=True)
    compat = ov_circuits(model)
    one, other = folded.principal(1), compat.principal(1)
    assert abs(one.eigenvalue - other.eigenvalue) < 1e-4
    assert one.gap == pytest.approx(other.gap, rel=1e-3)


def test_table_of_modes(model_of: Any) -> None:
    ov = ov_circuits(model_of("llama"))
    table = ov.modes_dataframe()
    assert len(table) == 3 * 2
    assert list(table.columns[:1]) == ["layer"]
    longer = ov.modes_dataframe(2)
    first = longer[longer["rank"] == 1].reset_index(drop=True)
    assert first.drop(columns="gap").equals(table.drop(columns="gap"))
    for row in longer.to_dict("records"):
        mode = ov.modes(row["layer"], row["rule"] == "with_skip", 2)[row["rank"] - 1]
        assert complex(row["eigenvalue_re"], row["eigenvalue_im"]) == mode.eigenvalue
        assert (row["strength"], row["condition"]) == (mode.strength, mode.condition)
        radius = ov.layer_matrix(row["layer"]).norm().item() / 24**0.5
        assert row["baseline_strength"] == pytest.approx(radius + mode.skip)


def test_round_trip_of_a_mode(tmp_path: Any, model_of: Any) -> None:
    for mode in ov_circuits(model_of("gpt2")).modes(1):
        again = PrincipalMode.load(mode.save(tmp_path / "mode"))
        assert torch.equal(again.subspace, mode.subspace)
        assert {**vars(again), "subspace": 0} == {**vars(mode), "subspace": 0}


def test_refusals(model_of: Any) -> None:
    ov = ov_circuits(model_of("gpt2"), layers=[1])
    for match, call in {
        "Layer 0 is not here": lambda: ov.principal(0),
        "method must be": lambda: ov.principal(1, method="qr"),
        "k must be an integer from 1 to 24": lambda: ov.modes(1, k=0),
        "got 25": lambda: ov.modes(1, k=25),
        "got True": lambda: ov.modes(1, k=True),
        "Layer 5": lambda: ov.layer_eigenvalues(5),
        "Use method='dense'": lambda: ov.modes(1, k=20, method="arnoldi"),
        "method must be 'auto'": lambda: ov.modes_dataframe(method="fast"),
    }.items():
        with pytest.raises(InputError, match=match):
            call()


# --------------------------------------------------------------------------------- figures


def test_figures(model_of: Any) -> None:
    from tl_spectral.plots.circuits import layer_modes_figure, layer_spectrum_figure, ov_figure

    ov = ov_circuits(model_of("llama"))
    assert isinstance(ov_figure(ov.copying_score), go.Figure)
    table = ov.modes_dataframe(3)
    modes = layer_modes_figure(table)
    drawn = [trace for trace in modes.data if trace.name == "mode 2" and trace.xaxis == "x"]
    rows = table[(table["rule"] == "with_skip") & (table["rank"] == 2)]
    assert drawn[0].y == pytest.approx(rows["strength"].to_numpy(), rel=1e-6)
    assert "layer" in drawn[0].hovertemplate

    clouds = {layer: ov.layer_eigenvalues(layer) for layer in (0, 2)}
    norms = {layer: ov.layer_matrix(layer).norm().item() for layer in (0, 2)}
    figure = layer_spectrum_figure(clouds, norms)
    first = figure.data[0]
    assert sorted(first.x) == pytest.approx(sorted(clouds[0].real.tolist()), rel=1e-5, abs=1e-6)
    circle = next(s for s in figure.layout.shapes if s.type == "circle" and s.xref == "x")
    assert circle.x1 == pytest.approx(norms[0] / 24**0.5)
    assert any(list(trace.x) == [-1] and list(trace.y) == [0] for trace in figure.data)
    assert layer_spectrum_figure(clouds, norms, template="plotly_dark").layout.template
