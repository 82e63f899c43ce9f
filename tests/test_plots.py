"""Figures: what is drawn, in which colour, on which scale; and that nothing is invented."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pytest
import torch
from oracles import prompts
from synthetic_run import synthetic_run

import tl_spectral as tls
from tl_spectral import plots
from tl_spectral.bridges import bridge_units
from tl_spectral.chain import chain
from tl_spectral.communities import communities
from tl_spectral.consensus import simulate_power
from tl_spectral.coupling import coupling
from tl_spectral.graph import unit_graph
from tl_spectral.plots import theme
from tl_spectral.spectrum import spectrum
from tl_spectral.trend import coupling_trend


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    return synthetic_run(tmp_path_factory.mktemp("run"), layers=tuple(range(8)), d=48)


@pytest.fixture(scope="module")
def pipeline(gpt2: Any) -> SimpleNamespace:
    """Real results of a small planted graph: three signals, 36 units, some of them mixed."""
    rng = np.random.default_rng(0)
    loading = np.repeat(np.eye(3), 12, axis=0) + rng.uniform(0, 0.8, (36, 3)) * rng.random((36, 1))
    states = torch.from_numpy(rng.normal(size=(200, 3)) @ loading.T + rng.normal(size=(200, 36)))
    graph = unit_graph(states, top_k=6)
    found = communities(graph, runs=4, nulls=4)
    jacobian = torch.eye(36, dtype=torch.float64) + 0.1 * torch.from_numpy(
        rng.normal(size=(36, 36))
    )
    direction = torch.linspace(-1, 1, 24)
    with tls.steer(gpt2, direction, texts=prompts(2, 6), controls=1) as steered:
        pass
    swept = tls.steering_sweep(
        gpt2, direction, gaps=(2.0, 5.0), texts=prompts(2, 6), random_directions=1
    )
    return SimpleNamespace(
        steered=steered,
        swept=swept,
        graph=graph,
        communities=found,
        bridges=bridge_units(graph, found),
        coupling=coupling(jacobian, graph, found, permutations=99),
        jacobian=jacobian,
    )


def all_figures(run: SimpleNamespace, pipeline: SimpleNamespace) -> dict[str, go.Figure]:
    tables, arrays = run.tables, run.arrays
    layer = tables["units"][tables["units"]["layer"] == 0]
    clouds = {v: arrays[f"eigenvalues/{v}/0"] for v in ("trained", "control")}
    labels = layer[layer["variant"] == "trained"]["community"].to_numpy()
    power, dynamics = tables["power"], tables["consensus"]
    planted = torch.diag(torch.tensor([2.0, 1.0, 0.5, 0.1], dtype=torch.float64))
    rng = np.random.default_rng(1)
    couplings = [
        dataclasses.replace(pipeline.coupling, layer=i, unit_rho=float(rng.normal()))
        for i in range(8)
    ]
    return {
        "spectrum": plots.spectrum_figure(spectrum(pipeline.jacobian)),
        "eigenvalues": plots.eigenvalue_figure(clouds, discs={"trained": 0.5}),
        "profile": plots.profile_figure(tables["spectra"]),
        "chain": plots.chain_figure(chain([pipeline.jacobian] * 3)),
        "funnel": plots.funnel_figure(tables["chain"]),
        "ov": plots.ov_figure(torch.linspace(-1, 1, 12).reshape(3, 4)),
        "ov_table": plots.ov_table_figure(tables["ov"]),
        "layer_modes": plots.layer_modes_figure(tables["ov_layers"]),
        "layer_spectrum": plots.layer_spectrum_figure(
            {"trained": arrays["layer_matrix/trained/0"]}, {"trained": 4.0}
        ),
        "power": plots.power_figure(power[power["variant"] == "trained"]),
        "consensus": plots.consensus_figure(simulate_power(matrices=planted, steps=20)),
        "dynamics": plots.dynamics_figure(dynamics[dynamics["start"] == "text"]),
        "oversmoothing": plots.oversmoothing_figure(tables["oversmoothing"]),
        "steering": plots.steering_figure(pipeline.steered.to_dataframe()),
        "sweep": plots.sweep_figure(pipeline.swept.to_dataframe()),
        "graph": plots.graph_figure(pipeline.graph, pipeline.communities.labels),
        "adjacency": plots.adjacency_figure({"trained": (arrays["adjacency/trained/0"], labels)}),
        "communities": plots.communities_figure(tables["communities"]),
        "cartography": plots.cartography_figure(pipeline.bridges),
        "cartography_table": plots.cartography_table_figure(layer),
        "coupling": plots.coupling_figure(pipeline.coupling),
        "coupling_layers": plots.coupling_layers_figure(tables["coupling"]),
        "character": plots.character_figure(tables["coupling"], tables["spectra"]),
        "trend": plots.trend_figure(coupling_trend(couplings, np.arange(8.0), name="depth")),
        "trend_table": plots.trend_table_figure(tables["trend"]),
    }


def test_every_builder_has_panels_in_place_on_wide_and_narrow_pages(run, pipeline):
    figures = all_figures(run, pipeline)
    assert {f"{name}_figure" for name in figures} == {
        name.replace("eigenvalue_", "eigenvalues_") for name in plots.__all__ if "figure" in name
    }
    for name, figure in figures.items():
        assert figure.data, name
        used = {trace.xaxis or "x" for trace in figure.data}
        wide = figure.layout.to_plotly_json()
        for layout in (wide, figure.layout.meta["narrow"]):
            boxes = panels(layout, len(used))
            assert all(0 <= low < high <= 1 for box in boxes for low, high in box), name
            for i, one in enumerate(boxes):
                assert not any(overlap(one, other) for other in boxes[i + 1 :]), name
        narrow = figure.layout.meta["narrow"]
        assert all(narrow[axis]["domain"] == [0, 1] for axis in narrow if axis[:5] == "xaxis")
        assert len({trace.xaxis or "x" for trace in figure.data}) == len(boxes)


def panels(layout: dict, count: int) -> list[tuple]:
    numbers = [""] + [str(i) for i in range(2, count + 1)]
    return [(layout[f"xaxis{n}"]["domain"], layout[f"yaxis{n}"]["domain"]) for n in numbers]


def overlap(one: tuple, other: tuple) -> bool:
    return all(a[0] < b[1] and b[0] < a[1] for a, b in zip(one, other, strict=True))


def test_template_of_the_caller_is_used(run):
    figure = plots.profile_figure(run.tables["spectra"], template="plotly_dark")
    assert figure.layout.template.layout.paper_bgcolor == "rgb(17,17,17)"
    house = plots.profile_figure(run.tables["spectra"]).layout.template
    assert house.layout.paper_bgcolor == theme.SURFACE


def luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return float(np.dot(linear, [0.2126, 0.7152, 0.0722]))


def contrast(one: str, other: str) -> float:
    bright, dim = sorted((luminance(one), luminance(other)), reverse=True)
    return (bright + 0.05) / (dim + 0.05)


@pytest.mark.parametrize("dark", [False, True])
def test_colours_stand_out_from_the_ground(dark):
    def shown(colour: str) -> str:
        return theme.DARK.get(colour, colour) if dark else colour

    ground = shown(theme.SURFACE)
    for colour in (theme.BLUE, theme.VERMILLION, theme.GREEN, theme.BASELINE):
        assert contrast(shown(colour), ground) >= 3, colour
    for text in (theme.INK, theme.MUTED):
        assert contrast(shown(text), ground) >= 4.5
    assert contrast(shown(theme.GRID), ground) < 1.6  # the grid stays behind the data
    assert len({shown(c) for c in (theme.BLUE, theme.VERMILLION, theme.GREEN, theme.PURPLE)}) == 4


def spectra(**columns) -> pd.DataFrame:
    base = {"variant": "trained", "layer": [0, 1, 2], "operator": "J", "units": "natural"}
    base |= {"estimate": "per_sample", "metric": "henrici", "value": [0.1, 0.2, 0.4]}
    base |= {"standard_error": 0.01, "n_samples": 8, "baseline": 0.7, "skip_baseline": 0.3}
    return pd.DataFrame(base | columns)


def named(figure: go.Figure, name: str) -> list:
    return [trace for trace in figure.data if trace.name == name]


def test_profile_draws_values_interval_and_baselines():
    both = pd.concat([spectra(), spectra(operator="R", value=[0.5, 0.5, 0.5])])
    figure = plots.profile_figure(both)
    (line,) = named(figure, "trained · J")
    assert np.allclose(line.y, [0.1, 0.2, 0.4])
    assert (line.line.color, line.line.dash) == (theme.BLUE, "solid")
    (update,) = named(figure, "trained · R")
    assert (update.line.color, update.line.dash) == (theme.BLUE, "dash")
    band = next(trace for trace in figure.data if trace.fill == "toself")
    assert np.allclose(sorted(band.y), sorted(v + s * 0.0196 for v in line.y for s in (-1, 1)))
    (random,) = named(figure, "random matrix")  # J and R have the same reference: drawn once
    assert np.allclose(random.y, 0.7)
    (skip,) = named(figure, "skip + random update")
    assert np.allclose(skip.y, 0.3)
    assert skip.line.color == theme.PURPLE


def test_profile_keeps_baselines_apart_where_they_differ():
    both = pd.concat([spectra(), spectra(operator="R", baseline=0.6)])
    assert len(named(plots.profile_figure(both), "random matrix")) == 2


def test_profile_of_one_layer_shows_its_error_bar():
    figure = plots.profile_figure(spectra().iloc[:1])
    (line,) = named(figure, "trained · J")
    assert line.error_y.visible
    assert line.error_y.array[0] == pytest.approx(0.0196)
    assert "markers" in line.mode


def test_profile_leaves_out_what_was_not_measured():
    figure = plots.profile_figure(spectra(), metrics=("henrici", "norm_ratio"))
    assert "xaxis2" not in figure.layout
    assert not plots.profile_figure(spectra(value=np.nan)).data
    bare = spectra().drop(columns=["variant", "standard_error", "n_samples", "baseline"])
    assert len(named(plots.profile_figure(bare), "trained · J")) == 1


def test_profile_falls_back_to_the_units_it_has_and_never_mixes_them():
    raw = spectra(units="raw", value=[1.0, 1.0, 1.0])
    assert np.allclose(named(plots.profile_figure(raw), "trained · J")[0].y, 1)
    (line,) = named(plots.profile_figure(pd.concat([raw, spectra()])), "trained · J")
    assert np.allclose(line.y, [0.1, 0.2, 0.4])


def test_band_is_interrupted_where_a_value_is_missing():
    low = np.array([0.0, 0.0, np.nan, 0.0, 0.0])
    (band,) = theme.band(np.arange(5), low, low + 1, theme.BLUE, panel=0, group="g")
    assert list(band.x) == [0, 1, 1, 0, None, 3, 4, 4, 3]
    assert theme.band([0.0], [0.0], [1.0], theme.BLUE, panel=0, group="g") == []


def test_spectrum_figure_shows_the_eigenvalues_of_a_rotation():
    angle = 0.7
    c, s = np.cos(angle), np.sin(angle)
    result = spectrum(torch.tensor([[c, -s], [s, c]], dtype=torch.float64))
    figure = plots.spectrum_figure(result)
    assert np.allclose(figure.data[0].x, c)
    assert np.allclose(sorted(figure.data[0].y), [-s, s])
    circle = figure.layout.shapes[0]
    assert (circle.type, circle.x0, circle.x1) == ("circle", -1, 1)
    assert figure.layout.yaxis.scaleanchor == "x"  # a circle must look like one
    assert np.allclose(figure.data[1].y, 1)


def test_eigenvalue_discs_are_centred_at_one():
    figure = plots.eigenvalue_figure({"trained": np.array([1 + 1j])}, discs={"trained": 0.25})
    disc = next(s for s in figure.layout.shapes if s.line.dash == "dot")
    assert (disc.x0, disc.x1, disc.y0, disc.y1) == (0.75, 1.25, -0.25, 0.25)


def test_log_ticks_are_plain_numbers():
    axis = theme.log_ticks([1.5, 40.0, np.nan])
    assert axis["ticktext"] == ["1", "2", "5", "10", "20", "50"]
    assert theme.log_ticks([np.nan]) == {"type": "log"}
    assert all(float(t).is_integer() for t in theme.log_ticks([1, 1e6])["tickvals"])


@pytest.mark.parametrize(("last", "step"), [(0, 1), (2, 1), (11, 2), (29, 5), (79, 20)])
def test_layers_are_whole_numbers(last, step):
    assert theme.layer_axis(np.arange(last + 1))["dtick"] == step


def test_funnel_separates_samples_median_and_mean_jacobian():
    rows = [
        {"estimate": "per_sample", "sample": s, "layer": i, "effective_rank": r}
        for s, ranks in enumerate([(10, 4), (20, 6), (90, 5)])
        for i, r in enumerate(ranks)
    ]
    rows += [
        {"estimate": "mean_jacobian", "sample": -1, "layer": i, "effective_rank": 50.0}
        for i in range(2)
    ]
    figure = plots.funnel_figure(pd.DataFrame(rows))
    (samples,) = named(figure, "trained · each sample")
    assert list(samples.y) == [10, 4, None, 20, 6, None, 90, 5]
    assert np.allclose(named(figure, "trained · median sample")[0].y, [20, 5])
    assert np.allclose(named(figure, "trained · mean Jacobian")[0].y, 50)
    assert not named(figure, "product of random blocks")  # none was given, none is drawn


def test_ov_cells_and_the_dots_of_random_heads():
    table = pd.DataFrame(
        {
            "layer": [3, 3, 7, 7],
            "head": [0, 1, 0, 1],
            "copying_score": [0.9, 0.1, -0.8, -0.3],
            "baseline_copying_score": 0.0,
            "baseline_sd": 0.1,
        }
    )
    figure = plots.ov_table_figure(table)
    heat, dots = figure.data
    assert np.allclose(heat.z, [[0.9, 0.1], [-0.8, -0.3]])
    assert list(heat.y) == ["3", "7"]  # layers that were analysed, evenly spaced
    assert (list(dots.x), list(dots.y)) == (["1"], ["3"])
    assert figure.layout.coloraxis.cmin == -figure.layout.coloraxis.cmax == -1


def test_adjacency_shows_cliques_inside_their_outlines_whatever_the_order_of_units():
    rng = np.random.default_rng(3)
    labels = np.array([0] * 6 + [1] * 4 + [-1])
    pairs = np.array([(i, j) for i in range(10) for j in range(i) if labels[i] == labels[j]])
    place = rng.permutation(11)
    shuffled = np.empty(11, dtype=int)
    shuffled[place] = labels
    edges = {"row": place[pairs[:, 0]], "col": place[pairs[:, 1]], "weight": np.ones(len(pairs))}
    figure = plots.adjacency_figure({"trained": (edges, shuffled)})
    z = np.asarray(figure.data[0].z)
    assert np.array_equal(z, z.T)
    assert (z[:6, :6] > 0).sum() == 30
    assert (z[6:10, 6:10] > 0).sum() == 12
    assert z[:6, 6:].sum() == z[10].sum() == 0
    outline = [v for v in figure.data[2].x if v is not None]
    assert (min(outline), max(outline)) == (0, 10)  # the isolated unit is outside
    assert list(figure.data[1].text) == ["community 0: 6 units", "community 1: 4 units"]


def test_adjacency_bins_keep_all_weight_of_a_large_graph():
    n = 400
    edges = {"row": np.arange(n - 1), "col": np.arange(1, n), "weight": -np.ones(n - 1)}
    figure = plots.adjacency_figure({"trained": (edges, np.zeros(n, dtype=int))})
    z = np.asarray(figure.data[0].z)
    assert z.shape == (180, 180)
    assert (np.diag(z) > 0).all()  # a chain, and negative weights count by their size


def test_cartography_names_the_strongest_bridges(run):
    table = run.tables["units"]
    table = table[(table["layer"] == 0) & (table["variant"] == "trained")]
    figure = plots.cartography_table_figure(table)
    bridges = table[table["is_bridge"]].nlargest(8, "participation")
    written = {note.text for note in figure.layout.annotations if note.showarrow}
    assert written == {str(u) for u in bridges["unit"]}
    drawn = np.concatenate([t.customdata for t in figure.data if t.mode == "markers"])
    assert sorted(drawn) == sorted(table["unit"])
    assert figure.layout.coloraxis.cmin == -figure.layout.coloraxis.cmax


def test_cartography_without_gain_is_drawn_without_colour_scale(pipeline):
    figure = plots.cartography_figure(pipeline.bridges)
    assert figure.layout.coloraxis.cmin is None
    bridge = [t for t in figure.data if t.mode == "markers" and t.marker.color == theme.GREEN]
    assert len(bridge[0].x) == int(pipeline.bridges.is_bridge.sum())


def test_coupling_fills_only_layers_that_survive_the_correction(run):
    table = run.tables["coupling"]
    figure = plots.coupling_layers_figure(table)
    line = named(figure, "trained")[0]
    rows = table[table["variant"] == "trained"].sort_values("layer")
    filled = [colour == theme.BLUE for colour in line.marker.color]
    assert filled == (rows["unit_q"] < 0.05).tolist()
    assert True in filled
    assert False in filled
    assert np.allclose(line.y + line.error_y.array, rows["unit_high"], atol=1e-6)
    assert np.allclose(line.y - line.error_y.arrayminus, rows["unit_low"], atol=1e-6)


def test_character_uses_the_named_metric_and_draws_no_line_for_no_effect(run):
    tables = run.tables
    figure = plots.character_figure(tables["coupling"], tables["spectra"], trend=tables["trend"])
    rows = tables["spectra"].query(
        "metric == 'antisymmetric_energy' and operator == 'R' and units == 'natural' "
        "and estimate == 'per_sample' and variant == 'trained'"
    )
    points = [t for t in figure.data if t.mode == "markers+text"]
    assert np.allclose(points[0].x, rows.sort_values("layer")["value"])
    assert list(points[0].text) == [str(i) for i in range(8)]
    lines = [t for t in figure.data if t.mode == "lines"]
    assert [t.xaxis for t in lines] == ["x"]  # trained excludes zero, the control does not
    assert "−0.62, 95 % interval −0.87 to −0.32" in figure.layout.annotations[0].text


def test_coupling_figure_tells_bridges_from_the_rest(pipeline):
    result = pipeline.coupling
    figure = plots.coupling_figure(result)
    rest, bridges, forest = figure.data
    assert (rest.xaxis, forest.xaxis) == ("x2", None)
    assert len(bridges.x) == int((result.is_bridge & result.used).sum())
    assert len(rest.x) + len(bridges.x) == result.n_units
    drawn = dict(zip(forest.y, forest.x, strict=True))
    assert drawn["units, confounds out"] == pytest.approx(result.unit_rho, abs=1e-6)
    assert drawn["units, raw"] == pytest.approx(result.raw_rho, abs=1e-6)
    assert len(drawn) == 3 + len(result.confound_table)


def test_results_draw_themselves(pipeline, tmp_path: Path):
    for result in (pipeline.graph, pipeline.bridges, pipeline.coupling):
        assert isinstance(result.plot(), go.Figure)
    figure = pipeline.communities.plot(pipeline.graph)
    figure.write_html(tmp_path / "graph.html", include_plotlyjs=False)
    assert isinstance(spectrum(pipeline.jacobian).plot(), go.Figure)
