"""OV circuits: conventions proven against the model's own attention output, and closed forms.

Changed to see these tests fail: tile for repeat_interleave of value heads; W_V of another head;
W_O of nn.Linear not transposed; the norm's centring left out; gain w instead of 1 + w; the
post-norm folded into the wrong side; rank from σ² instead of σ; W_E W_U for W_U W_E.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import transformers as tf
from oracles import ENCODERS
from torch import Tensor
from transformer_lens import FactoredMatrix
from transformer_lens.model_bridge.sources import build_bridge_from_module
from zoo import ARCHITECTURES, HEADS, WIDTH, tiny

from tl_spectral.errors import InputError, UnsupportedModelError
from tl_spectral.model import ModelView
from tl_spectral.model import anatomy as parts
from tl_spectral.ov import OVCircuits, ov_circuits
from tl_spectral.ov.heads import copying_sd, random_heads

TOKENS = torch.tensor([[7, 9, 22, 41, 5, 33]])
GROUPED = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "olmo2", "phi3", "mixtral")
PRE_NORM = [n for n in ARCHITECTURES if n not in ("olmo2", *ENCODERS)]
every_architecture = pytest.mark.parametrize("name", ARCHITECTURES)


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


# --------------------------------------------------------------------------------- conventions


def rebuilt(model: Any, W_V: Tensor, W_O: Tensor) -> tuple[Tensor, Tensor]:
    """Attention's output from pattern × (x W_V + b_V) W_O + b_O, and as the hook has it."""
    attention = model.blocks[1].attn
    with torch.no_grad():
        _, cache = model.run_with_cache(TOKENS)
        values = torch.einsum("btd,hdk->bhtk", cache["blocks.1.attn.hook_in"], W_V)
        bias = getattr(attention, "b_V", None)
        if bias is not None:
            values = values + bias.repeat_interleave(len(W_V) // len(bias), 0)[None, :, None]
        pattern = cache["blocks.1.attn.hook_pattern"]
        ours = torch.einsum("bhqt,bhtk,hke->bqe", pattern, values, W_O)
        if getattr(attention, "b_O", None) is not None:
            ours = ours + attention.b_O
    # attn.hook_out holds the residual too on BERT and BLOOM; the projection's own output never does
    out = "blocks.1.attn.o.hook_out"
    return ours, cache[out if out in cache else "blocks.1.attn.hook_out"]


@every_architecture
def test_attention_output_is_pattern_times_ov(name: str, model_of: Any) -> None:
    model = model_of(name)
    W_V, W_O = ModelView(model).ov_factors(1)
    ours, theirs = rebuilt(model, W_V, W_O)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)

    wrong = {"heads in another order": (W_V.roll(1, 0), W_O)}
    wrong["heads cut the other way"] = (
        W_V.transpose(0, 1).reshape(WIDTH, -1, HEADS).permute(2, 0, 1), W_O
    )  # fmt: skip
    wrong["not transposed"] = (W_V, W_O.flatten(0, 1).T.reshape(W_O.shape))
    if name in GROUPED:  # tile for repeat_interleave
        wrong["wrong head of a group"] = (W_V[[0, 2, 0, 2]], W_O)
    for mistake in wrong.values():
        ours, _ = rebuilt(model, *mistake)
        assert (ours - theirs).norm() > 0.05 * theirs.norm()


# --------------------------------------------------------------------------------- norms folded


@every_architecture
def test_norms_are_found_by_what_they_do(name: str, model_of: Any) -> None:
    block = ModelView(model_of(name)).anatomy[1]
    assert (block.attention_norm is not None) == (name in PRE_NORM)
    assert (block.attention_post_norm is not None) == (name in ("gemma2", "gemma3", "olmo2"))
    if block.attention_norm is not None:
        layer_norm = ("gpt2", "gpt_neo", "pythia", "gptj", "opt", "bloom")
        assert block.attention_norm.centres == (name in layer_norm)


