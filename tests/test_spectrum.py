"""Metrics of one operator: closed forms, invariances, oracles, refusals."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.linalg
import torch
from transformer_lens import FactoredMatrix

from tl_spectral.errors import InputError, TLSpectralWarning
from tl_spectral.jacobian import BlockJacobian
from tl_spectral.metrics import METRICS
from tl_spectral.results import Provenance
from tl_spectral.spectrum import Spectrum, block_spectra, spectrum

HOMOGENEOUS = ("spectral_radius", "spectral_norm", "numerical_abscissa", "frobenius", "trace")
ALONE = tuple(name for name in METRICS if name != "norm_ratio")


def gaussian(d=24, seed=0, dtype=torch.float64):
    return torch.randn(d, d, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def orthogonal(d, seed=1):
    return torch.linalg.qr(gaussian(d, seed))[0]


def values(s, names=ALONE):
    return {name: getattr(s, name) for name in names}


def block(matrix, **fields):
    defaults = {
        "matrix": matrix, "layer": 3, "stop": 4, "pos": 5, "source_pos": 5, "context": "full",
        "scope": "block", "n_samples": 1, "norm_gain": None, "engine": "fast", "engine_reason": "",
    }  # fmt: skip
    return BlockJacobian(**(defaults | fields))


# closed forms


@pytest.mark.parametrize("angle", [0.3, 1.2, 2.5])
def test_a_rotation_in_every_plane(angle):
    c, s = math.cos(angle), math.sin(angle)
    plane = torch.tensor([[c, -s], [s, c]], dtype=torch.float64)
    Q = orthogonal(6)
    M = Q @ torch.block_diag(plane, plane, plane) @ Q.T
    m = spectrum(M, k=2)
    assert m.complex_fraction == 1
    assert m.rotation_index == pytest.approx(s)
    assert m.antisymmetric_energy == pytest.approx(s**2)
    assert m.symmetry_score == pytest.approx(math.cos(2 * angle))
    assert m.henrici < 1e-14
    assert m.spectral_radius == pytest.approx(1)
    assert m.spectral_norm == pytest.approx(1)
    assert m.numerical_abscissa == pytest.approx(c)
    assert m.effective_rank == pytest.approx(6)
    assert m.participation_ratio == pytest.approx(6)
    assert m.stable_rank == pytest.approx(6)
    assert m.condition_number == pytest.approx(1)
    assert m.trace == pytest.approx(6 * c)
    assert "not unique" in m.notes["self_alignment"]


def test_a_symmetric_matrix():
    lam = torch.tensor([4.0, -3.0, 2.0, 1.0], dtype=torch.float64)
    Q = orthogonal(4)
    m = spectrum(Q @ torch.diag(lam) @ Q.T, k=2)
    torch.testing.assert_close(m.eigenvalues.real, lam)
    assert m.complex_fraction == 0
    assert m.rotation_index == 0
    assert m.symmetry_score == pytest.approx(1)
    assert m.henrici < 1e-14
    assert m.self_alignment == pytest.approx(1)
    assert m.eigenvector_condition == pytest.approx(1)
    assert m.condition_number == pytest.approx(4)
    assert m.numerical_abscissa == pytest.approx(4)
    assert m.expanding_fraction == 0.75 or m.expanding_fraction == 1  # |1| to the last bit
    p = lam**2 / 30
    assert m.effective_rank == pytest.approx(math.exp(-float((p * p.log()).sum())))
    assert m.participation_ratio == pytest.approx(900 / (256 + 81 + 16 + 1))
    assert m.stable_rank == pytest.approx(30 / 16)


def test_a_triangular_matrix_departs_by_its_upper_part():
    M = torch.tensor([[1.0, 7.0], [0.0, 2.0]], dtype=torch.float64)
    m = spectrum(M)
    assert m.henrici == pytest.approx(7 / math.sqrt(54))
    assert m.antisymmetric_energy == pytest.approx((49 / 2) / 54)
    # unit eigenvectors (1, 0) and (7, 1)/√50
    cosine = 7 / math.sqrt(50)
    assert m.eigenvector_condition == pytest.approx(math.sqrt((1 + cosine) / (1 - cosine)))


def test_a_rank_one_matrix_writes_where_it_reads_by_the_cosine():
    u, v = gaussian(8)[0], gaussian(8)[1]
    m = spectrum(torch.outer(u, v), k=1)
    assert m.effective_rank == pytest.approx(1)
    assert m.participation_ratio == pytest.approx(1)
    assert m.self_alignment == pytest.approx(float((u @ v) ** 2 / (u @ u) / (v @ v)))
    assert m.condition_number is None
    assert "singular" in m.notes["condition_number"]


def test_a_jordan_block_has_reasons_instead_of_numbers():
    m = spectrum(torch.diag(torch.ones(5, dtype=torch.float64), 1))
    for name in ("complex_fraction", "rotation_index", "condition_number", "eigenvector_condition"):
        assert getattr(m, name) is None
        assert m.notes[name]
    assert m.henrici == 1
    assert m.spectral_radius == 0


def test_tolerance_follows_the_precision_of_the_entries():
    plane = torch.tensor([[1.0, -1e-8], [1e-8, 1.0]], dtype=torch.float64)
    assert spectrum(plane).complex_fraction == 1
    assert spectrum(plane).tol == 1e-12
    assert spectrum(plane.float()).complex_fraction == 0
    assert spectrum(plane.float()).tol == 1e-6
    assert spectrum(plane, tol=1e-6).complex_fraction == 0


# oracles


def test_against_numpy_and_scipy():
    M = gaussian(40)
    m, A = spectrum(M), M.numpy()
    lam, V = np.linalg.eig(A)
    np.testing.assert_allclose(
        np.sort_complex(m.eigenvalues.numpy()), np.sort_complex(lam), atol=1e-12
    )
    np.testing.assert_allclose(m.singular_values, scipy.linalg.svdvals(A), rtol=1e-12)
    assert m.eigenvector_condition == pytest.approx(np.linalg.cond(V), rel=1e-8)
    assert m.condition_number == pytest.approx(np.linalg.cond(A), rel=1e-8)
    T = scipy.linalg.schur(A, output="complex")[0]
    assert m.henrici == pytest.approx(np.linalg.norm(np.triu(T, 1)) / np.linalg.norm(A))
    assert m.symmetry_score == pytest.approx(np.trace(A @ A) / np.linalg.norm(A) ** 2)
    assert (m.eigenvalues.abs().diff() <= 1e-15).all()


def test_henrici_close_to_the_identity_keeps_its_digits():
    N = gaussian(60) * 1e-5
    T = scipy.linalg.schur(N.numpy(), output="complex")[0]
    J = torch.eye(60, dtype=torch.float64) + N
    expected = np.linalg.norm(np.triu(T, 1)) / float(J.norm())
    assert spectrum(J).henrici == pytest.approx(expected, rel=1e-8)
    assert block_spectra(J)["J", "raw"].henrici == pytest.approx(expected, rel=1e-8)


def test_henrici_of_a_barely_non_normal_matrix():
    """Σ|λ|² agrees with ‖M‖² to all digits here; only the Schur form can tell."""
    M = torch.diag(torch.arange(1.0, 9.0, dtype=torch.float64))
    M[0, 7] = 1e-10
    assert spectrum(M).henrici == pytest.approx(1e-10 / float(M.norm()), rel=1e-6)


# invariances


def test_an_orthogonal_change_of_basis_changes_nothing():
    M, Q = gaussian(), orthogonal(24)
    assert values(spectrum(Q @ M @ Q.T)) == pytest.approx(values(spectrum(M)), rel=1e-8)


@pytest.mark.parametrize("factor", [1e-3, 512.0])
def test_a_factor_scales_lengths_and_nothing_else(factor):
    M = gaussian()
    before, after = spectrum(M), spectrum(factor * M)
    for name in set(ALONE) - {"expanding_fraction"}:
        expected = getattr(before, name) * (factor if name in HOMOGENEOUS else 1)
        assert getattr(after, name) == pytest.approx(expected, rel=1e-10), name
        if before.baseline[name] is not None:
            expected = before.baseline[name] * (factor if name in HOMOGENEOUS else 1)
            assert after.baseline[name] == pytest.approx(expected), name


def test_transposition_keeps_all_but_the_eigenvectors():
    M = gaussian()
    names = set(ALONE) - {"eigenvector_condition"}  # left and right eigenvectors differ
    assert values(spectrum(M.T), names) == pytest.approx(values(spectrum(M), names), rel=1e-8)


def test_a_shift_keeps_the_numerators():
    M = gaussian()
    one, two = spectrum(M), spectrum(M + 5 * torch.eye(24, dtype=torch.float64))
    assert one.henrici * one.frobenius == pytest.approx(two.henrici * two.frobenius)
    assert one.antisymmetric_energy * one.frobenius**2 == pytest.approx(
        two.antisymmetric_energy * two.frobenius**2
    )
    assert two.numerical_abscissa == pytest.approx(one.numerical_abscissa + 5)
    assert two.eigenvector_condition == pytest.approx(one.eigenvector_condition)


# units


def test_natural_units_are_a_change_of_unit_per_coordinate():
    M, scale = gaussian(), torch.rand(24, dtype=torch.float64) + 0.1
    natural = spectrum(M, scale)
    expected = spectrum(M / scale[:, None] * scale)
    assert natural.units == "natural"
    assert values(natural) == pytest.approx(values(expected), rel=1e-8)
    raw = spectrum(M)
    assert natural.rotation_index == pytest.approx(raw.rotation_index)
    assert natural.spectral_norm != pytest.approx(raw.spectral_norm, rel=1e-3)


def test_coordinates_that_do_not_vary_are_left_out_and_counted():
    M, scale = gaussian(), torch.rand(24, dtype=torch.float64) + 0.1
    scale[[2, 9]] = 0
    kept = scale > 0
    natural = spectrum(M, scale)
    assert natural.n_dropped == 2
    assert len(natural.eigenvalues) == 22
    expected = spectrum(M[kept][:, kept], scale[kept])
    assert values(natural) == pytest.approx(values(expected))
    spectra = block_spectra(M, scale)
    assert spectra["J", "natural"].n_dropped == 2
    assert values(spectra["J", "natural"]) == pytest.approx(values(expected), rel=1e-8)


def test_one_huge_coordinate_rules_raw_units_and_not_natural_ones():
    """The trap that natural units exist for: a gain on one coordinate hides a symmetric rest."""
    S = gaussian()
    S = S + S.T
    scale = torch.ones(24, dtype=torch.float64)
    scale[0] = 1e3
    M = S * scale[:, None] / scale
    assert spectrum(M).antisymmetric_energy > 0.45
    assert spectrum(M).henrici > 0.9
    assert spectrum(M, scale).antisymmetric_energy < 1e-20
    assert spectrum(M, scale).henrici < 1e-10


# blocks


def test_block_spectra_share_what_they_share_and_agree_with_single_ones():
    J, scale = gaussian() * 0.1 + torch.eye(24), torch.rand(24, dtype=torch.float64) + 0.1
    J = J.float()
    spectra = block_spectra(block(J), scale, k=4)
    assert list(spectra) == [("J", "raw"), ("R", "raw"), ("J", "natural"), ("R", "natural")]
    R = (J.double() - torch.eye(24)).numpy()
    for (operator, units), s in spectra.items():
        matrix = J.double() if operator == "J" else torch.from_numpy(R)
        alone = spectrum(matrix, scale if units == "natural" else None, tol=1e-6, k=4)
        assert values(s) == pytest.approx(values(alone), rel=1e-7), (operator, units)
        assert (s.units, s.tol, s.k) == (units, 1e-6, 4)
        torch.testing.assert_close(
            s.eigenvalues.abs().sort()[0], alone.eigenvalues.abs().sort()[0], rtol=1e-9, atol=1e-9
        )
        assert (s.skip_baseline is not None) == (operator == "J")
    J_raw, R_raw = spectra["J", "raw"], spectra["R", "raw"]
    assert J_raw.norm_ratio == R_raw.norm_ratio == pytest.approx(R_raw.frobenius / J_raw.frobenius)
    assert J_raw.skip_baseline["norm_ratio"] == pytest.approx(J_raw.norm_ratio, rel=0.02)


def test_no_skip_joins_two_positions():
    spectra = block_spectra(block(gaussian(), source_pos=2))
    assert values(spectra["J", "raw"]) == values(spectra["R", "raw"])
    assert spectra["J", "raw"].skip_baseline is None


def test_a_block_that_does_nothing_is_refused():
    with pytest.raises(InputError, match="identity"):
        block_spectra(torch.eye(4))


# factored matrices


def test_a_factored_matrix_has_exact_zero_eigenvalues():
    A, B = gaussian(32)[:, :5], gaussian(32, 2)[:5]
    factored, dense = spectrum(FactoredMatrix(A, B), k=3), spectrum(A @ B, k=3)
    assert (factored.eigenvalues[5:] == 0).all()
    assert (factored.singular_values[5:] == 0).all()
    skip = {"eigenvector_condition", "condition_number", "complex_fraction"}
    names = [name for name in ALONE if name not in skip]
    assert values(factored, names) == pytest.approx(values(dense, names), rel=1e-9)
    assert factored.eigenvector_condition is None
    assert "full rank" in factored.notes["effective_rank"]
    scale = torch.rand(32, dtype=torch.float64) + 0.5
    names.remove("expanding_fraction")
    natural = spectrum(FactoredMatrix(A, B), scale, k=3)
    assert values(natural, names) == pytest.approx(
        values(spectrum(A @ B, scale, k=3), names), rel=1e-9
    )


def test_a_factored_matrix_of_full_inner_dimension_is_dense():
    A, B = gaussian(6), gaussian(6, 2)
    assert values(spectrum(FactoredMatrix(A, B))) == pytest.approx(values(spectrum(A @ B)))


def test_k_beyond_the_rank_is_reduced_and_said():
    assert spectrum(gaussian(6), k=10).k == 6
    assert "exceeds" in spectrum(gaussian(6), k=10).notes["self_alignment"]
    low = spectrum(FactoredMatrix(gaussian(8)[:, :2], gaussian(8)[:2]), k=10)
    assert low.k == 2


# inputs and outputs


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (torch.zeros(4, 4), "zero"),
        (torch.ones(4, 5), "square"),
        (torch.ones(1, 1), "2 × 2"),
        (torch.ones(2, 3, 3), "batch"),
        (torch.tensor([[1.0, math.nan], [0.0, 1.0]]), r"\[0, 1\] is nan"),
        (torch.tensor([[1.0, 0.0], [math.inf, 1.0]]), r"\[1, 0\] is inf"),
        (torch.ones(3, 3, dtype=torch.complex64), "real"),
        (torch.full((3, 3), 1e200, dtype=torch.float64), "range"),
        ("gpt2", "got str"),
        (FactoredMatrix(torch.ones(2, 4, 1), torch.ones(2, 1, 4)), "stack"),
    ],
)
def test_bad_matrices_are_refused(bad, message):
    with pytest.raises(InputError, match=message):
        spectrum(bad)


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (torch.ones(5), r"\[4\]"),
        (torch.tensor([1.0, -1.0, 1.0, 1.0]), r"scale\[1\]"),
        (torch.tensor([1.0, 1.0, math.nan, 1.0]), r"scale\[2\]"),
        (torch.tensor([1.0, 0.0, 0.0, 0.0]), "Only 1 of 4"),
    ],
)
def test_bad_scales_are_refused(scale, message):
    with pytest.raises(InputError, match=message):
        spectrum(gaussian(4), scale)


@pytest.mark.parametrize("options", [{"k": 0}, {"k": True}, {"tol": -1.0}, {"tol": 1.0}])
def test_bad_options_are_refused(options):
    with pytest.raises(InputError):
        spectrum(gaussian(4), **options)


def test_half_precision_is_analysed_with_a_warning():
    M = gaussian(8, dtype=torch.float32).to(torch.bfloat16)
    with pytest.warns(TLSpectralWarning, match="bfloat16"):
        s = spectrum(M)
    assert values(s) == pytest.approx(values(spectrum(M.float())))


def test_the_input_is_left_as_it_was():
    M = gaussian(8).requires_grad_()
    before = M.detach().clone()
    block_spectra(M, torch.ones(8))
    assert torch.equal(M.detach(), before)


def test_a_condition_number_beyond_the_entries_precision_is_flagged():
    Q = orthogonal(4)
    M = Q @ torch.diag(torch.tensor([1.0, 1.0, 1.0, 1e-10], dtype=torch.float64))
    assert "condition_number" not in spectrum(M).notes
    assert "precision of the entries" in spectrum(M.float()).notes["condition_number"]


def test_the_table_has_one_row_per_metric_and_a_reason_for_each_gap():
    s = block_spectra(torch.outer(gaussian(6)[0], gaussian(6)[1]) + torch.eye(6))["R", "raw"]
    table = s.to_dataframe()
    assert list(table["metric"]) == list(METRICS)
    assert (table["note"][table["value"].isna()] != "").all()
    row = table.set_index("metric").loc["henrici"]
    assert row["value"] == s.henrici
    assert row["baseline"] == s.baseline["henrici"]
    assert row["definition"] == METRICS["henrici"].definition


def test_a_spectrum_survives_the_disk(tmp_path):
    source = block(gaussian(6), provenance=Provenance(model="toy", options={"context": "full"}))
    s = block_spectra(source)["J", "raw"]
    assert s.provenance.model == "toy"
    assert s.provenance.options["context"] == "full"
    loaded = Spectrum.load(s.save(tmp_path / "s"))
    assert values(loaded) == values(s)
    assert torch.equal(loaded.eigenvalues, s.eigenvalues)
    assert loaded.baseline == s.baseline
    assert loaded.skip_baseline == s.skip_baseline
