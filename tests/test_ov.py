"""OV circuits: conventions proven against the model's own attention output, and closed forms."""

from __future__ import annotations

import math

import pytest
import torch
from zoo import ARCHITECTURES, tiny

from tl_spectral.errors import InputError, UnsupportedModelError
from tl_spectral.model import ModelView
from tl_spectral.ov import OVCircuits, PrincipalMode, ov_circuits

TOKENS = torch.tensor([[7, 9, 22, 41, 5, 33]])


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_attention_output_is_pattern_times_ov(name):
    """Kills: a kv head mapped to the wrong query head, a transposed W_V or W_O."""
    model = tiny(name)
    view = ModelView(model)
    _, cache = model.run_with_cache(TOKENS)
    prefix = "blocks.1.attn"
    W_V, W_O = view.ov_factors(1)
    with torch.no_grad():
        values = torch.einsum("btd,hdk->bhtk", cache[f"{prefix}.hook_in"], W_V)
        bias = getattr(model.blocks[1].attn, "b_V", None)
        if bias is not None:
            values = values + bias.repeat_interleave(len(W_V) // len(bias), 0)[None, :, None]
        rebuilt = torch.einsum("bhqt,bhtk,hke->bqe", cache[f"{prefix}.hook_pattern"], values, W_O)
        if getattr(model.blocks[1].attn, "b_O", None) is not None:
            rebuilt = rebuilt + model.blocks[1].attn.b_O
    # attn.hook_out holds the residual too on BERT and BLOOM; the projection's own output never does
    torch.testing.assert_close(rebuilt, cache[f"{prefix}.o.hook_out"], atol=1e-5, rtol=1e-4)


def test_eigenvalues_are_those_of_the_large_matrix():
    ov = ov_circuits(tiny("llama"))
    large = ov.W_V[1, 3].double() @ ov.W_O[1, 3].double()
    eigenvalues = torch.linalg.eigvals(large)
    nonzero = eigenvalues[eigenvalues.abs().argsort(descending=True)][: ov.W_V.shape[-1]]

    def ordered(values):
        return sorted(values.tolist(), key=lambda z: (round(z.real, 9), round(z.imag, 9)))

    for ours, theirs in zip(ordered(ov.eigenvalues[1, 3]), ordered(nonzero), strict=True):
        assert abs(ours - theirs) < 1e-10
    assert ov.frobenius[1, 3] == pytest.approx(large.norm().item(), rel=1e-12)
    copying = (nonzero.real.sum() / nonzero.abs().sum()).item()
    assert ov.copying_score[1, 3].item() == pytest.approx(copying, abs=1e-10)


def planted(F: torch.Tensor) -> OVCircuits:
    """One layer with one head, whose layer matrix is F."""
    d = len(F)
    W_V, W_O = torch.eye(d, dtype=F.dtype)[None, None], F.T[None, None].contiguous()
    eigenvalues = torch.linalg.eigvals(W_O @ W_V)
    one = torch.ones(1, 1, dtype=F.dtype)
    return OVCircuits(
        eigenvalues=eigenvalues, copying_score=one, copying_score_sd=0.1, rotation_index=one,
        complex_fraction=one, spectral_radius=one, frobenius=one, W_V=W_V, W_O=W_O, layers=(4,),
    )  # fmt: skip


def test_layer_matrix_is_in_column_convention():
    F = torch.randn(5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(planted(F).layer_matrix(4), F)


def test_dominance_depends_on_the_skip_connection():
    F = torch.diag(torch.tensor([-3.0, 2.5, 0.1], dtype=torch.float64))
    with_skip, without = (planted(F).principal(4, skip=skip) for skip in (True, False))
    assert with_skip.eigenvalue == pytest.approx(2.5)  # |1 + 2.5| > |1 − 3|
    assert without.eigenvalue == pytest.approx(-3.0)
    assert with_skip.gap == pytest.approx(3.5 / 2)
    assert without.gap == pytest.approx(3 / 2.5)
    assert with_skip.subspace[:, 0].abs().tolist() == pytest.approx([0, 1, 0])


def test_complex_dominant_mode_spans_its_plane():
    angle, d = 0.7, 6
    F = torch.zeros(d, d, dtype=torch.float64)
    c, s = 2 * math.cos(angle), 2 * math.sin(angle)
    F[:2, :2] = torch.tensor([[c, -s], [s, c]])
    Q, _ = torch.linalg.qr(torch.randn(d, d, dtype=torch.float64))
    mode = planted(Q @ F @ Q.T).principal(4)
    assert mode.kind == "complex"
    assert mode.eigenvalue == pytest.approx(complex(c, s))
    overlap = (Q[:, :2].T @ mode.subspace).norm() ** 2
    assert overlap.item() == pytest.approx(2.0)
    assert mode.gap == pytest.approx(abs(1 + complex(c, s)))


def test_round_trip(tmp_path):
    ov = ov_circuits(tiny("gpt2"))
    again = OVCircuits.load(ov.save(tmp_path / "ov"))
    assert torch.equal(again.eigenvalues, ov.eigenvalues)
    assert again.layers == ov.layers
    assert again.provenance == ov.provenance
    mode = ov.principal(1)
    assert PrincipalMode.load(mode.save(tmp_path / "mode")).eigenvalue == mode.eigenvalue


def test_table_has_a_row_per_head_with_its_baseline():
    table = ov_circuits(tiny("mistral")).to_dataframe()
    assert len(table) == 3 * 4
    assert (table["baseline_copying_score"] == 0).all()
    assert (table["baseline_sd"] > 0).all()


def test_random_heads_have_the_baseline_that_is_printed():
    """The printed deviation covers fresh random heads: about 95 % lie within two of them."""
    from tl_spectral.ov import _random_copying_score_sd

    generator = torch.Generator().manual_seed(5)
    W_V = torch.randn(300, 48, 8, generator=generator, dtype=torch.float64)
    W_O = torch.randn(300, 8, 48, generator=generator, dtype=torch.float64)
    values = torch.linalg.eigvals(W_O @ W_V)
    scores = values.real.sum(-1) / values.abs().sum(-1)
    inside = (scores.abs() < 2 * _random_copying_score_sd(48, 8)).double().mean().item()
    assert 0.88 < inside < 0.99


def test_refusals():
    ov = ov_circuits(tiny("gpt2"), layers=[1])
    with pytest.raises(InputError, match="Layer 0 is not here"):
        ov.layer_matrix(0)
    with pytest.raises(InputError, match="layer 7 does not exist"):
        ov_circuits(tiny("gpt2"), layers=[7])
    with pytest.raises(UnsupportedModelError):
        ov_circuits(object())