def test_norms_that_attention_does_not_pass_through_are_none_of_its(
    model_of: Any, monkeypatch: Any
) -> None:
    model = tiny("gpt2")
    model.add_hook("blocks.1.attn.hook_in", lambda state, hook: state * 2)
    anatomy = ModelView(model).anatomy
    assert [block.attention_norm is not None for block in anatomy] == [True, False, True]
    # BLOOM's second norm reads what attn.hook_out shows, but stands on the stream.
    monkeypatch.setattr(parts, "_PARTS", tuple(p for p in parts._PARTS if ".o." not in p))
    for name, there in (("bloom", False), ("gemma2", True)):
        assert (ModelView(tiny(name)).anatomy[1].attention_post_norm is not None) == there


@pytest.mark.filterwarnings("ignore:Phi3ArchitectureAdapter does not support fold_ln")  # it folds
@pytest.mark.parametrize("name", [n for n in PRE_NORM if n != "mixtral"])
def test_folded_eigenvalues_are_those_of_compatibility_mode(name: str) -> None:
    model = tiny(name)
    raw, folded = ov_circuits(model), ov_circuits(model, fold="norm")
    if name in ("gemma2", "gemma3"):
        assert ov_circuits(model, fold="norm+post").folded == ("norm", "post")
    model.enable_compatibility_mode(disable_warnings=True)
    compat = ov_circuits(model)
    assert folded.folded == ("norm",)
    assert (raw.folded, compat.folded) == ((), ())
    assert compat.provenance.weights == "compat"
    for layer in range(3):
        for head in range(HEADS):
            close(folded.eigenvalues[layer, head], compat.eigenvalues[layer, head], 1e-5)
    assert (raw.copying_score - compat.copying_score).abs().max() > 1e-3
    # Nothing is left to fold.
    again = ov_circuits(model, fold="norm")
    torch.testing.assert_close(again.copying_score, compat.copying_score, atol=1e-5, rtol=0)


def close(one: Tensor, other: Tensor, tolerance: float) -> None:
    """The same multiset of complex numbers."""
    distance = (one[:, None] - other[None]).abs()
    assert distance.amin(dim=0).max() < tolerance * max(1.0, other.abs().max().item())
    assert distance.amin(dim=1).max() < tolerance * max(1.0, other.abs().max().item())


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "olmo2", "llama", "gpt2"])
def test_branch_is_rebuilt_up_to_the_norms_scales(name: str, model_of: Any) -> None:
    """Norm, pattern × OV and post-norm, from resid_pre: only each token's scale is divided out."""
    model = model_of(name)
    W_V, W_O = ModelView(model).ov_factors(1, fold="norm+post")
    with torch.no_grad():
        _, cache = model.run_with_cache(TOKENS)
    x = cache["blocks.1.hook_in"]
    if name != "olmo2":
        norm = model.blocks[1].ln1.original_component
        centred = x - x.mean(-1, keepdim=True) if name == "gpt2" else x
        eps = 1e-5 if name == "gpt2" else next(
            v for k, v in vars(norm).items() if "eps" in k.lower()
        )  # fmt: skip
        x = x / (centred.square().mean(-1, keepdim=True) + eps).sqrt()
    pattern = cache["blocks.1.attn.hook_pattern"]
    ours = torch.einsum("bhqt,btd,hdk,hke->bqe", pattern, x, W_V, W_O)
    if name == "gpt2":  # what the norm's bias and b_V, b_O add is no part of the circuit
        W, O_ = ModelView(model).ov_factors(1)
        shift = model.blocks[1].ln1.original_component.bias
        b_V = torch.einsum("d,hdk->hk", shift, W) + model.blocks[1].attn.b_V
        ours = ours + torch.einsum("hk,hke->e", b_V, O_) + model.blocks[1].attn.b_O
    post = "blocks.1.ln1_post.hook_out"
    theirs = cache[post if post in cache else "blocks.1.attn.o.hook_out"]
    if post in cache:
        ours, theirs = (y / y.norm(dim=-1, keepdim=True) for y in (ours, theirs))
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-5)


