"""A model of shared weights, trained here: theory foretells where its F leads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tl_spectral as tls
from tl_spectral.consensus import simulate_power
from tl_spectral.errors import InputError
from tl_spectral.oversmoothing import oversmoothing
from tl_spectral.power import power_alignment
from tl_spectral.testing import SharedWeightsToy, train_shared_weights
from tl_spectral.texts import builtin_corpus

PROSE = ["The quick brown fox jumps over the lazy dog, again and again (as foxes do)."] * 3
SMALL: dict[str, Any] = {"hidden": 16, "heads": 2, "embedding": 8, "length": 8, "batch": 4}


def value_output(model: Any) -> Tensor:
    """F from Hugging Face's weights: ``nn.Linear`` is ``[out, in]``, so F acts on columns."""
    attention = model.albert.encoder.albert_layer_groups[0].albert_layers[0].attention
    return attention.dense.weight.detach().double() @ attention.value.weight.detach().double()


def test_same_seed_same_weights_and_nothing_else_moves() -> None:
    """Kills: an unseeded draw, a global seed that leaks, a depth that is not put back."""
    before, threads = torch.random.get_rng_state(), torch.get_num_threads()
    one, two, other = (
        train_shared_weights(steps=12, layers=3, seed=seed, texts=PROSE, **SMALL)
        for seed in (0, 0, 1)
    )
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.get_num_threads() == threads
    for first, second in zip(one.model.parameters(), two.model.parameters(), strict=True):
        assert torch.equal(first, second)
    assert torch.equal(one.losses, two.losses)
    assert not torch.equal(one.losses, other.losses)
    assert one.model.config.num_hidden_layers == 3
    assert not one.model.training
    assert not torch.equal(value_output(one.model), value_output(one.untrained))
    assert one.losses[0].item() == pytest.approx(one.unigram_entropy, abs=0.4)


def test_depth_grows_to_all_layers() -> None:
    from tl_spectral.testing.shared_weights import _depth

    assert [_depth(t, 6) for t in (0.0, 0.59, 0.6, 0.69, 0.71, 0.79, 0.8, 0.99)] == [
        1, 1, 2, 2, 4, 4, 6, 6,
    ]  # fmt: skip
    assert {_depth(t, 1) for t in (0.0, 0.7, 0.9)} == {1}
    assert [_depth(t, 2) for t in (0.7, 0.8)] == [1, 2]


def test_encode() -> None:
    ids = SharedWeightsToy.encode("Ab a~")
    assert ids.tolist() == [1, 4, 5, 30, 4, 3]


def test_refusals() -> None:
    with pytest.raises(InputError, match="at least 1"):
        train_shared_weights(steps=0)
    with pytest.raises(InputError, match="one sequence takes 24"):
        train_shared_weights(texts=["short"])


def test_the_package_does_not_import_it() -> None:
    package = Path(tls.__file__).parent
    outside = (f for f in package.rglob("*.py") if f.parent.name != "testing")
    assert not [f for f in outside if "tl_spectral.testing" in f.read_text(encoding="utf-8")]


# ---------------------------------------------------------------------- trained

trained = pytest.mark.xdist_group("trained toy")  # trained once, on one worker


@pytest.fixture(scope="module")
def toy() -> SharedWeightsToy:
    return train_shared_weights()


@pytest.fixture(scope="module")
def texts() -> list[Tensor]:
    """Texts of the training length, from prose that the other seeds' order puts last."""
    return [SharedWeightsToy.encode(text[:23]) for text in builtin_corpus()[-48:]]


@trained
@pytest.mark.slow
def test_it_learned_context(toy: SharedWeightsToy) -> None:
    """Well below the entropy of frequencies, where a model without attention must stay."""
    assert toy.unigram_entropy == pytest.approx(2.97, abs=0.1)
    assert toy.losses[:50].mean() > toy.unigram_entropy - 0.15
    assert toy.losses[-100:].mean() < toy.unigram_entropy - 0.5


@trained
@pytest.mark.slow
@pytest.mark.parametrize("attention", ["identity", "uniform"])
@pytest.mark.parametrize("skip", [True, False])
def test_its_limit_is_foretold_by_its_spectrum(
    toy: SharedWeightsToy, attention: str, skip: bool
) -> None:
    for model in (toy.model, toy.untrained):
        F = value_output(model)
        values = torch.linalg.eigvals(F) + float(skip)
        order = values.abs().argsort(descending=True)
        first = values[order[0]]
        r = simulate_power(matrices=F, attention=attention, skip=skip, steps=1024)
        assert r.agrees, r.note
        assert r.kind == r.predicted_kind
        if first.imag.abs() > 1e-6:
            assert r.kind == "limit cycle"
            assert r.angle == pytest.approx(first.angle().abs().item(), abs=1e-3)
        else:
            assert r.kind == ("consensus" if attention == "uniform" else "bipartite")
        other = values[order[1:]]
        second = other[(other - first.conj()).abs() > 1e-9][0].abs()
        if attention == "identity":
            rate = (second / first.abs()).item()
            assert r.predicted_rate == pytest.approx(rate)
            assert r.observed_rate == pytest.approx(rate, abs=0.005)


@trained
@pytest.mark.slow
def test_bare_dynamics_converge_and_the_trained_model_does_not(
    toy: SharedWeightsToy, texts: list[Tensor]
) -> None:
    """With attention and the L2 norm alone, tokens of a text end in v1's plane as foretold.

    The whole model, with FFN, LayerNorm and six layers, is another matter. Untrained twins do tilt
    to v1 (γ 0.3 to 0.5, chance 0.16) while their tokens become one (cosine 0.95). The trained model
    keeps tokens apart and its γ at chance: what the theory describes is what training undoes.
    """
    model = tls.boot_albert(toy.model)
    bare = simulate_power(model, texts[0], layers=[0], attention="real", steps=1024)
    assert bare.agrees, bare.note
    assert bare.kind == bare.predicted_kind != "none"
    assert bare.gamma[-1].item() == pytest.approx(1, abs=1e-6)
    assert bare.gamma[-1] > bare.gamma[:7].max() > bare.gamma[0]

    trained = power_alignment(model, texts)
    chance = trained.gamma_chance[0].item()
    assert chance - 0.03 < trained.gamma_after[-1] < chance + 0.08
    likeness = oversmoothing(model, texts).mean[0, :, 1, 1]
    assert (likeness.diff() > 0).all()
    assert likeness[-1] < 0.6
    for twin in (tls.boot_albert(toy.untrained), tls.reinitialised(model, seed=1)):
        control = power_alignment(twin, texts, random_maps=0)
        assert control.gamma_after[-1] > control.gamma_before[0] + 0.15
        assert control.gamma_after[-1] > trained.gamma_after[-1] + 0.1
        assert oversmoothing(twin, texts).mean[0, -1, 1, 1] > 0.85


@trained
@pytest.mark.slow
def test_random_tokens_do_what_the_weights_foretell(
    toy: SharedWeightsToy, texts: list[Tensor]
) -> None:
    model = tls.boot_albert(toy.model)
    assert torch.allclose(tls.ov_circuits(model).layer_matrix(0), value_output(toy.model))
    for skip in (True, False):
        p = power_alignment(model, texts, skip=skip, random_tokens=8192, random_maps=0)
        torch.testing.assert_close(p.random_rho, p.predicted_rho, atol=0.04, rtol=0)
        assert (p.random_rho > p.rho).all()  # text tokens do not follow
        assert p.criterion.all()
