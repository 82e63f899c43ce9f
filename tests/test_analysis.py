"""The pipeline: what it writes, that it resumes to the same bytes, and what it refuses first."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from zoo import LAYERS, WIDTH, tiny

import tl_spectral as tls
from tl_spectral.analysis.findings import _early_minus_late
from tl_spectral.analysis.verdicts import mean_interval

TEXTS = torch.randint(3, 60, (40, 9), generator=torch.Generator().manual_seed(0))
SETTINGS = {
    "control": "random-init",
    "jacobian_samples": 6,
    "spectrum_samples": 3,
    "chunk": 4,
    "louvain_runs": 4,
    "permutations": 100,
    "jobs": 1,
}


def analyze(model, out: Path, texts=TEXTS, **changes):
    return tls.analyze(model, texts, out=out, **{**SETTINGS, **changes})


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return analyze(tiny("llama"), tmp_path_factory.mktemp("runs") / "llama")


def files(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def test_tables_are_tidy_and_complete(run):
    spectra = run.tables["spectra"]
    keys = ["variant", "layer", "operator", "units", "estimate", "metric"]
    assert not spectra.duplicated(keys).any()
    assert set(spectra["variant"]) == {"trained", "control"}
    assert set(spectra["operator"]) == {"J", "R"}
    assert set(spectra["units"]) == {"raw", "natural"}
    per_sample = spectra[spectra["estimate"] == "per_sample"]
    assert (per_sample["n_samples"].isin([0, 3])).all()
    missing = spectra["value"].isna()
    assert (spectra.loc[missing, "note"].fillna("") != "").all()
    assert len(run.tables["units"]) == 2 * LAYERS * WIDTH
    assert len(run.tables["coupling"]) == 2 * LAYERS
    assert len(run.tables["ov"]) == 2 * LAYERS * 4
    assert set(run.findings["verdict"]) <= {"holds", "not learned", "no effect", "cannot tell"}


def test_spectra_are_those_of_the_jacobians(run):
    """The pipeline's number is the one a user gets by hand, at the right layer and sample."""
    model = tiny("llama")
    states = tls.capture(model, TEXTS)
    values = [
        tls.block_spectra(tls.block_jacobian(model, row, 1), states.scale(1))["R", "natural"]
        for row in TEXTS[:3]
    ]
    table = run.tables["spectra"].set_index(
        ["variant", "estimate", "layer", "operator", "units", "metric"]
    )
    row = table.loc["trained", "per_sample", 1, "R", "natural", "antisymmetric_energy"]
    expected = np.array([value.antisymmetric_energy for value in values])
    assert row["value"] == pytest.approx(expected.mean(), rel=1e-5)
    assert row["standard_error"] == pytest.approx(expected.std(ddof=1) / 3**0.5, rel=1e-4)
    mean = tls.block_jacobian(model, TEXTS[:6], 1)
    row = table.loc["trained", "mean_jacobian", 1, "J", "raw", "spectral_norm"]
    assert row["value"] == pytest.approx(tls.spectrum(mean).spectral_norm, rel=1e-5)


def test_chain_is_the_product_of_a_prompts_own_jacobians(run):
    model = tiny("llama")
    own = tls.chain(model, TEXTS[2], k=2)
    chain = run.tables["chain"]
    rows = chain[
        (chain["variant"] == "trained") & (chain["sample"] == 2) & (chain["units"] == "raw")
    ]
    assert rows["effective_rank"].tolist() == pytest.approx(own.effective_rank.tolist(), rel=1e-5)


def test_coupling_matches_the_pieces_by_hand(run):
    model = tiny("llama")
    states = tls.capture(model, TEXTS)
    with pytest.warns(tls.TLSpectralWarning) if len(TEXTS) < WIDTH else _nothing():
        graph = tls.unit_graph(states, layer=2)
    groups = tls.communities(graph, runs=4, seed=0)
    gains = torch.stack(
        [tls.amplification(tls.block_jacobian(model, row, 2)) for row in TEXTS[:6]]
    ).mean(dim=0)
    by_hand = tls.coupling(gains, graph, groups, permutations=100)
    table = run.tables["coupling"].set_index(["variant", "layer"])
    assert table.loc[("trained", 2), "unit_rho"] == pytest.approx(by_hand.unit_rho, abs=1e-5)


def _nothing():
    from contextlib import nullcontext

    return nullcontext()


def test_loading_gives_the_same_run(run):
    again = tls.load(run.out)
    for name, table in run.tables.items():
        pd.testing.assert_frame_equal(again.tables[name], table)
    assert again.provenance == run.provenance
    assert again.run_options == run.run_options


