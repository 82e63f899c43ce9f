"""The trade-off of steering: each point is the edit it says, and rivals cost what they should."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_plots import overlap, panels
from test_power import mamba
from test_steering import TEXTS, direction, steer, untouched
from zoo import tiny

from tl_spectral.errors import InputError, UnsupportedModelError
from tl_spectral.steering import SteeringSweep, steering_sweep
from tl_spectral.steering.rivals import EqualKL

GAPS = (1.5, 4.0, 12.0)


@pytest.fixture(scope="module")
def swept() -> tuple[SteeringSweep, list[tuple[int, int, str]]]:
    model, calls = tiny("llama"), []
    with untouched(model):
        sweep = steering_sweep(
            model,
            direction(),
            gaps=GAPS,
            texts=TEXTS,
            random_directions=2,
            progress=lambda *call: calls.append(call),
        )
    return sweep, calls


def test_points_are_those_of_steer(swept: Any) -> None:
    """Kills: α kept from another gap, method or direction; a table in another order."""
    table = swept[0].to_dataframe()
    assert len(table) == 2 * 3 * 4
    assert list(table["condition"].iloc[:4]) == [
        "steered", "additive at equal KL", "random direction 0", "random direction 1",
    ]  # fmt: skip
    model = tiny("llama")
    for method in ("weights", "hook"):
        for gap in GAPS:
            with steer(model, direction(), gap=gap, method=method, texts=TEXTS, controls=0) as one:
                pass
            rows = table[(table["method"] == method) & (table["gap"] == gap)]
            mine = rows.set_index("condition").loc["steered"]
            assert mine["strength"] == pytest.approx(one.alpha, rel=1e-4)
            steered = one.conditions[1]
            for name in ("alignment", "alignment_plus", "kl", "perplexity", "positive"):
                assert mine[name] == pytest.approx(steered[name], rel=1e-3)
            assert mine["alignment_before"] == pytest.approx(one.alignment_before)
            assert mine["perplexity_before"] == pytest.approx(one.conditions[0]["perplexity"])


def test_rivals(swept: Any) -> None:
    table = swept[0].to_dataframe()
    steered = table[table["condition"] == "steered"].set_index(["method", "gap"])
    added = table[table["condition"] == "additive at equal KL"].set_index(["method", "gap"])
    assert (added["kl"] / steered["kl"] - 1).abs().max() <= 0.01
    assert (added["strength"] > 0).all()
    # a random direction is steered to at the same gap, and aligned with itself
    drawn = table[table["condition"] == "random direction 0"]
    model = tiny("llama")
    generator = torch.Generator().manual_seed(2)
    u = torch.randn(24, generator=generator, dtype=torch.float64)
    row = drawn[(drawn["method"] == "weights") & (drawn["gap"] == 4.0)].iloc[0]
    with steer(model, u, gap=4.0, texts=TEXTS, controls=0) as one:
        pass
    assert row["strength"] == pytest.approx(one.alpha, rel=1e-4)
    assert row["alignment"] == pytest.approx(one.alignment_after, rel=1e-4)
    assert row["alignment_before"] == pytest.approx(one.alignment_before, rel=1e-6)
    # more gap, more of everything it is for
    for method in ("weights", "hook"):
        for name in ("strength", "kl"):
            assert steered.loc[method][name].is_monotonic_increasing


def test_progress_and_round_trip(swept: Any, tmp_path: Any) -> None:
    sweep, calls = swept
    assert [done for done, _, _ in calls] == list(range(2 * 3 * 3 + 1))
    assert {total for _, total, _ in calls} == {18}
    again = SteeringSweep.load(sweep.save(tmp_path / "s"))
    assert again.to_dataframe().equals(sweep.to_dataframe())
    assert sweep.reach["hook"] == pytest.approx(1)
    assert 0 < sweep.reach["weights"] < 1


def test_figure(swept: Any) -> None:
    figure = swept[0].plot()
    assert [trace.name for trace in figure.data if trace.showlegend is not False] == [
        "steered, weights", "steered, hook", "additive at equal KL",
        "random directions, weights", "random directions, hook",
    ]  # fmt: skip
    assert (figure.layout.xaxis.type, figure.layout.yaxis2.type) == ("log", "log")
    for layout in (figure.layout.to_plotly_json(), figure.layout.meta["narrow"]):
        assert "KL" in layout["xaxis"]["title"]["text"]
        assert "cos" in layout["xaxis2"]["title"]["text"]
        one, other = panels(layout, 2)
        assert not overlap(one, other)
    encoder = steering_sweep(
        tiny("bert"), direction(), gaps=[3.0], methods=["hook"], texts=TEXTS, random_directions=0
    )
    assert {trace.xaxis for trace in encoder.plot().data} == {"x"}
    assert encoder.to_dataframe()["note"].str.contains("not causal").all()


def test_equal_kl_is_found_cheaply_and_says_when_it_is_not() -> None:
    asked: list[float] = []

    def price(length: float) -> float:
        asked.append(length)
        return 0.3 * length**2 / (1 + length)

    rival = EqualKL(price, 1.0)
    for kl in (1e-5, 1e-3, 0.02, 0.1, 0.5, 2.0):
        length, note = rival.length(kl)
        assert (price(length), note) == (pytest.approx(kl, rel=0.011), "")
    assert len(asked) < 30
    assert rival.length(0.0) == (0.0, "the edit costs nothing")
    length, note = EqualKL(lambda b: b / (1 + b), 1.0).length(2.0)
    assert length > 100
    assert "no length" in note
    length, note = EqualKL(lambda b: float(b >= 0.3), 1.0).length(0.5)
    assert length == pytest.approx(0.3, rel=0.1)
    assert "jumps" in note


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"gaps": (2.0, 1.0)}, "gap must be a number above 1, got 1.0"),
        ({"gaps": ()}, "gaps is empty"),
        ({"gaps": (2.0, 2.0)}, "names one twice"),
        ({"methods": ("weights", "additive")}, "methods must be of weights and hook"),
        ({"random_directions": -1}, "random_directions must be a whole number"),
        ({"layer": 3}, "layer 3 does not exist"),
        ({"cutoff": 1.5}, "cutoff must lie"),
    ],
)
def test_refusals(options: dict[str, Any], match: str, gpt2: Any) -> None:
    with untouched(gpt2), pytest.raises(InputError, match=match):
        steering_sweep(gpt2, direction(), **options)


def test_no_value_weights() -> None:
    model = mamba()
    with pytest.raises(UnsupportedModelError, match="value and output weights"):
        steering_sweep(model, direction(d=model.cfg.d_model))
