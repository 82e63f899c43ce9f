"""Likeness of tokens over depth: closed forms, brute force on cached states, planted collapse."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from oracles import prompts
from torch import Tensor

from tl_spectral.errors import InputError, ModelStateError
from tl_spectral.model import reinitialised
from tl_spectral.oversmoothing import Oversmoothing, oversmoothing
from tl_spectral.token_geometry import MEASURES, effective_rank, token_geometry

TEXTS = [prompts(1, 9)[0], prompts(1, 5)[0] + 1, prompts(1, 9)[0] + 2]


def random_states(n: int, d: int, seed: int = 0) -> Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def geometry(x: Tensor) -> dict[str, float]:
    return dict(zip(MEASURES, token_geometry(x @ x.T).tolist(), strict=True))


def by_hand(x: Tensor) -> dict[str, float]:
    """The definitions, word by word, from the states themselves."""
    n = len(x)
    unit = x / x.norm(dim=1, keepdim=True)
    pairs = [float(unit[i] @ unit[j]) for i in range(n) for j in range(n) if i != j]
    energy = torch.linalg.svdvals(x) ** 2
    p = energy[energy > 0] / energy.sum()
    return {
        "order": float(unit.mean(dim=0).norm()),
        "mean_cosine": sum(pairs) / len(pairs),
        "effective_rank": math.exp(-sum(q * math.log(q) for q in p.tolist())),
        "stable_rank": float(energy.sum() / energy[0]),
        "residual": float((x - x.mean(dim=0)).norm() / x.norm()),
    }


# ---------------------------------------------------------------------- the measures


def test_measures_are_their_definitions() -> None:
    for n, d in ((7, 20), (20, 7), (2, 5)):
        x = random_states(n, d) * torch.arange(1, n + 1)[:, None] + 0.5
        assert geometry(x) == pytest.approx(by_hand(x), rel=1e-9)


def test_measures_at_the_ends() -> None:
    """Orthogonal tokens, one repeated token, tokens on ±one line, and one token that is huge."""
    eye = torch.eye(8, dtype=torch.float64)
    assert geometry(eye) == pytest.approx(
        {
            "order": 8**-0.5,
            "mean_cosine": 0,
            "effective_rank": 8,
            "stable_rank": 8,
            "residual": (7 / 8) ** 0.5,
        }
    )
    same = random_states(1, 8).expand(6, 8)
    alike = geometry(same)
    assert alike.pop("residual") == pytest.approx(0, abs=1e-7)
    assert alike == pytest.approx(
        {"order": 1, "mean_cosine": 1, "effective_rank": 1, "stable_rank": 1}
    )
    sides = geometry(same * torch.tensor([1, -1, 1, -1, 1, -1])[:, None])
    assert (sides["order"], sides["residual"]) == pytest.approx((0, 1), abs=1e-7)
    assert sides["mean_cosine"] == pytest.approx(-1 / 5)
    assert sides["effective_rank"] == pytest.approx(1)
    sink = geometry(eye * torch.tensor([1e6, *[1.0] * 7])[:, None])
    assert sink["effective_rank"] == pytest.approx(1, abs=1e-6)
    assert sink["mean_cosine"] == pytest.approx(0)  # directions do not see the norm


def test_measures_do_not_depend_on_basis_or_scale() -> None:
    x = random_states(6, 10)
    Q, _ = torch.linalg.qr(random_states(10, 10, seed=1))
    assert geometry(3 * x @ Q) == pytest.approx(geometry(x))


def test_effective_rank_of_equal_energies_is_their_number() -> None:
    assert effective_rank(torch.tensor([2.0, 2.0, 2.0, 0.0, -1e-9])).item() == pytest.approx(3)


# ---------------------------------------------------------------------- on models


@pytest.mark.parametrize("name", ["gpt2", "llama", "pythia", "bert", "gemma2"])
def test_every_boundary_is_that_of_cached_states(name: str, model_of: Any) -> None:
    """Kills: a boundary off by one, texts of a batch in the wrong place, first and rest swapped."""
    model = model_of(name)
    found = oversmoothing(model, TEXTS)
    assert found.boundaries == (0, 1, 2, 3)
    assert found.n_tokens == 23
    for index, text in enumerate(TEXTS):
        _, cache = model.run_with_cache(text[None])
        for boundary in found.boundaries:
            hook = "blocks.2.hook_out" if boundary == 3 else f"blocks.{boundary}.hook_in"
            x = cache[hook].detach().reshape(len(text), -1).double()
            for at, states in enumerate((x, x[1:])):
                values = found.values[0, boundary, at, :, index].tolist()
                expected = list(by_hand(states).values())
                assert values == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_a_layer_that_averages_is_seen_to_smooth(model_of: Any) -> None:
    """A hook writes the mean token after block 1: order and cosine 1, ranks 1, residual 0."""
    model = model_of("gpt2")

    def average(state: Tensor, hook: Any) -> Tensor:
        return state.mean(dim=1, keepdim=True).expand_as(state)

    with model.hooks(fwd_hooks=[("blocks.1.hook_out", average)]):
        found = oversmoothing(model, TEXTS)
    collapsed = found.mean[0, 2]
    assert collapsed.tolist() == [
        pytest.approx([1, 1, 1, 1, 0], abs=1e-4),
        pytest.approx([1, 1, 1, 1, 0], abs=1e-4),
    ]
    assert (found.mean[0, 1, :, MEASURES.index("residual")] > 0.3).all()


def test_selection_and_batches_do_not_matter(gpt2: Any) -> None:
    whole = oversmoothing(gpt2, TEXTS)
    part = oversmoothing(gpt2, TEXTS, layers=[1], batch_tokens=1)
    assert part.boundaries == (1, 2)
    torch.testing.assert_close(part.values, whole.values[:, 1:3], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(part.baseline, whole.baseline)
    turned = oversmoothing(gpt2, TEXTS[::-1])
    torch.testing.assert_close(turned.values, whole.values.flip(-1))


def test_baseline_is_that_of_isotropic_tokens(gpt2: Any) -> None:
    found = oversmoothing(gpt2, torch.stack(TEXTS[::2]))
    drawn = torch.stack(
        [token_geometry(x @ x.T) for x in (random_states(9, 24, seed) for seed in range(1, 400))]
    ).mean(dim=0)
    expected = dict(zip(MEASURES, drawn.tolist(), strict=True))
    base = dict(zip(MEASURES, found.baseline[0].tolist(), strict=True))
    assert base["mean_cosine"] == 0
    assert abs(expected.pop("mean_cosine")) < 0.01
    base.pop("mean_cosine")
    assert base == pytest.approx(expected, rel=0.05)
    assert base["order"] == pytest.approx(1 / 3, rel=0.05)
    assert base["residual"] == pytest.approx((8 / 9) ** 0.5, rel=0.02)
    assert found.baseline[1, 0].item() == pytest.approx(8**-0.5, rel=0.05)


def test_interval_is_students_over_texts(gpt2: Any) -> None:
    from scipy import stats

    found = oversmoothing(gpt2, TEXTS)
    cosines = found.values[0, 2, 1, 1].tolist()
    low, high = stats.t.interval(0.95, 2, sum(cosines) / 3, stats.sem(cosines))
    row = found.to_dataframe().query(
        "boundary == 2 and tokens == 'rest' and measure == 'mean_cosine'"
    )
    assert (row["low"].item(), row["high"].item()) == pytest.approx((low, high))
    single = oversmoothing(gpt2, TEXTS[0])
    assert single.half_width is None
    assert single.to_dataframe()["low"].isna().all()


def test_result(gpt2: Any, tmp_path: Any) -> None:
    twin = reinitialised(gpt2)
    found = oversmoothing(gpt2, TEXTS, control=twin)
    assert found.variants == ("trained", "control")
    torch.testing.assert_close(found.values[1:], oversmoothing(twin, TEXTS).values)
    assert not torch.allclose(found.values[0], found.values[1])
    again = Oversmoothing.load(found.save(tmp_path / "o"))
    assert again.to_dataframe().equals(found.to_dataframe())
    assert again.provenance == found.provenance
    table = found.to_dataframe()
    assert len(table) == 2 * 4 * 2 * len(MEASURES)
    names = {trace.name for trace in found.plot().data}
    assert {"trained, all tokens", "control, without the first", "isotropic tokens"} <= names


def test_refusals(gpt2: Any, model_of: Any) -> None:
    for match, arguments in {
        "There is no text": {"texts": []},
        "Text 1 has 2 tokens": {"texts": [TEXTS[0], TEXTS[0][:2]]},
        "layer 9 does not exist": {"texts": TEXTS, "layers": [9]},
        "batch_tokens": {"texts": TEXTS, "batch_tokens": 0},
    }.items():
        with pytest.raises(InputError, match=match):
            oversmoothing(gpt2, **arguments)

    def erase(state: Tensor, hook: Any) -> Tensor:
        return state * 0

    with (
        gpt2.hooks(fwd_hooks=[("blocks.0.hook_out", erase)]),
        pytest.raises(ModelStateError, match=r"boundary 1 .* zero or not finite"),
    ):
        oversmoothing(gpt2, TEXTS)