def test_a_norm_that_is_not_there_folds_nothing(model_of: Any) -> None:
    for name, fold, folded in (
        ("bert", "norm", ()),
        ("bert", "norm+post", ()),
        ("olmo2", "norm", ()),
        ("olmo2", "norm+post", ("post",)),
        ("pythia", "norm+post", ("norm",)),
    ):
        ov, raw = ov_circuits(model_of(name), fold=fold), ov_circuits(model_of(name))
        assert ov.folded == folded
        assert ov.fold == ov.provenance.options["fold"] == fold
        assert torch.equal(ov.eigenvalues, raw.eigenvalues) == (not folded)


# --------------------------------------------------------------------------------- heads


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_measures_are_those_of_the_large_matrix(name: str, model_of: Any) -> None:
    ov = ov_circuits(model_of(name))
    M = ov.W_V[1, 3].double() @ ov.W_O[1, 3].double()
    eigenvalues, sigma = torch.linalg.eigvals(M), torch.linalg.svdvals(M)
    nonzero = eigenvalues[eigenvalues.abs().argsort(descending=True)][:6]
    close(ov.eigenvalues[1, 3], nonzero, 1e-10)
    p = sigma[:6].square() / sigma.square().sum()
    antisymmetric = ((M - M.T) / 2).square().sum() / M.square().sum()
    moduli = nonzero.abs()
    for measured, expected in (
        (ov.copying_score, nonzero.real.sum() / moduli.sum()),
        (ov.rotation_index, nonzero.imag.abs().sum() / moduli.sum()),
        (ov.complex_fraction, (nonzero.imag.abs() > 1e-9).double().mean()),
        (ov.spectral_radius, moduli.max()),
        (ov.frobenius, M.norm()),
        (ov.symmetry_score, (M @ M).trace() / M.square().sum()),
        (ov.antisymmetric_energy, antisymmetric),
        (ov.rank, torch.linalg.matrix_rank(M, rtol=ov.rank_tolerance)),
        (ov.effective_rank, torch.special.entr(p).sum().exp()),
        (ov.eigenvalue_share, moduli.sum() / sigma.sum()),
        (ov.leading_gap, moduli[0] / moduli[2 if nonzero[0].imag.abs() > 1e-9 else 1]),
    ):
        assert measured[1, 3].item() == pytest.approx(float(expected), rel=1e-9)


def planted_head(values: list[float], angle: float | None = None, d: int = 12) -> FactoredMatrix:
    """A head with given eigenvalues, and a pair ``e^{±iangle}``, in a skew basis."""
    D = torch.diag(torch.tensor(values, dtype=torch.float64))
    if angle is not None:
        c, s = math.cos(angle), math.sin(angle)
        D = torch.block_diag(D, torch.tensor([[c, -s], [s, c]], dtype=torch.float64))
    X = gaussian(d, len(D), seed=3)
    return FactoredMatrix(X @ D, torch.linalg.pinv(X))


def test_planted_heads() -> None:
    copier = ov_circuits(planted_head([3.0, 2.0, 0.5]))
    assert copier.copying_score.item() == pytest.approx(1)
    assert copier.rotation_index.item() == pytest.approx(0, abs=1e-7)
    assert copier.leading_gap.item() == pytest.approx(1.5)
    assert copier.rank.item() == 3
    mixed = ov_circuits(planted_head([2.0, -1.0], angle=0.6))
    assert mixed.copying_score.item() == pytest.approx((1 + 2 * math.cos(0.6)) / 5)
    assert mixed.rotation_index.item() == pytest.approx(2 * math.sin(0.6) / 5)
    assert mixed.complex_fraction.item() == pytest.approx(0.5)
    assert not mixed.degenerate
    turning = ov_circuits(planted_head([], angle=0.6))
    assert turning.leading_gap.item() == math.inf
    assert "nothing to compare" in turning.to_dataframe()["note"][0]
    assert ov_circuits(planted_head([2.0, -2.001])).degenerate.item()


