"""The multiverse: every row is the coupling of its setting; planted truth; the joint tests."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_coupling import UNITS, blurred_states, jacobian, standard
from torch import Tensor

from tl_spectral import statistics
from tl_spectral.bridges import bridge_units
from tl_spectral.capture import ResidualStates, capture
from tl_spectral.communities import communities
from tl_spectral.coupling import coupling
from tl_spectral.errors import InputError
from tl_spectral.graph import unit_graph
from tl_spectral.jacobian import sample_jacobians
from tl_spectral.multiverse import Multiverse, multiverse
from tl_spectral.multiverse_grid import KEYS, _block
from tl_spectral.samples import take

SMALL: dict[str, Any] = {
    "top_k": (6, 10),
    "resolution": (1.0, 1.3),
    "sign": ("abs", "positive"),
    "samples": (0.5, 1.0),
    "permutations": 99,
    "runs": 2,
}


def as_states(values: Tensor) -> ResidualStates:
    gain = torch.from_numpy(np.random.default_rng(9).uniform(0.5, 2.0, (1, values.shape[1])))
    return ResidualStates(values[None], 2 * values[None], None, gain, (4,), -1)


@pytest.fixture(scope="module")
def states() -> ResidualStates:
    return as_states(blurred_states(np.random.default_rng(0), np.arange(UNITS) % 6))


def place(states: ResidualStates) -> np.ndarray:
    graph = unit_graph(states, 4, top_k=8)
    com = communities(graph, runs=2, nulls=0)
    return bridge_units(graph, com).participation.numpy()


def around(log_gain: np.ndarray, count: int = 3) -> Tensor:
    return torch.stack([jacobian(log_gain, seed) for seed in range(count)])


def test_every_row_is_the_coupling_of_its_setting() -> None:
    """Also where runs disagree (noisy states) and units of a community share their gains."""
    rng = np.random.default_rng(1)
    labels = np.arange(UNITS) % 6
    noisy = blurred_states(np.random.default_rng(0), labels)
    states = as_states(noisy + 9 * torch.from_numpy(rng.normal(size=noisy.shape)))
    matrices = torch.from_numpy(rng.normal(size=(3, UNITS, UNITS)))
    isolated = around(rng.normal(size=6)[labels] + 0.1 * rng.normal(size=UNITS))
    given = {"full": {4: matrices}, "isolated": {4: isolated}}
    result = multiverse(states, given, seed=5, **{**SMALL, "permutations": 999})
    rows = result.rows
    assert len(rows) == 2**10
    assert len({tuple(row[k] for k in KEYS) for row in rows}) == len(rows)
    order = np.random.default_rng(5).permutation(300)
    scale = (states.scale(4), states.scale(4, hook="resid_post"))
    agreements, shares = [], []
    for row in (rows[i] for i in np.random.default_rng(0).choice(len(rows), 25, replace=False)):
        part = take(states, np.sort(order[: row["samples"]]))
        graph = unit_graph(part, 4, top_k=row["top_k"], sign=row["sign"])
        com = communities(graph, resolution=row["resolution"], runs=2, nulls=0, seed=5)
        chosen = given[row["context"]][4]
        if row["estimate"] == "mean_jacobian":
            chosen = chosen.mean(0, keepdim=True)
        by_hand = coupling(
            list(chosen), graph, com, gain=row["gain"], operator=row["operator"],
            scale=scale if row["units"] == "natural" else None,
            confounds=None if row["confounds"] == "all" else (), permutations=999, seed=5,
        )  # fmt: skip
        assert row["rho"] == pytest.approx(by_hand.unit_rho)
        assert (row["low"], row["high"]) == pytest.approx(by_hand.unit_interval)
        assert row["p"] == pytest.approx(by_hand.unit_p, abs=0.09)
        assert row["n_effective"] == pytest.approx(by_hand.n_effective)
        agreements.append(by_hand.run_agreement)
        shares.append(by_hand.n_effective / by_hand.n_units)
    assert min(agreements) < 0.9
    assert min(shares) < 0.7


def test_the_shared_null_has_the_width_of_the_statistic() -> None:
    """Runs that disagree narrow it, communities that share gains widen it, confounds count."""
    rng = np.random.default_rng(0)
    labels = np.arange(UNITS) % 6
    shared = rng.normal(size=6)[labels]
    spread = rng.normal(size=(2, UNITS)) + 2 * shared  # far from the same ranks in both runs
    values = np.stack([rng.normal(size=UNITS), rng.normal(size=6)[labels] + rng.random(UNITS)])
    controls = rng.normal(size=(2, UNITS))
    moved = np.argsort(rng.random((4000, UNITS)), axis=1)
    rows, null = _block(spread, values, controls, labels, moved)
    basis = statistics.rank_basis(controls, 4)
    agreement = np.linalg.norm(statistics.rank_residuals(spread, basis).mean(axis=0))
    assert agreement < 0.95
    assert rows[1]["n_effective"] < 0.5 * UNITS < rows[0]["n_effective"]
    for row, column in zip(rows, null.T, strict=True):
        spare = (UNITS - basis.shape[1]) * row["n_effective"] / UNITS
        assert column.std() == pytest.approx(agreement / math.sqrt(spare), rel=0.05)
        assert row["p"] == pytest.approx((np.abs(column) >= abs(row["rho"])).mean(), abs=1e-3)


@pytest.mark.parametrize("sign", [1, -1])
def test_a_planted_coupling_holds_in_the_settings(states: ResidualStates, sign: int) -> None:
    rng = np.random.default_rng(2)
    gain = 0.4 * sign * standard(place(states)) + 0.2 * rng.normal(size=UNITS)
    result = multiverse(states, {4: around(gain)}, units=("raw",), gain=("column",), **SMALL)
    assert "context='isolated'" in " ".join(result.left_out)
    row = result.summary().set_index("layer").loc[4]
    assert row["n_settings"] == 2**4 * 2 * 2 * 2
    assert np.sign(row["median_rho"]) == sign
    assert row["share_of_sign"] > 0.95
    positive = row["share_of_sign"] if sign > 0 else 1 - row["share_of_sign"]
    assert row["share_positive"] == pytest.approx(positive)
    wanted = "significant_positive" if sign > 0 else "significant_negative"
    assert row[wanted] > 0.7
    assert row["median_p"] <= 0.03
    assert row["significant_p"] <= 0.03
    word = "positive" if sign > 0 else "negative"
    assert f"the coupling is {word} in " in result.sentence(4)
    table = result.by_choice().set_index(["choice", "value"])
    assert table["n_settings"]["top_k", "6"] == row["n_settings"] / 2
    assert set(table.loc["sign"].index) == {"abs", "positive"}


def test_joint_tests_keep_their_level_although_settings_depend_on_each_other() -> None:
    rng = np.random.default_rng(3)
    few = {**SMALL, "samples": (1.0,), "resolution": (1.0,), "confounds": ("none",), "runs": 1}
    found = []
    for seed in range(60):
        states = as_states(blurred_states(np.random.default_rng(seed % 6), np.arange(UNITS) % 6))
        gain = around(0.3 * rng.normal(size=UNITS), 1)
        result = multiverse(states, {4: gain}, units=("raw",), gain=("column",), seed=seed, **few)
        found.append((result.summaries[0]["median_p"], result.summaries[0]["significant_p"]))
    share = (np.array(found) < 0.051).mean(axis=0)
    assert (share <= 0.14).all(), share
    assert 0.3 < np.array(found).mean() < 0.75


def test_signed_graphs_are_settings_and_said_to_be_missing(
    states: ResidualStates, monkeypatch: pytest.MonkeyPatch
) -> None:
    J = {4: around(standard(place(states)), 1)}
    few = {**SMALL, "resolution": (1.0,), "samples": (1.0,), "top_k": (12,), "context": ("full",)}
    few["sign"] = ("abs", "signed", "signed-")
    if importlib.util.find_spec("leidenalg") is not None:
        result = multiverse(states, J, **few)
        assert not result.left_out
        table = result.to_dataframe()
        assert set(table["sign"]) == {"abs", "signed", "signed-"}
        assert table[table["sign"] == "signed"]["rho"].notna().all()
        negative = table[table["sign"] == "signed-"]
        assert (negative["rho"].notna() | (negative["note"] != "")).all()
        only = multiverse(states, J, **{**few, "sign": ("signed",)})
        assert result.rows[len(table) // 3]["rho"] == only.rows[0]["rho"]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    without = multiverse(states, J, **few)
    assert {row["sign"] for row in without.rows} == {"abs"}
    assert "leidenalg" in without.left_out[0]
    with pytest.raises(InputError, match="leiden"):
        multiverse(states, J, **{**few, "sign": ("signed",)})


def test_the_model_itself_gives_the_same_as_its_states_and_jacobians(gpt2: Any) -> None:
    texts = torch.randint(3, 60, (40, 9), generator=torch.Generator().manual_seed(0))
    few: dict[str, Any] = {
        "top_k": (5,), "resolution": (1.0,), "sign": ("abs",), "samples": (1.0,),
        "runs": 2, "permutations": 49,
    }  # fmt: skip
    said: list[str] = []
    result = multiverse(
        gpt2, texts, layers=(0, 2), jacobian_samples=3,
        progress=lambda done, total, what: said.append(f"{done}/{total} {what}"), **few,
    )  # fmt: skip
    contexts = {
        name: dict(sample_jacobians(gpt2, texts[:3], (0, 2), context=name))
        for name in ("full", "isolated")
    }
    by_hand = multiverse(capture(gpt2, texts, layers=(0, 2)), contexts, **few)
    assert result.layers == (0, 2)
    assert len(result.rows) == 2 * 2**6
    key = (*KEYS, "layer")
    ours = {tuple(row[k] for k in key): row["rho"] for row in result.rows}
    theirs = {tuple(row[k] for k in key): row["rho"] for row in by_hand.rows}
    assert ours == pytest.approx(theirs, nan_ok=True, abs=1e-4)
    assert said[-1].startswith("1/2 multiverse of layer 2")
    assert result.provenance.model == "tiny-gpt2"
    total = result.summaries[-1]
    assert total["layer"] == -1
    assert total["n_settings"] == sum(row["n_settings"] for row in result.summaries[:-1])


def test_a_setting_without_a_coupling_says_why(states: ResidualStates) -> None:
    still = {4: torch.eye(UNITS, dtype=torch.float64)[None]}
    result = multiverse(
        states, still, operator=("J", "R"), units=("raw",), estimate=("per_sample",), **SMALL
    )
    assert all(math.isnan(row["rho"]) and row["note"] for row in result.rows)
    assert result.summaries[0]["n_settings"] == 0
    assert result.sentence(4) == "Layer 4: no setting has a coupling."
    with pytest.raises(InputError, match="no coupling"):
        result.plot()


def test_what_cannot_be_varied_is_refused(states: ResidualStates) -> None:
    J = {4: torch.eye(UNITS)[None]}
    bad: list[tuple[dict[str, Any], str]] = [
        ({"top_k": ()}, "sequence of choices"),
        ({"sign": "abs"}, "sequence of choices"),
        ({"top_k": (5, 5)}, "twice"),
        ({"sign": ("both",)}, "'both' is not one of"),
        ({"samples": (1.5,)}, r"\(0, 1\]"),
        ({"samples": (0.001,)}, "fewer than 3"),
        ({"runs": 0}, "runs"),
        ({"layers": (5,)}, "no full Jacobian of layer 5"),
        ({"context": ("isolated",)}, "none of"),
    ]
    for options, words in bad:
        with pytest.raises(InputError, match=words):
            multiverse(states, J, **options)
    for data in (None, {}, {4: torch.eye(UNITS)[None, :5]}):
        with pytest.raises(InputError, match="Jacobian"):
            multiverse(states, data)
    plain = dataclasses.replace(states)
    with pytest.raises(InputError, match="not in this multiverse"):
        multiverse(plain, J, **{**SMALL, "context": ("full",)}).sentence(3)


def test_figure_and_disk(states: ResidualStates, tmp_path: Path) -> None:
    J = {4: around(standard(place(states)), 2)}
    result = multiverse(states, J, context=("full",), **SMALL)
    again = multiverse(states, J, context=("full",), **SMALL)
    assert result.rows == again.rows
    loaded = Multiverse.load(result.save(tmp_path / "multiverse"))
    assert loaded.summaries[0] == result.summaries[0]
    assert loaded.choices == result.choices
    fig = loaded.plot()
    points = [t for t in fig.data if str(t.name).startswith("p ")]
    assert sum(len(t.x) for t in points) == len(result.rows)
    curve = np.concatenate([t.y for t in points])[np.argsort(np.concatenate([t.x for t in points]))]
    assert (np.diff(curve) >= 0).all()
    marks = {t.name: len(t.x) for t in fig.data if t.xaxis == "x2"}
    assert marks["top k 6"] == marks["units raw"] == len(result.rows) / 2
    assert "context full" not in marks