def test_repeating_computes_nothing_and_changes_nothing(run, monkeypatch):
    before = files(run.out)
    monkeypatch.setattr("tl_spectral.analysis.work.sample_jacobians", _must_not_run)
    monkeypatch.setattr("tl_spectral.analysis.work.capture", _must_not_run)
    analyze(tiny("llama"), run.out)
    assert files(run.out) == before


def _must_not_run(*args, **kwargs):
    raise AssertionError("a finished task was run again")


@pytest.mark.parametrize("after", [1, 5, 13, 20])
def test_an_interrupted_run_resumes_to_the_same_bytes(run, tmp_path, after):
    """An exception at any task stands for the kill; a real SIGKILL is tried below."""

    def stop(done, total, what):
        if done >= after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        analyze(tiny("llama"), tmp_path / "run", progress=stop)
    assert not (tmp_path / "run" / "complete.json").exists()
    with pytest.raises(tls.InputError, match="not finished"):
        tls.load(tmp_path / "run")
    resumed = analyze(tiny("llama"), tmp_path / "run")
    assert files(resumed.out) == files(run.out)


@pytest.mark.slow
def test_a_killed_process_resumes_to_the_same_bytes(run, tmp_path):
    script = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from test_analysis import analyze, tiny\n"
        "from pathlib import Path\n"
        f"analyze(tiny('llama'), Path({str(tmp_path / 'run')!r}))\n"
    )
    for delay in (0.2, 0.9, 1.7):  # after the first task is there
        process = subprocess.Popen([sys.executable, "-c", script])
        deadline = time.monotonic() + 120
        while not (tmp_path / "run" / "tasks").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(delay)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    assert analyze(tiny("llama"), tmp_path / "run").out.exists()
    finished = files(tmp_path / "run")
    leftovers = [name for name in finished if Path(name).name.startswith(".")]
    for name in leftovers:  # a temporary file of the killed moment: never read
        del finished[name]
    assert finished == files(run.out)


def test_control_is_optional(tmp_path):
    result = analyze(tiny("gpt2"), tmp_path / "run", control=None)
    assert set(result.tables["spectra"]["variant"]) == {"trained"}
    assert not result.findings["baseline"].str.contains("control").any()


@pytest.mark.parametrize("name", ["bert", "pythia", "olmo2"])
def test_other_families_run_to_the_end(name, tmp_path):
    result = analyze(tiny(name), tmp_path / "run", control=None)
    assert np.isfinite(result.tables["coupling"]["unit_rho"]).all()