def test_what_cannot_be_named_is_said() -> None:
    Q = torch.linalg.qr(gaussian(12, 12))[0]
    writes_elsewhere = FactoredMatrix(Q[:, :3], Q[:, 3:6].T)
    zero = FactoredMatrix(torch.zeros(12, 3), torch.zeros(3, 12))
    low_rank = FactoredMatrix(Q[:, :3] * torch.tensor([1.0, 0, 0]), Q[:, :3].T)
    for matrix, rank, note in (
        (writes_elsewhere, 3, "sign is an accident"), (zero, 0, "is zero"), (low_rank, 1, ""),
    ):  # fmt: skip
        ov = ov_circuits(matrix)
        row = ov.to_dataframe().iloc[0]
        assert note in row["note"]
        assert row["rank"] == rank
        assert row["degenerate"] == bool(note)
    assert math.isnan(ov_circuits(zero).copying_score.item())
    assert ov_circuits(low_rank).effective_rank.item() == pytest.approx(1)


def test_rank_counts_singular_values_above_its_tolerance() -> None:
    Q = torch.linalg.qr(gaussian(12, 12))[0]
    sigma = torch.tensor([1.0, 1e-4, 3e-7])
    ov = ov_circuits(FactoredMatrix(Q[:, :3] * sigma, Q[:, :3].T))
    assert ov.rank_tolerance == 1e-6
    assert ov.rank.item() == 2
    dead = gaussian(12, 4, seed=2)
    dead[:, 1] = 0  # a dead value direction
    W_O = gaussian(4, 12, seed=1)
    expected = torch.linalg.svdvals(dead @ W_O)[:3].square()
    ov = ov_circuits(FactoredMatrix(dead, W_O))
    assert ov.rank.item() == 3
    p = expected / expected.sum()
    assert ov.effective_rank.item() == pytest.approx(torch.special.entr(p).sum().exp().item())


def test_scores_do_not_depend_on_the_basis(model_of: Any) -> None:
    """An orthogonal change of the residual basis, and any change of the heads' inner basis."""
    ov = ov_circuits(model_of("qwen2"))
    Q, G = torch.linalg.qr(gaussian(WIDTH, WIDTH))[0], gaussian(6, 6, seed=1)
    turned = ov_circuits(
        FactoredMatrix(Q @ ov.W_V.double() @ G, torch.linalg.inv(G) @ ov.W_O.double() @ Q.T)
    )
    one, other = ov.to_dataframe(), turned.to_dataframe()
    for name in one.columns:
        if one[name].dtype == "float64":
            assert one[name].to_numpy() == pytest.approx(other[name].to_numpy(), rel=1e-6), name


# --------------------------------------------------------------------------------- baselines


@pytest.mark.parametrize(("d", "k"), [(48, 8), (20, 16), (16, 16), (24, 3)])
def test_random_heads_have_the_baseline_that_is_printed(d: int, k: int) -> None:
    """Against heads whose large factors are drawn: means, and the spread of the copying score."""
    random = ov_circuits(FactoredMatrix(gaussian(1, 400, d, k), gaussian(1, 400, k, d, seed=1)))
    inside = (random.copying_score.abs() < 2 * random.copying_score_sd).double().mean().item()
    assert inside > 0.92
    assert k < 8 or inside < 0.985
    if k >= 8:
        assert random.copying_score.std().item() == pytest.approx(copying_sd(d, k), rel=0.12)
    table = random.to_dataframe()
    for name in ("symmetry_score", "effective_rank", "eigenvalue_share", "spectral_radius"):
        measured, spread = table[name].mean(), table[name].std()
        if name == "spectral_radius":
            measured, spread = measured / table["frobenius"].mean(), 0.1 / math.sqrt(d) * 8
        mean, sd = random.baseline[name]
        assert measured == pytest.approx(mean, abs=4 * spread / 8), name  # 64 draws
        if name != "spectral_radius":
            assert sd == pytest.approx(spread, rel=0.35), name
    assert table["symmetry_score"].mean() == pytest.approx(1 / d, abs=4 * 1.5 / d / 20)
    assert table["degenerate"].mean() == pytest.approx(random.baseline["degenerate"][0], abs=0.12)
    assert random_heads(d, k) is random_heads(d, k)  # drawn once per shape


