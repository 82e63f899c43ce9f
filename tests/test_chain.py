"""Chains against products whose singular values are known."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tests.zoo import tiny
from tl_spectral.chain import ChainResult, chain
from tl_spectral.errors import InputError, ProvenanceError
from tl_spectral.jacobian import BlockJacobian, block_jacobians
from tl_spectral.results import Provenance
from tl_spectral.spectrum import spectrum
from tl_spectral.surgery import schur_surgery


def gaussian(d=16, seed=0):
    return torch.randn(d, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def orthogonal(d=16, seed=0):
    return torch.linalg.qr(gaussian(d, seed))[0]


def blocks_like(depth=5, d=16, strength=0.4):
    eye = torch.eye(d, dtype=torch.float64)
    return [eye + strength * gaussian(d, seed) / d**0.5 for seed in range(depth)]


def graded(depth, top, bottom, d=24):
    """Factors whose product has exactly known singular values, aligned from layer to layer.

    Aligned factors are the hard case for a QR recursion. The values of each factor are shuffled,
    so no factor is graded itself, but their product is, from e^top down to e^bottom.
    """
    rng = np.random.default_rng(0)
    target = np.linspace(top, bottom, d)
    noise = rng.standard_normal((depth, d))
    noise -= noise.mean(axis=0)  # sums to nothing over the depth
    logs = target / depth + noise
    bases = [np.linalg.qr(rng.standard_normal((d, d)))[0] for _ in range(depth + 1)]
    factors = [
        torch.from_numpy(bases[i + 1] @ np.diag(np.exp(logs[i])) @ bases[i].T) for i in range(depth)
    ]
    return factors, target


def block(matrix, layer, **fields):
    defaults = {
        "matrix": matrix, "layer": layer, "stop": layer + 1, "pos": 5, "source_pos": 5,
        "context": "full", "scope": "block", "n_samples": 1, "norm_gain": None, "engine": "fast",
        "engine_reason": "", "provenance": Provenance(model="toy", texts="a"),
    }  # fmt: skip
    return BlockJacobian(**(defaults | fields))


# values


def test_every_depth_is_the_svd_of_the_product():
    factors = blocks_like()
    c = chain(factors, k=4)
    P = torch.eye(16, dtype=torch.float64)
    for i, J in enumerate(factors):
        P = J @ P
        s = spectrum(P)
        assert float(c.effective_rank[i]) == pytest.approx(s.effective_rank)
        assert float(c.participation_ratio[i]) == pytest.approx(s.participation_ratio)
        assert float(c.log_frobenius[i]) == pytest.approx(math.log(s.frobenius))
        torch.testing.assert_close(c.log_singular_values[i], s.singular_values[:4].log())
    assert c.layers == (0, 1, 2, 3, 4)
    assert (c.resolved_rank == 16).all()
    torch.testing.assert_close(c.growth_rates[4] * 5, c.log_singular_values[4])


def test_a_factor_with_a_zero_row_is_minus_infinity_when_refined():
    kill = torch.diag(torch.tensor([1.0, 2.0, 0.0], dtype=torch.float64))
    c = chain([kill, kill], k=3, refine=2)
    assert c.log_singular_values[-1].tolist() == pytest.approx([math.log(4), 0, -math.inf])
    assert float(c.refinement_error[-1]) == 0


def test_order_is_first_layer_first():
    up, project = torch.eye(4, dtype=torch.float64), torch.zeros(4, 4, dtype=torch.float64)
    up[0, 1], project[1, 1], project[0, 0] = 3.0, 1.0, 1.0
    first_up = chain([up, project], k=1).log_singular_values[-1, 0]
    first_project = chain([project, up], k=1).log_singular_values[-1, 0]
    assert float(first_up) == pytest.approx(math.log(float(torch.linalg.norm(project @ up, 2))))
    assert float(first_project) == pytest.approx(
        math.log(float(torch.linalg.norm(up @ project, 2)))
    )


def test_rotations_lose_nothing_over_any_depth():
    c = chain([orthogonal(seed=i) for i in range(40)])
    torch.testing.assert_close(c.effective_rank, torch.full((40,), 16.0, dtype=torch.float64))
    assert c.log_singular_values.abs().max() < 1e-12
    assert (c.resolved_rank == 16).all()


@pytest.mark.parametrize("size", [1e-60, 1e60])
def test_the_scale_is_carried_where_float64_would_overflow(size):
    c = chain([orthogonal(seed=i) * size for i in range(20)])
    expected = math.log(size) * torch.arange(1, 21, dtype=torch.float64)
    torch.testing.assert_close(c.log_singular_values[:, 0], expected, rtol=1e-13, atol=1e-12)
    torch.testing.assert_close(c.log_frobenius, expected + math.log(4))


def test_powers_of_two_change_no_bit_of_the_ranks():
    factors = blocks_like()
    one = chain(factors)
    two = chain([J * 2.0 ** (7 * (-1) ** i) for i, J in enumerate(factors)])
    assert torch.equal(one.effective_rank, two.effective_rank)


def test_a_graded_chain_is_exact_where_resolved_and_silent_below():
    factors, target = graded(depth=30, top=24.0, bottom=-26.0)
    c = chain(factors, k=24)
    resolved = int(c.resolved_rank[-1])
    assert 14 <= resolved < 24
    final = c.log_singular_values[-1].numpy()
    assert np.isnan(final[resolved:]).all()
    np.testing.assert_allclose(final[:8], target[:8], atol=1e-9)
    np.testing.assert_allclose(final[: resolved - 2], target[: resolved - 2], atol=0.3)
    p = np.exp(2 * target)
    p /= p.sum()
    assert float(c.effective_rank[-1]) == pytest.approx(math.exp(-(p * np.log(p)).sum()), rel=1e-9)


def test_sweeps_recover_the_tail_of_a_graded_chain():
    factors, target = graded(depth=30, top=80.0, bottom=-76.0)
    plain, refined = chain(factors, k=24), chain(factors, k=24, refine=6)
    assert int(plain.resolved_rank[-1]) < 10
    np.testing.assert_allclose(refined.log_singular_values[-1], target, atol=1e-6)
    assert float(refined.refinement_error[-1]) < 1e-3
    assert torch.equal(refined.effective_rank, plain.effective_rank)
    assert refined.refinement_error[0].isnan()  # one factor is resolved as it is
    assert plain.refinement_error.isnan().all()


def test_the_refinement_error_covers_the_error_of_too_few_sweeps():
    factors, target = graded(depth=30, top=80.0, bottom=-76.0)
    c = chain(factors, k=24, refine=2)
    error = float(np.abs(c.log_singular_values[-1].numpy() - target).max())
    assert float(c.refinement_error[-1]) > error / 3


def test_a_qr_recursion_alone_would_be_wrong():
    """The trap this module avoids: Σ log|r_ii| is not the log-singular spectrum at finite depth."""
    factors = blocks_like(depth=12, d=64, strength=1.0)
    Q, total = np.eye(64), np.zeros(64)
    for J in factors:
        Q, R = np.linalg.qr(J.numpy() @ Q)
        total += np.log(np.abs(np.diagonal(R)))
    p = np.exp(2 * (total - total.max()))
    p /= p.sum()
    assert math.exp(-(p * np.log(p)).sum()) > 1.3 * float(chain(factors).effective_rank[-1])


def test_singular_factors_give_minus_infinity_when_refined():
    factors = [orthogonal(seed=i) for i in range(3)]
    factors[1] = factors[1] @ torch.diag(torch.tensor([1.0] * 15 + [0.0], dtype=torch.float64))
    c = chain(factors, k=16, refine=4)
    assert c.resolved_rank.tolist() == [16, 15, 15]
    assert c.log_singular_values[-1, :15].abs().max() < 1e-12
    assert float(c.log_singular_values[-1, 15]) < -30
    assert chain(factors, k=16).log_singular_values[-1, 15].isnan()


# options


@pytest.mark.parametrize("kind", ["normal", "matched"])
def test_surgery_acts_on_every_factor(kind):
    factors = blocks_like()
    expected = chain([schur_surgery(J, kind) for J in factors])
    torch.testing.assert_close(
        chain(factors, surgery=kind).log_singular_values, expected.log_singular_values
    )


def test_surgery_raises_the_rank_of_non_normal_chains():
    factors = [torch.eye(32, dtype=torch.float64) + 0.5 * torch.triu(gaussian(32, i), 1)
               for i in range(6)]  # fmt: skip
    ranks = {kind: float(chain(factors, surgery=kind).effective_rank[-1])
             for kind in (None, "normal", "shuffled", "rotated")}  # fmt: skip
    assert ranks[None] < 6
    assert ranks["shuffled"] < 12
    assert ranks["normal"] == pytest.approx(32)
    assert ranks["rotated"] == pytest.approx(32)


def test_random_surgeries_differ_by_factor_and_follow_the_seed():
    J = blocks_like(1)[0]
    run = [chain([J, J], surgery="rotated", seed=s).effective_rank for s in (1, 1, 2)]
    assert torch.equal(run[0], run[1])
    assert not torch.equal(run[0], run[2])
    same_basis = schur_surgery(J, "rotated", seed=1)
    assert float(run[0][1]) != pytest.approx(spectrum(same_basis @ same_basis).effective_rank)


def test_truncation_after_every_step():
    factors = blocks_like()
    c = chain(factors, k=16, truncate=3)
    P = torch.eye(16, dtype=torch.float64)
    for i, J in enumerate(factors):
        U, sigma, Vt = torch.linalg.svd(J @ P)
        P = U[:, :3] * sigma[:3] @ Vt[:3]
        torch.testing.assert_close(c.log_singular_values[i, :3], sigma[:3].log())
        assert int(c.resolved_rank[i]) == 3
        assert c.log_singular_values[i, 3:].isnan().all()
    assert c.truncate == 3
    assert (c.effective_rank <= 3 + 1e-9).all()


def test_natural_units_take_one_scale_per_end():
    factors = blocks_like()
    scales = [torch.rand(16, dtype=torch.float64, generator=torch.Generator().manual_seed(i)) + 0.1
              for i in range(6)]  # fmt: skip
    converted = [J * scales[i] / scales[i + 1][:, None] for i, J in enumerate(factors)]
    natural, expected = chain(factors, scales=scales), chain(converted)
    torch.testing.assert_close(natural.log_singular_values, expected.log_singular_values)
    torch.testing.assert_close(natural.effective_rank, expected.effective_rank)
    assert natural.units == "natural"
    assert not torch.allclose(natural.effective_rank, chain(factors).effective_rank, rtol=1e-3)


def test_refinement_works_in_natural_units():
    factors, _ = graded(depth=12, top=60.0, bottom=-60.0)
    scales = [torch.rand(24, dtype=torch.float64, generator=torch.Generator().manual_seed(i)) + 0.1
              for i in range(13)]  # fmt: skip
    scales[0][3] = scales[-1][5] = 0
    natural = chain(factors, k=24, scales=scales, refine=8)
    factors[0] = (factors[0] * scales[0])[:, scales[0] > 0]
    factors[-1] = (factors[-1] / scales[-1][:, None])[scales[-1] > 0]
    logs, links = None, [F.numpy() for F in factors]
    for _ in range(8):  # the same sweeps on factors converted by hand
        Q, total = np.eye(links[0].shape[1]), np.zeros(23)
        triangles = []
        for F in links:
            Q, R = np.linalg.qr(F @ Q)
            triangles.append(R.T)
            total += np.log(np.abs(np.diagonal(R)))
        logs, links = np.sort(total)[::-1], triangles[::-1]
    assert int(natural.resolved_rank[-1]) < 12
    np.testing.assert_allclose(natural.log_singular_values[-1, :23], logs, atol=1e-2)
    assert natural.log_singular_values[-1, 23].isnan()


@pytest.mark.parametrize("refine", [0, 4])
def test_coordinates_without_variance_leave_the_ends_only(refine):
    factors = blocks_like(2)
    scales = [torch.ones(16, dtype=torch.float64) for _ in range(3)]
    scales[0][3] = scales[2][5] = scales[2][6] = 0
    c = chain(factors, k=16, scales=scales, refine=refine)
    product = (factors[1] @ factors[0])[scales[2] > 0][:, scales[0] > 0]
    torch.testing.assert_close(c.log_singular_values[1, :14], torch.linalg.svdvals(product).log())
    assert (c.n_dropped_input, c.n_dropped_output) == (1, (0, 2))
    assert c.log_singular_values.shape == (2, 16)
    assert c.log_singular_values[1, 14:].isnan().all()


def test_a_generator_is_consumed_one_factor_at_a_time():
    alive = []

    def factors():
        for J in blocks_like():
            alive.append(J)
            yield J

    torch.testing.assert_close(chain(factors()).effective_rank, chain(blocks_like()).effective_rank)
    assert len(alive) == 5
    stacked = chain(torch.stack(blocks_like()))
    torch.testing.assert_close(stacked.effective_rank, chain(blocks_like()).effective_rank)


def test_baselines_are_those_of_independent_factors():
    c = chain([gaussian(150, i) for i in range(4)])
    torch.testing.assert_close(c.effective_rank, c.baseline_effective_rank, rtol=0.06, atol=0)
    torch.testing.assert_close(
        c.participation_ratio, c.baseline_participation_ratio, rtol=0.1, atol=0
    )


# block Jacobians and models


def test_block_jacobians_bring_their_layers_and_provenance():
    c = chain([block(J, 3 + i) for i, J in enumerate(blocks_like())], k=2)
    assert c.layers == (3, 4, 5, 6, 7)
    assert c.provenance.model == "toy"
    assert c.provenance.options["k"] == 2


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"scope": "mlp"}, InputError, "scope 'mlp'"),
        ({"source_pos": 2}, InputError, "one position"),
        ({"layer": 5}, InputError, "Layer 5 follows layer 0"),
        ({"layer": 0}, InputError, "Layer 0 follows layer 0"),
        ({"pos": 6, "source_pos": 6}, ProvenanceError, "pos: 5 and 6"),
        ({"context": "isolated"}, ProvenanceError, "context"),
        ({"n_samples": 4}, ProvenanceError, "n_samples"),
        ({"provenance": Provenance(model="other", texts="a")}, ProvenanceError, "different models"),
        ({"provenance": Provenance(model="toy", texts="b")}, ProvenanceError, "different texts"),
    ],
)
def test_factors_that_do_not_belong_together_are_refused(fields, error, message):
    second = block(gaussian(), **{"layer": 1, **fields})
    with pytest.raises(error, match=message):
        chain([block(gaussian(), 0), second])


def test_chain_of_a_model_is_the_chain_of_its_block_jacobians():
    model = tiny("gpt2")
    tokens = torch.arange(5, 15)[None]
    c = chain(model, tokens, k=3, context="isolated")
    expected = chain(list(block_jacobians(model, tokens, context="isolated")), k=3)
    assert torch.equal(c.log_singular_values, expected.log_singular_values)
    assert c.layers == (0, 1, 2)
    with pytest.raises(InputError, match="one prompt"):
        chain(model, torch.arange(5, 25).reshape(2, 10))
    with pytest.raises(InputError, match="alone"):
        chain(model)


# refusals and files


@pytest.mark.parametrize(
    ("factors", "options", "message"),
    [
        ([], {}, "no factors"),
        ([gaussian(4), gaussian(5)], {}, "Factor 1 is 5 wide"),
        ([gaussian(4), block(gaussian(4), 1)], {}, "mixed"),
        (block(gaussian(4), 1), {}, "single one|alone"),
        ([gaussian(4)[:2]], {}, "square"),
        ([gaussian(4) * 0], {}, "zero from layer 0"),
        ([gaussian(4)], {"surgery": "usual"}, "surgery"),
        ([gaussian(4)], {"k": 0}, "k must"),
        ([gaussian(4)], {"truncate": 0}, "truncate must"),
        ([gaussian(4)], {"refine": 1}, "two sweeps"),
        ([gaussian(4)], {"refine": 2, "truncate": 2}, "two sweeps"),
        ([gaussian(4)], {"context": "full"}, r"options of chain\(model"),
        ([gaussian(4)], {"scales": [torch.ones(4)]}, "longer"),
        ([gaussian(4)], {"scales": [torch.ones(4)] * 3}, "need 2 scales"),
        ([gaussian(4)], {"scales": [torch.ones(4), torch.zeros(4)]}, r"varies in scales\[1\]"),
    ],
)
def test_refusals(factors, options, message):
    with pytest.raises(InputError, match=message):
        chain(factors, **options)


def test_a_nilpotent_chain_ends_with_an_error_that_names_the_layer():
    N = torch.diag(torch.ones(2, dtype=torch.float64), 1)
    with pytest.raises(InputError, match="zero from layer 2"):
        chain([N, N, N])


def test_table_and_round_trip(tmp_path):
    c = chain(blocks_like(), k=2, surgery="normal")
    table = c.to_dataframe()
    assert list(table["layer"]) == [0, 1, 2, 3, 4]
    np.testing.assert_array_equal(table["log_sigma_2"], c.log_singular_values[:, 1])
    loaded = ChainResult.load(c.save(tmp_path / "chain"))
    assert torch.equal(loaded.log_singular_values, c.log_singular_values)
    assert loaded.layers == c.layers
    assert loaded.surgery == "normal"
