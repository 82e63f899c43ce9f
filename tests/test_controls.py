"""Null models: what each keeps and breaks, closed forms against draws, honest p-values."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from oracles import accuracy, block_differences, prompts, relative
from torch import Tensor
from zoo import ARCHITECTURES, tiny

import tl_spectral as tls
from tl_spectral import controls
from tl_spectral.chain import chain
from tl_spectral.communities import communities, modularity
from tl_spectral.controls import NULLS, NullComparison, compare_with_null, null_of, null_table
from tl_spectral.errors import InputError
from tl_spectral.graph import UnitGraph, unit_graph
from tl_spectral.metrics import METRICS
from tl_spectral.model import ModelView, weight_shuffled
from tl_spectral.spectrum import spectrum
from tl_spectral.statistics import permutation_p, rank_basis, rank_residuals, shift_null
from tl_spectral.testing import planted_activations

ModelOf = Callable[..., Any]


def gaussian(d: int = 24, seed: int = 0) -> Tensor:
    return torch.randn(d, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def skewed(d: int = 24) -> Tensor:
    """Neither normal, nor of equal singular values, nor near the identity."""
    return gaussian(d) @ torch.diag(torch.linspace(0.1, 2, d, dtype=torch.float64)) + gaussian(d).T


@pytest.fixture(scope="module")
def graph() -> UnitGraph:
    states = planted_activations(300, communities=4, bridges=4, units_per_community=10).states
    return unit_graph(states, top_k=5)


# ------------------------------------------------------------------------------------------ all


def example(null: controls.Null, graph: UnitGraph) -> Any:
    return {
        "matrix": skewed(8),
        "graph": graph,
        "units": torch.arange(30.0),
        "layers": torch.arange(12.0),
        "activations": planted_activations(40).states,
    }.get(null.acts_on)


@pytest.mark.parametrize("name", [n for n, null in NULLS.items() if null.acts_on != "model"])
def test_the_same_seed_gives_the_same_draw_and_the_original_stays(
    name: str, graph: UnitGraph
) -> None:
    null = null_of(name)
    x = example(null, graph)

    def content(y: Any) -> Tensor:
        return torch.stack([y.row, y.col, y.weight]) if isinstance(y, UnitGraph) else y

    before = content(x).clone()
    first, again, other = (content(null.draw(x, seed)) for seed in (1, 1, 2))
    assert torch.equal(content(x), before)
    assert torch.equal(first, again)
    assert torch.equal(first, other) != null.random
    assert not torch.equal(first, before)


def test_the_table_says_what_each_null_is_for() -> None:
    table = null_table()
    assert tuple(table["name"]) == tuple(NULLS)
    kinds = {"matrix", "model", "graph", "units", "layers", "activations"}
    assert set(table["acts_on"]) == kinds
    assert (table[["keeps", "breaks"]].map(len) > 10).all(axis=None)
    assert null_of("surgery", kind="shuffled").keeps != null_of("surgery").keeps


def test_refusals(graph: UnitGraph) -> None:
    with pytest.raises(InputError, match="no null model 'usual'"):
        null_of("usual")
    with pytest.raises(InputError, match="'gaussian' has no option 'kind'; it has no options"):
        null_of("gaussian", kind="x")
    with pytest.raises(InputError, match="options are embeddings, norms"):
        null_of("weight_shuffled", kind="x")
    with pytest.raises(InputError, match="kind must be one of"):
        null_of("surgery", kind="usual")
    with pytest.raises(InputError, match="acts on a UnitGraph"):
        null_of("rewired").draw(gaussian(), 0)
    with pytest.raises(InputError, match="nothing to shuffle"):
        null_of("rewired").draw(unit_graph(torch.randn(9, 4), threshold=2.0), 0)
    with pytest.raises(InputError, match="two values or more"):
        null_of("circular_shift").draw([1.0], 0)
    with pytest.raises(InputError, match="two values or more"):
        null_of("label_permutation").draw(graph, 0)
    with pytest.raises(InputError, match=r"\[sample, unit\]"):
        null_of("sample_shuffled").draw(torch.zeros(3), 0)
    with pytest.raises(InputError, match="2 samples have no order"):
        null_of("phase_randomised").draw(torch.zeros(2, 3), 0)


# ------------------------------------------------------------------------------------- matrices


def test_what_matrix_nulls_keep() -> None:
    M = skewed()
    G, U, S, N = (null_of(n).draw(M, 3) for n in ("gaussian", "random_bases", "skip", "surgery"))
    assert float(G.norm()) == pytest.approx(float(M.norm()))
    torch.testing.assert_close(torch.linalg.svdvals(U), torch.linalg.svdvals(M))
    eye = torch.eye(len(M), dtype=torch.float64)
    assert float((S - eye).norm()) == pytest.approx(float((M - eye).norm()))
    torch.testing.assert_close(N, tls.schur_surgery(M))
    assert abs(spectrum(U).henrici - spectrum(M).henrici) > 0.05


def test_random_bases_are_two() -> None:
    """With one basis on both sides the draw of a diagonal matrix would be symmetric."""
    D = torch.diag(torch.arange(1.0, 9.0, dtype=torch.float64))
    drawn = null_of("random_bases").draw(D, 0)
    assert spectrum(drawn, k=2).antisymmetric_energy > 0.2


def test_a_chain_is_drawn_factor_by_factor() -> None:
    blocks = [torch.eye(16) + 0.3 * gaussian(16, seed) for seed in range(3)]
    drawn = null_of("skip").draw(blocks, 0)
    assert len(drawn) == 3
    sizes = [float((a - torch.eye(16)).norm() / (b - torch.eye(16)).norm())
             for a, b in zip(drawn, blocks, strict=True)]  # fmt: skip
    assert sizes == pytest.approx([1, 1, 1])
    first, second = ((M - torch.eye(16)) / (M - torch.eye(16)).norm() for M in drawn[:2])
    assert not torch.allclose(first, second)  # each factor its own numbers
    result = compare_with_null(
        lambda factors: chain(factors).effective_rank[-1], blocks, "skip", draws=19, name="rank"
    )
    assert result.value == pytest.approx(float(chain(blocks).effective_rank[-1]))
    assert abs(result.z) < 4


_HEAVY_TAILED = ("condition_number", "eigenvector_condition")  # tested in test_baselines


@pytest.mark.parametrize("name", ["gaussian", "random_bases", "skip"])
def test_closed_forms_are_what_draws_give(name: str) -> None:
    """Limits of large d come within a few percent at d = 60; exact ones within four errors."""
    M = skewed(60)
    exact = name == "random_bases"
    known = 0
    drawn = [spectrum(null_of(name).draw(M, seed), k=6) for seed in range(30)]
    for metric in METRICS:
        closed = null_of(name).expected(M, metric, 6)
        if closed is None or metric in ("trace", "norm_ratio", *_HEAVY_TAILED):
            continue
        values = np.array([getattr(s, metric) for s in drawn], dtype=np.float64)
        error = 4 * values.std(ddof=1) / math.sqrt(len(values)) + 1e-9 * abs(closed)
        slack = 0 if exact else 0.08 * abs(closed)
        assert values.mean() == pytest.approx(closed, abs=error + slack), metric
        known += 1
    assert known >= (8 if exact else 12)


def test_closed_form_without_a_draw() -> None:
    result = compare_with_null("antisymmetric_energy", skewed(), "random_bases", draws=0)
    assert result.null_mean == result.closed_form == 0.5 - 0.5 / 24
    assert math.isnan(result.p)
    assert "nothing drawn" in result.note
    assert result.sentence.startswith("antisymmetric energy")
    with pytest.raises(InputError, match="No closed form of henrici"):
        compare_with_null("henrici", skewed(), "random_bases", draws=0)


# --------------------------------------------------------------------------------------- models


@pytest.mark.parametrize("name", list(ARCHITECTURES))
def test_weight_shuffled(name: str, model_of: ModelOf) -> None:
    model = model_of(name)
    before = {key: p.detach().clone() for key, p in model.named_parameters()}
    first, again, other = (weight_shuffled(model, seed) for seed in (1, 1, 2))
    everything = weight_shuffled(model, 1, embeddings=True, norms=True)
    blocks = {id(p) for p in model.blocks.parameters()}
    moved = 0
    for (key, p), a, b, c, e in zip(
        model.named_parameters(),
        *(m.parameters() for m in (first, again, other, everything)),
        strict=True,
    ):
        assert torch.equal(p, before[key])
        assert torch.equal(a, b)
        assert torch.equal(p.flatten().sort().values, e.flatten().sort().values)
        norm = p.ndim == 1 and ("norm" in key.lower() or ".ln" in key)
        kept = id(p) not in blocks or norm
        assert torch.equal(p, a) == kept, key
        assert torch.equal(a, c) == kept, key
        assert not torch.equal(p, e), key
        moved += not kept
    assert moved
    assert len({p.data_ptr() for p in first.parameters()}) == len(before)
    assert ModelView(first).name == f"tiny-{name} with shuffled weights (seed 1)"
    assert ModelView(model).name == f"tiny-{name}"


@pytest.mark.parametrize("name", ["gpt2", "llama", "phi3", "albert"])
def test_shuffled_models_run_on_their_shuffled_weights(name: str) -> None:
    """Fused and split copies of a weight: what runs is what the Jacobian is of."""
    kind = accuracy(name)
    model = weight_shuffled(tiny(name, dtype=kind.dtype), 3)
    tokens = prompts(1, 6)
    expected, _ = block_differences(model, tokens, 1, kind.eps, pos=5, architecture=name)
    J = tls.block_jacobian(model, tokens, 1).matrix
    assert relative(J - expected, expected) < 10 * kind.tolerance
    original = tls.block_jacobian(tiny(name, dtype=kind.dtype), tokens, 1).matrix
    assert relative(J - original, original) > 0.05


def test_shuffled_weights_of_albert_stay_shared(model_of: ModelOf) -> None:
    shuffled = weight_shuffled(model_of("albert"), 0)
    first, last = shuffled.blocks[0].attn.W_O, shuffled.blocks[-1].attn.W_O
    assert torch.equal(first, last)
    assert first.data_ptr() == last.data_ptr()


def test_tied_embeddings_stay_tied(gpt2: Any) -> None:
    shuffled = weight_shuffled(gpt2, 0, embeddings=True)
    assert torch.equal(shuffled.W_E, shuffled.W_U.T)
    assert not torch.equal(shuffled.W_E, gpt2.W_E)


def test_a_model_that_ran_with_gradients_is_shuffled_too() -> None:
    """Some bridges keep the attention pattern of the last run, history of derivatives and all."""
    model = tiny("gpt2")
    model(prompts(1, 4))
    weight_shuffled(model, 0)


def test_a_shuffle_leaves_global_random_state_and_basis() -> None:
    model = tiny("gpt2")
    model.enable_compatibility_mode()
    state = torch.get_rng_state()
    shuffled = weight_shuffled(model, 0)
    assert torch.equal(torch.get_rng_state(), state)
    assert ModelView(shuffled).weights == "compat"


def test_models_against_their_nulls(gpt2: Any) -> None:
    def size(model: Any) -> float:
        J = tls.block_jacobian(model, prompts(1, 4), 1)
        return float(J.update.norm())

    fresh = compare_with_null(size, gpt2, "reinitialised", draws=3)
    assert fresh.acts_on == "model"
    assert fresh.value > 3 * fresh.interval[1]  # the zoo's weights are far from their scheme
    assert fresh.p == pytest.approx(1 / 4)
    assert "covers 50%" in fresh.note
    shuffled = compare_with_null(size, gpt2, null_of("weight_shuffled", norms=True), draws=3)
    assert 0.3 < shuffled.null_mean / shuffled.value < 3
    assert shuffled.provenance.options["control"] == {
        "null": "weight_shuffled", "embeddings": False, "norms": True,
    }  # fmt: skip


# --------------------------------------------------------------------------------------- graphs


def test_rewired_keeps_degrees_and_breaks_communities(graph: UnitGraph) -> None:
    null = null_of("rewired").draw(graph, 0)
    assert torch.equal(null.degree, graph.degree)
    torch.testing.assert_close(null.weight.sort().values, graph.weight.sort().values)
    strength = torch.from_numpy(np.abs(null.adjacency()).sum(axis=1))
    torch.testing.assert_close(null.strength, strength)
    assert bool((null.row < null.col).all())
    result = compare_with_null(_quality, graph, "rewired", draws=19)
    assert result.p == pytest.approx(1 / 20)
    assert result.z > 5


def _quality(g: UnitGraph) -> float:
    labels = communities(g, runs=1, nulls=0).run_labels.numpy()
    return float(modularity(g.adjacency(), labels)[0])


def test_shuffled_weights_keep_the_edges(graph: UnitGraph) -> None:
    null = null_of("shuffled_weights").draw(graph, 0)
    assert torch.equal(null.row, graph.row)
    assert torch.equal(null.col, graph.col)
    assert not torch.equal(null.weight, graph.weight)
    torch.testing.assert_close(null.weight.sort().values, graph.weight.sort().values)
    torch.testing.assert_close(
        null.strength, torch.from_numpy(np.abs(null.adjacency()).sum(axis=1))
    )


# ----------------------------------------------------------------------------------------- order


def test_label_permutation_of_communities(graph: UnitGraph) -> None:
    com = communities(graph, runs=3, nulls=0)
    labels = com.labels.clone()
    labels[:2] = -1
    com = dataclasses.replace(com, labels=labels)
    null = null_of("label_permutation").draw(com, 0)
    assert torch.equal(null.labels[:2], labels[:2])
    assert torch.equal(null.sizes, com.sizes)
    pairs = {tuple(column) for column in torch.vstack([com.labels, com.run_labels]).T.tolist()}
    moved = {tuple(column) for column in torch.vstack([null.labels, null.run_labels]).T.tolist()}
    assert pairs == moved  # all runs alike
    assert not torch.equal(null.labels, com.labels)


def test_circular_shifts_are_enumerated_and_agree_with_the_trend() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(2, 24)).cumsum(axis=1)
    first, second = rank_residuals(np.stack([x, y]), rank_basis(np.empty((0, 24))))
    result = compare_with_null(
        lambda profile: float(first @ profile), second, "circular_shift", draws=23
    )
    assert result.n_draws == 23
    np.testing.assert_allclose(result.values.numpy(), shift_null(first, second))
    assert result.p == permutation_p(result.value, shift_null(first, second))
    many = compare_with_null(lambda y: float(first @ y), second, "circular_shift", draws=500)
    assert many.n_draws == 23
    layers = torch.arange(5)
    assert null_of("circular_shift").draw(layers, 0).tolist() == [4, 0, 1, 2, 3]
    assert null_of("circular_shift").draw([1.0, 2.0, 3.0], 1).tolist() == [2.0, 3.0, 1.0]


# ----------------------------------------------------------------------------------- activations


def test_shuffled_samples_have_no_structure() -> None:
    states = planted_activations(400, communities=4, bridges=0).states
    null = null_of("sample_shuffled").draw(states, 0)
    assert torch.equal(null.sort(dim=0).values, states.sort(dim=0).values)
    off = ~torch.eye(states.shape[1], dtype=torch.bool)
    deviation = float(torch.corrcoef(null.T)[off].std())
    assert deviation == pytest.approx(1 / math.sqrt(399), rel=0.1)
    assert float(torch.corrcoef(states.T)[off].std()) > 0.2


@pytest.mark.parametrize("n", [64, 65])
def test_random_phases_keep_the_power_of_each_unit(n: int) -> None:
    rng = np.random.default_rng(1)
    common = rng.normal(size=(n + 20, 1)).cumsum(axis=0)[20:]
    states = torch.from_numpy(common + 0.1 * rng.normal(size=(n, 3)) + 5)
    null = null_of("phase_randomised").draw(states, 0)
    power, drawn = (torch.fft.rfft(x, dim=0).abs() for x in (states, null))
    torch.testing.assert_close(power, drawn)
    torch.testing.assert_close(null.mean(0), states.mean(0))
    correlations = [
        float(torch.corrcoef(null_of("phase_randomised").draw(states, s).T)[0, 1])
        for s in range(200)
    ]
    assert abs(np.mean(correlations)) < 0.15
    assert float(torch.corrcoef(states.T)[0, 1]) > 0.9


def test_states_of_a_model_are_drawn_layer_by_layer(gpt2: Any) -> None:
    states = tls.capture(gpt2, prompts(12, 5))
    for name in ("sample_shuffled", "phase_randomised"):
        null = null_of(name).draw(states, 0)
        for site in ("resid_pre", "resid_mid", "resid_post"):
            old, new = getattr(states, site), getattr(null, site)
            assert new.shape == old.shape
            assert new.dtype == old.dtype
            assert not torch.equal(new, old)
            torch.testing.assert_close(new.mean(1), old.mean(1), atol=1e-5, rtol=1e-4)
        assert not torch.equal(null.resid_pre[1], null.resid_post[0])
    bare = dataclasses.replace(states, resid_mid=None)
    assert null_of("sample_shuffled").draw(bare, 0).resid_mid is None


# ------------------------------------------------------------------------------------ comparison


def test_p_is_uniform_where_the_null_is_true() -> None:
    """200 objects that come from their null: skewed metric, and the range covers 95 %."""
    rng = np.random.default_rng(2)
    found, covered, trials = 0, 0, 200
    for seed in range(trials):
        values = rng.exponential(size=40)
        result = compare_with_null(
            lambda order: float(np.exp(order[:20].sum() - order[20:].sum()) ** 0.1),
            values, "label_permutation", draws=39, seed=seed,
        )  # fmt: skip
        found += result.p <= 0.05
        covered += result.interval[0] <= result.value <= result.interval[1]
    assert 0.01 <= found / trials <= 0.085
    assert 0.915 <= covered / trials <= 0.985


def test_the_figures_of_a_comparison() -> None:
    values = iter([2.0, 1.0, 4.0, 7.0])
    result = compare_with_null(lambda _: next(values), torch.arange(9.0), "label_permutation",
                               draws=3, name="steps", seed=5)  # fmt: skip
    assert result.value == 2
    assert result.null_mean == 4
    assert result.null_std == 3
    assert result.z == pytest.approx(-2 / 3)
    assert result.p == 0.75  # centre 3.5: 1 and 7 lie further out, 4 does not
    assert result.interval == (1, 7)
    assert result.excess == -2
    assert result.excess_interval == (-5, 1)
    assert result.smallest_p == 0.25
    assert result.provenance.seed == 5
    assert "z = -0.7, p = 0.75 from 3 draws" in result.sentence
    row = result.to_dataframe().iloc[0]
    assert (row["metric"], row["null"], row["p"], row["n_draws"]) == (
        "steps", "label_permutation", 0.75, 3,
    )  # fmt: skip


def test_what_has_no_spread_says_so() -> None:
    M = skewed()
    normal = compare_with_null("henrici", M, "surgery")
    assert normal.n_draws == 1
    assert math.isnan(normal.p)
    assert "one value" in normal.note
    assert normal.interval[0] < 1e-12
    same = compare_with_null("effective_rank", M, "random_bases", draws=40)
    assert math.isnan(same.z)
    assert same.p == 1
    assert "all draws give the same number" in same.note
    one = compare_with_null("henrici", M, "gaussian", draws=1)
    assert "one draw" in one.note


def test_draws_without_a_number_are_counted() -> None:
    values = iter([1.0, math.nan, 0.5, None, 1.5])
    result = compare_with_null(lambda _: next(values), torch.arange(9.0), "label_permutation",
                               draws=4)  # fmt: skip
    assert result.n_draws == 2
    assert "2 draws gave no number" in result.note
    with pytest.raises(InputError, match="nothing to compare"):
        compare_with_null(lambda _: math.nan, torch.arange(9.0), "label_permutation")
    values = iter([1.0, math.nan])
    lost = compare_with_null(lambda _: next(values), torch.arange(9.0), "label_permutation",
                             draws=1)  # fmt: skip
    assert math.isnan(lost.null_mean)
    assert "no draw gave a number" in lost.note


def test_comparisons_that_cannot_be_made() -> None:
    with pytest.raises(InputError, match="no metric 'size'"):
        compare_with_null("size", skewed(), "gaussian")
    with pytest.raises(InputError, match="draws must be"):
        compare_with_null("henrici", skewed(), "gaussian", draws=-1)


def test_round_trip_and_figure(tmp_path: Path) -> None:
    result = compare_with_null("henrici", skewed(), "gaussian", draws=9)
    again = NullComparison.load(result.save(tmp_path / "null"))
    assert again.sentence == result.sentence
    assert torch.equal(again.values, result.values)
    fig = result.plot()
    assert {t.name for t in fig.data} == {"null: gaussian", "value", "null in closed form"}
    assert sum(fig.data[0].y) == 9
    assert len(compare_with_null("henrici", skewed(), "gaussian", draws=0).plot().data) == 2