def test_table_has_a_row_per_head_with_its_baselines(model_of: Any) -> None:
    table = ov_circuits(model_of("mistral")).to_dataframe()
    assert len(table) == 3 * HEADS
    assert (table["baseline_copying_score"] == 0).all()
    assert (table["baseline_sd"] > 0).all()
    assert (table["baseline_antisymmetric_energy"] == 0.5 - 0.5 / WIDTH).all()
    assert (table["baseline_rank"] == 6).all()
    assert not table.drop(columns="note").isna().any().any()
    assert "vocab_copying_score" not in table


# --------------------------------------------------------------------------------- vocabulary


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2", "pythia", "bloom", "opt", "olmo2"])
@pytest.mark.parametrize("fold", ["none", "norm"])
def test_vocabulary_score_is_that_of_the_full_circuit(name: str, fold: str, model_of: Any) -> None:
    """``W_E W_V W_O W_U`` of 64 × 64 tokens, formed here and only here."""
    model = model_of(name)
    ov = ov_circuits(model, fold=fold, vocabulary=True)
    W_U = model.W_U.detach().double()
    if fold != "none":
        norm = model.ln_final.original_component
        gain = norm.weight.detach().double() + (1 if name == "gemma2" else 0)
        W_U = gain[:, None] * W_U
        if name in ("gpt2", "pythia", "bloom", "opt"):
            W_U = W_U - W_U.mean(0)
    circuit = model.W_E.detach().double() @ ov.W_V[2, 1].double() @ ov.W_O[2, 1].double() @ W_U
    values = torch.linalg.eigvals(circuit)
    expected = (values.real.sum() / values.abs().sum()).item()
    assert ov.vocab_copying_score[2, 1].item() == pytest.approx(expected, abs=1e-5)
    table = ov.to_dataframe()
    assert (table["baseline_vocab_sd"] == ov.vocab_copying_score_sd).all()
    assert 0.02 < ov.vocab_copying_score_sd < 0.6


@pytest.mark.parametrize("name", ENCODERS)
def test_vocabulary_needs_a_linear_head(name: str, model_of: Any) -> None:
    with pytest.raises(UnsupportedModelError, match="no copying score through the vocabulary"):
        ov_circuits(model_of(name), vocabulary=True)


# --------------------------------------------------------------------------------- in and out


def test_factored_matrices_go_in_and_come_out(model_of: Any) -> None:
    model = model_of("llama")
    ov, of_matrix = ov_circuits(model), ov_circuits(model.OV)
    assert torch.equal(of_matrix.eigenvalues, ov.eigenvalues)
    assert (of_matrix.layers, of_matrix.provenance.model) == ((0, 1, 2), "tensors")
    assert torch.equal(ov_circuits(model.OV, layers=[2]).eigenvalues, ov.eigenvalues[2:])
    assert torch.equal(ov_circuits(model.OV[1]).eigenvalues, ov.eigenvalues[1:2])
    assert torch.equal(ov_circuits(model.OV[1, 2]).eigenvalues, ov.eigenvalues[1:2, 2:3])
    assert torch.equal(ov.factored().AB, model.OV.AB)
    assert torch.equal(ov.factored(layer=1).AB, model.OV[1].AB)
    assert torch.equal(ov.factored(layer=1, head=3).AB, model.OV[1, 3].AB)
    assert ov.factored(head=3).shape == (3, WIDTH, WIDTH)
    some = ov_circuits(model, layers=[2, 0])
    assert torch.equal(some.factored(layer=2).AB, model.OV[2].AB)
    wide = FactoredMatrix(gaussian(5, 9), gaussian(9, 5, seed=1))
    close(ov_circuits(wide).eigenvalues[0, 0], torch.linalg.eigvals(wide.AB), 1e-10)
    half = FactoredMatrix(ov.W_V.bfloat16(), ov.W_O.bfloat16())
    assert ov_circuits(half).rank_tolerance == pytest.approx(24 * 2**-23)