def test_some_layers_that_do_not_follow_each_other(tmp_path):
    result = analyze(tiny("gpt2"), tmp_path / "run", layers=[0, 2], control=None)
    assert result.tables["chain"].empty
    assert set(result.tables["spectra"]["layer"]) == {0, 2}
    verdicts = result.findings.set_index("claim")["verdict"]
    assert verdicts["the stack funnels into few dimensions"] == "cannot tell"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"texts": []}, "no text"),
        ({"texts": ["", "a"]}, "Text 0 is empty"),
        ({"texts": TEXTS[:2]}, "2 texts are too few"),
        ({"pos": 9}, "pos .* 9 does not exist"),
        ({"layers": [5]}, "layer 5 does not exist"),
        ({"layers": []}, "layers is empty"),
        ({"context": "half"}, "context must be"),
        ({"control": "shuffled"}, "control must be"),
        ({"jacobian_samples": 0}, "jacobian_samples must be at least 1"),
        ({"permutations": 5}, "permutations must be at least 100"),
        ({"tokens_per_text": 1}, "tokens_per_text must be at least 2"),
        ({"samples": 0}, "positive integer"),
        ({"seed": True}, "seed must be an integer"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(changes, message, tmp_path):
    with pytest.raises(tls.InputError, match=message):
        analyze(tiny("llama"), tmp_path / "run", **changes)
    assert not (tmp_path / "run").exists()


def test_train_mode_is_refused_before_anything_is_written(tmp_path):
    model = tiny("llama")
    model.blocks[1].mlp.train()
    with pytest.raises(tls.ModelStateError, match="train mode"):
        analyze(model, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_directory_of_another_run_is_refused_and_left_alone(run, tmp_path):
    before = files(run.out)
    for changes, what in (
        ({"seed": 1}, "seed"),
        ({"jacobian_samples": 5}, "jacobian_samples"),
        ({"texts": TEXTS[:39]}, "texts"),
        ({"control": None}, "control"),
    ):
        with pytest.raises(tls.ProvenanceError, match=what):
            analyze(tiny("llama"), run.out, **changes)
    with pytest.raises(tls.ProvenanceError, match="fingerprint"):
        analyze(tiny("llama", seed=1), run.out)
    assert files(run.out) == before
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(tls.InputError, match="no run directory"):
        analyze(tiny("llama"), tmp_path)


def test_a_failed_command_leaves_the_directory_free(run, tmp_path):
    """Nothing was computed yet, so another run may begin there."""

    def stop(done, total, what):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        analyze(tiny("llama"), tmp_path / "run", seed=5, progress=stop)
    assert files(analyze(tiny("llama"), tmp_path / "run").out) == files(run.out)


def test_a_file_in_the_place_of_another_is_noticed(run, tmp_path):
    import shutil

    copy = tmp_path / "run"
    shutil.copytree(run.out, copy)
    tasks = copy / "tasks" / "trained"
    shutil.copy(tasks / "graph_002.safetensors", tasks / "graph_001.safetensors")
    (copy / "complete.json").unlink()
    with pytest.raises(tls.CorruptResultError, match="result of another task"):
        analyze(tiny("llama"), copy)
    (tasks / "graph_001.safetensors").unlink()
    (tasks / "coupling_001.safetensors").unlink()
    with pytest.raises(tls.InputError, match="not finished"):
        tls.load(copy)
    assert files(analyze(tiny("llama"), copy).out) == files(run.out)


def test_too_little_is_not_judged(tmp_path):
    """Few prompts, few layers, fewer texts than units: cannot tell, whatever the numbers are."""
    with pytest.warns(tls.TLSpectralWarning):
        result = analyze(
            tiny("llama"), tmp_path / "run", texts=TEXTS[:10], control=None, spectrum_samples=2
        )
    verdicts = result.findings.set_index("claim")["verdict"]
    for claim in (
        "the stack funnels into few dimensions",
        "averaging over prompts raises the rank",
        "units form communities",
        "late symmetry is more than the skip",
        "rotation falls with depth",
        "bridge units follow the operator",
    ):
        assert verdicts[claim] == "cannot tell", claim


def test_random_chains_stand_beside_the_chains_that_they_match(run):
    chain = run.tables["chain"]
    fits = (chain["estimate"] == "per_sample") & (chain["units"] == "raw")
    assert chain["baseline_effective_rank"].notna().equals(fits)
    assert (chain["note"].fillna("") == "").equals(fits)


def test_damaged_files_are_refused_with_advice(run, tmp_path):
    import shutil

    copy = tmp_path / "run"
    shutil.copytree(run.out, copy)
    table = copy / "tables" / "spectra.csv"
    table.write_text(table.read_text().replace("trained", "Trained", 1))
    with pytest.raises(tls.CorruptResultError, match=r"spectra\.csv"):
        tls.load(copy)
    (copy / "complete.json").unlink()
    analyze(tiny("llama"), copy)  # the advice in the message
    assert files(copy) == files(run.out)
    task = copy / "tasks" / "trained" / "jacobian_001_0000.safetensors"
    task.write_bytes(task.read_bytes()[:-20])
    with pytest.raises(tls.CorruptResultError, match="jacobian_001_0000"):
        analyze(tiny("llama"), copy)
    (copy / "run.json").write_text("{")
    with pytest.raises(tls.CorruptResultError, match=r"run\.json"):
        tls.load(copy)
    with pytest.raises(tls.InputError, match="no run"):
        tls.load(tmp_path / "nothing")


def test_few_texts_are_warned_about(tmp_path):
    with pytest.warns(tls.TLSpectralWarning, match="10 texts for 24 units"):
        analyze(tiny("llama"), tmp_path / "run", texts=TEXTS[:10], control=None)


def test_run_json_says_what_was_run(run):
    document = json.loads((run.out / "run.json").read_text())
    assert document["provenance"]["model"] == "tiny-llama"
    assert document["provenance"]["texts"]
    assert document["options"]["control"] == "random-init"


def test_profile_is_wide_with_baselines():
    model = tiny("llama")
    few = tls.profile(model, TEXTS[:2])
    table = few.to_dataframe()
    assert len(table) == 2 * LAYERS
    assert {"antisymmetric_energy", "antisymmetric_energy_baseline"} <= set(table.columns)
    assert "antisymmetric_energy_natural" not in table.columns
    assert "at least 16" in few.note
    many = tls.profile(model, TEXTS[:20], layers=[2]).to_dataframe()
    assert many["antisymmetric_energy_natural"].between(0, 1).all()
    assert tls.profile(model, TEXTS[0]).plot().data


def test_intervals_of_findings():
    falling = pd.Series(np.linspace(1, 0, 12) + 0.01 * np.tile([1, -1], 6))
    effect = _early_minus_late(falling)
    assert effect.above
    assert effect.low < effect.value < effect.high
    assert not _early_minus_late(falling[::-1]).above
    mean = mean_interval(np.array([1.0, 2.0, 3.0]))
    assert (mean.low, mean.high) == pytest.approx((2 - 2.4841, 2 + 2.4841), abs=1e-3)
