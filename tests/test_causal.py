"""The causal check: against Jacobians, with planted truth, on encoders too, and no trace left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import linear_sum_assignment
from zoo import WIDTH, tiny

import tl_spectral as tls
from tl_spectral.causal import BridgeIntervention, bridge_intervention
from tl_spectral.errors import InputError, ProvenanceError
from tl_spectral.matching import balance, matched, standardised
from tl_spectral.model import ModelView
from tl_spectral.model.interventions import ScaledInput

TEXTS = torch.randint(3, 60, (12, 9), generator=torch.Generator().manual_seed(0))
UNITS = (2, 7, 11)
QUICK: dict[str, Any] = {"controls": 3, "permutations": 19}


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2", "pythia", "bert", "albert"])
@pytest.mark.parametrize("layer", [0, 2])
def test_a_small_push_does_what_the_jacobian_says(name: str, layer: int) -> None:
    """A unit nudged either way at the block's input moves its output along J's column."""
    model = tiny(name, dtype=torch.float64)
    view = ModelView(model)
    run = ScaledInput(view, TEXTS[:2], layer, 6)
    nudge, centre = 1e-2, torch.full((WIDTH,), -1.0)
    factors = torch.ones(WIDTH, dtype=torch.float64)
    factors[5] = 1 + nudge
    outputs, log_probs = run.scaled(factors, centre)
    factors[5] = 1 - nudge
    other, _ = run.scaled(factors, centre)
    for i in range(2):
        J = tls.block_jacobian(model, TEXTS[i], layer, pos=6, engine="reference").matrix.double()
        moved = (outputs[i] - other[i]) / 2
        expected = J[:, 5] * nudge * (run.states[i, 5] + 1)
        torch.testing.assert_close(moved, expected, rtol=1e-2, atol=1e-3 * moved.norm().item())
    assert not torch.equal(log_probs, run.log_probs)
    torch.testing.assert_close(log_probs.exp().sum(1), torch.ones(2, dtype=torch.float64))
    same = run.scaled(torch.ones(WIDTH), torch.ones(WIDTH))
    assert torch.equal(same[0], run.outputs)
    assert torch.equal(same[1], run.log_probs)


def test_replayed_and_whole_runs_agree(gpt2: Any) -> None:
    view = ModelView(gpt2)
    run = ScaledInput(view, TEXTS[:3], 2, 4)
    assert run._replays
    factors = torch.linspace(0, 2, WIDTH)
    centre = torch.ones(WIDTH)
    replayed = run.scaled(factors, centre)
    run._replays = False
    whole = run.scaled(factors, centre)
    assert torch.equal(replayed[0], whole[0])
    assert torch.equal(replayed[1], whole[1])
    states = tls.capture(gpt2, TEXTS[:3], 4, layers=[2])
    torch.testing.assert_close(run.states.float(), states.resid_pre[0])
    torch.testing.assert_close(run.outputs.float(), states.resid_post[0])


def loud(units: tuple[int, ...], times: float) -> Any:
    """A model whose MLP of layer 1 listens to some units more, which no covariate shows."""
    model = tiny("gpt2")
    with torch.no_grad():
        weight = model.original_model.transformer.h[1].mlp.c_fc.weight
        weight[list(units)] *= times
    return model


def test_planted_drivers_are_found_and_quiet_units_too() -> None:
    for times, sign in ((8.0, 1), (0.0, -1)):
        units = (2, 7, 11, 14, 19, 20)
        result = bridge_intervention(loud(units, times), TEXTS, 1, units, **QUICK)
        row = result.rows[1]
        assert row["measure"] == "gain"
        assert np.sign(row["difference"]) == sign
        if sign > 0:
            assert row["text_low"] > 0
            assert row["draw_low"] > 0
            assert row["p"] == pytest.approx(0.05)
            assert row["ratio"] > 1.5
        mean = result.effects.mean(dim=2)
        assert row["bridge"] == pytest.approx(mean[1, 0].item())
        assert row["control"] == pytest.approx(mean[1, 1:].mean().item())
        paired = result.effects[1, 0] - result.effects[1, 1:].mean(dim=0)
        assert row["difference"] == pytest.approx(paired.mean().item())


def test_effects_are_those_of_a_hook_by_hand(gpt2: Any) -> None:
    texts = [TEXTS[0], TEXTS[1, :6], TEXTS[2], TEXTS[3, :6]]  # two lengths, mixed
    result = bridge_intervention(gpt2, texts, 1, UNITS, factor=0.0, around="zero", **QUICK)
    for i, text in enumerate(texts):
        with torch.no_grad():
            before, cache = gpt2.run_with_cache(text[None])

            def mute(state: torch.Tensor, hook: Any) -> torch.Tensor:
                state = state.clone()
                state[:, -1, list(UNITS)] = 0
                return state

            seen: list[torch.Tensor] = []

            def keep(state: torch.Tensor, hook: Any, seen: list[torch.Tensor] = seen) -> None:
                seen.append(state)

            hooks = [("blocks.1.hook_in", mute), ("blocks.1.hook_out", keep)]
            after = gpt2.run_with_hooks(text[None], fwd_hooks=hooks)
        was = cache["blocks.1.hook_out"][0, -1]
        change = (seen[0][0, -1] - was).norm()
        push = cache["blocks.1.hook_in"][0, -1, list(UNITS)].norm()
        p, q = before[0, -1].log_softmax(-1).double(), after[0, -1].log_softmax(-1).double()
        expected = [change / was.norm(), change / push, (p.exp() * (p - q)).sum()]
        assert result.effects[:, 0, i].tolist() == pytest.approx([*map(float, expected)], rel=1e-3)


def test_nothing_permanent(gpt2: Any) -> None:
    before = gpt2(TEXTS[:2])
    weights = {name: p.clone() for name, p in gpt2.named_parameters()}
    bridge_intervention(gpt2, TEXTS, 1, UNITS, **QUICK)
    assert torch.equal(gpt2(TEXTS[:2]), before)
    assert all(torch.equal(p, weights[name]) for name, p in gpt2.named_parameters())
    assert all("forward" not in vars(block) for block in gpt2.blocks)


def test_bridges_of_a_graph_are_matched_on_all_three(gpt2: Any, tmp_path: Path) -> None:
    states = tls.capture(gpt2, TEXTS)
    with pytest.warns(tls.TLSpectralWarning, match="rank-deficient"):
        graph = tls.unit_graph(states, 1, top_k=4)
    bridges = tls.bridge_units(graph, tls.communities(graph, runs=2, nulls=0), quantile=0.8)
    result = bridge_intervention(gpt2, TEXTS, 1, bridges, states=states, **QUICK)
    names = [row["covariate"] for row in result.balance_rows]
    assert names == ["activation_std", "norm_gain", "strength"]
    assert set(result.bridges.tolist()) == set(bridges.is_bridge.nonzero().flatten().tolist())
    for draw in result.partners:
        assert len(set(draw.tolist())) == len(result.bridges)
        assert not set(draw.tolist()) & set(result.bridges.tolist())
    assert not any("strength is not" in note for note in result.notes)
    again = bridge_intervention(gpt2, TEXTS, 1, bridges, states=states, **QUICK)
    assert again.rows == result.rows
    loaded = BridgeIntervention.load(result.save(tmp_path / "effect"))
    assert loaded.rows == result.rows
    fig = loaded.plot()
    shown = [trace.y[0] for trace in fig.data if str(trace.name).startswith("bridge units")]
    assert shown == pytest.approx([row["bridge"] for row in result.rows], rel=1e-5)
    with pytest.raises(ProvenanceError, match="layer 1, not of 2"):
        bridge_intervention(gpt2, TEXTS, 2, bridges)
    with pytest.raises(ProvenanceError, match="different models"):
        bridge_intervention(tiny("gpt2", seed=3), TEXTS, 1, bridges)


def test_random_bridges_are_rarely_found_to_matter(gpt2: Any) -> None:
    rng = np.random.default_rng(0)
    found = []
    for seed in range(24):
        units = rng.choice(WIDTH, 6, replace=False)
        result = bridge_intervention(
            gpt2, TEXTS[:4], 1, units.tolist(), controls=1, permutations=19, seed=seed
        )
        found.append([row["p"] for row in result.rows])
    share = (np.array(found) <= 0.05).mean(axis=0)
    assert (share <= 0.21).all(), share


def test_encoders_are_judged_at_the_position_itself() -> None:
    model = tiny("bert")
    result = bridge_intervention(model, TEXTS, 1, UNITS, pos=3, **QUICK)
    assert (result.effects > 0).all()
    assert any("no norm reads" in note for note in result.notes)


def test_matching_is_optimal_first_and_never_uses_a_unit_twice() -> None:
    rng = np.random.default_rng(0)
    places = rng.normal(size=(2, 30))
    of, pool = np.arange(6), np.arange(6, 30)
    partners = matched(places, of, pool, 8, np.random.default_rng(1))
    distance = np.linalg.norm(places[:, of, None] - places[:, None, pool], axis=0)
    rows, columns = linear_sum_assignment(distance)
    assert partners[0].tolist() == pool[columns].tolist()
    best = distance[rows, columns].sum()
    for draw in partners[1:]:
        assert len(set(draw)) == 6
        assert distance[of, draw - 6].sum() >= best
        nearest = np.sort(distance, axis=1)[:, 3 + 5]  # at worst five of the nearest are taken
        assert (distance[of, draw - 6] <= nearest).all()
    assert len({tuple(draw) for draw in partners}) > 3
    with pytest.raises(InputError, match="cannot be matched"):
        matched(places, pool, of, 1, rng)


def test_balance_is_in_deviations_of_the_logarithm() -> None:
    values = np.exp(np.array([0.0, 2.0, 0.0, 2.0]))
    places = standardised({"std": values, "flat": np.ones(4)}, np.arange(4))
    np.testing.assert_allclose(places, [[-1, 1, -1, 1], [0, 0, 0, 0]])
    rows = balance(
        ("std", "flat"), places, np.array([1]), np.array([0, 2, 3]), np.array([[3], [0]])
    )
    assert rows[0] == {"covariate": "std", "before": 4 / 3, "after": 0, "worst": 2}
    assert rows[1]["worst"] == 0


def test_what_makes_no_sense_is_refused(gpt2: Any) -> None:
    bad: list[tuple[dict[str, Any], Any, str]] = [
        ({"around": "median"}, UNITS, "around"),
        ({"factor": 1}, UNITS, "factor"),
        ({"factor": float("nan")}, UNITS, "factor"),
        ({"controls": 0}, UNITS, "controls"),
        ({}, (3,), "at least 2"),
        ({}, (3, 3), "distinct"),
        ({}, (3, WIDTH), "distinct"),
        ({}, torch.zeros(5, dtype=torch.bool), "one entry per unit"),
        ({}, torch.ones(3), "mask, or a sequence"),
        ({}, tuple(range(WIDTH - 2)), "cannot be matched"),
    ]
    for options, bridges, words in bad:
        with pytest.raises(InputError, match=words):
            bridge_intervention(gpt2, TEXTS, 1, bridges, **options)
    with pytest.raises(InputError, match="at least 2 texts"):
        bridge_intervention(gpt2, TEXTS[:1], 1, UNITS)