def test_round_trip(tmp_path: Any, model_of: Any) -> None:
    for ov in (ov_circuits(model_of("gpt2"), fold="norm", vocabulary=True),
               ov_circuits(model_of("bert"))):  # fmt: skip
        again = OVCircuits.load(ov.save(tmp_path / "ov"))
        assert again.to_dataframe().equals(ov.to_dataframe())
        assert again.modes_dataframe().equals(ov.modes_dataframe())
        assert (again.layers, again.folded) == (ov.layers, ov.folded)
        assert again.provenance == ov.provenance


def test_model_is_read_only_and_forgotten(model_of: Any) -> None:
    """Later writes to the weights do not reach an earlier result."""
    model = tiny("llama")
    ov = ov_circuits(model)
    before = ov.layer_matrix(1).clone()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    assert torch.equal(ov.layer_matrix(1), before)


def test_half_precision_is_measured_in_float32() -> None:
    with pytest.warns(UserWarning, match="half precision"):
        ov = ov_circuits(tiny("llama", dtype=torch.bfloat16), fold="norm")
    assert ov.W_V.dtype == torch.float32


def test_refusals(model_of: Any) -> None:
    model = model_of("gpt2")
    ov = ov_circuits(model, layers=[1])
    for match, call in {
        "Layer 0 is not here": lambda: ov.layer_matrix(0),
        "head 4 does not exist": lambda: ov.factored(head=4),
        "layer 7 does not exist": lambda: ov_circuits(model, layers=[7]),
        "fold must be one of": lambda: ov_circuits(model, fold="gain"),
        "need the model": lambda: ov_circuits(model.OV, fold="norm"),
        "fold and vocabulary": lambda: ov_circuits(model.OV, vocabulary=True),
        "layers must name": lambda: ov_circuits(model.OV, layers=[3]),
        "each once": lambda: ov_circuits(model.OV, layers=[1, 1]),
        r"got \(4, 5\)": lambda: ov_circuits(FactoredMatrix(torch.ones(4, 2), torch.ones(2, 5))),
        "NaN": lambda: ov_circuits(FactoredMatrix(torch.ones(4, 2) * math.nan, torch.ones(2, 4))),
        "real numbers": lambda: ov_circuits(
            FactoredMatrix(torch.ones(4, 2).long(), torch.ones(2, 4).long())
        ),
    }.items():
        with pytest.raises(InputError, match=match):
            call()
    with pytest.raises(InputError, match="fold must be one of"):
        ModelView(model).ov_factors(0, fold="post")
    with pytest.raises(UnsupportedModelError, match="TransformerBridge"):
        ov_circuits(object())


def test_models_without_heads_are_refused() -> None:
    config = tf.MambaConfig(vocab_size=20, hidden_size=16, num_hidden_layers=2, state_size=4)
    model = build_bridge_from_module(
        tf.MambaForCausalLM(config).eval(), architecture="MambaForCausalLM", hf_config=config,
        model_name="tiny-mamba", dtype=torch.float32,
    )  # fmt: skip
    for fold in ("none", "norm+post"):
        with pytest.raises(UnsupportedModelError, match="OV circuits need standard attention"):
            ov_circuits(model, fold=fold)
