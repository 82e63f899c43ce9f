"""The small GPT: it learns, it is the same twice, and its checkpoints are models like any other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import tl_spectral as tls
from tl_spectral.compare import compare
from tl_spectral.errors import InputError
from tl_spectral.testing.toy_gpt import TinyGPT, log_spaced, train_tiny_gpt
from tl_spectral.texts import builtin_corpus

SMALL = {"hidden": 16, "layers": 2, "heads": 2, "vocabulary": 300, "length": 16, "batch": 4}


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> TinyGPT:
    out = tmp_path_factory.mktemp("toy") / "gpt"
    return train_tiny_gpt(out, steps=30, texts=builtin_corpus()[:60], **SMALL)


def test_the_same_seed_gives_the_same_weights_and_leaves_torch_alone(
    toy: TinyGPT, tmp_path: Path
) -> None:
    torch.manual_seed(7)
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    again = train_tiny_gpt(tmp_path / "gpt", steps=30, texts=builtin_corpus()[:60], **SMALL)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads
    assert torch.equal(again.losses, toy.losses)
    for mine, theirs in zip(toy.paths, again.paths, strict=True):
        for name in ("model.safetensors", "tokenizer.json", "config.json"):
            assert (mine / name).read_bytes() == (theirs / name).read_bytes()
    other = train_tiny_gpt(
        tmp_path / "other", steps=2, seed=1, checkpoints=[0], texts=builtin_corpus()[:60], **SMALL
    )
    assert other.steps == (0,)
    assert (other.paths[0] / "model.safetensors").read_bytes() != (
        toy.paths[0] / "model.safetensors"
    ).read_bytes()


def test_checkpoints_are_models_that_learned_so_far(toy: TinyGPT) -> None:
    assert toy.steps == log_spaced(30)
    assert toy.losses[-5:].mean() < toy.losses[:5].mean() - 0.1
    record = json.loads((toy.paths[0].parent / "training.json").read_text())
    assert record["steps"] == list(toy.steps)
    first, last = toy.load(0), toy.load(30)
    text = builtin_corpus()[0]
    tokens = first.to_tokens(text)[:, :16]
    assert torch.equal(tokens, last.to_tokens(text)[:, :16])
    assert tokens[0, 0] == first.tokenizer.bos_token_id
    assert first.to_string(tokens[0, 1:]) in text
    with torch.no_grad():
        losses = [model(tokens, return_type="loss").item() for model in (first, last)]
    assert losses[1] < losses[0]
    with pytest.raises(InputError, match="no checkpoint of step 31"):
        toy.load(31)


def test_log_spaced_steps() -> None:
    assert log_spaced(100, 3) == (0, 1, 10, 100)
    assert log_spaced(2, 8) == (0, 1, 2)
    assert log_spaced(600)[-1] == 600


def test_what_cannot_be_trained_is_refused(toy: TinyGPT, tmp_path: Path) -> None:
    bad = [
        ({"steps": 0}, "steps"),
        ({"heads": 3}, "multiple"),
        ({"vocabulary": 200}, "vocabulary"),
        ({"checkpoints": [5000]}, "checkpoints"),
        ({"checkpoints": []}, "checkpoints"),
        ({"texts": ["short"]}, "one sequence takes"),
    ]
    for options, words in bad:
        with pytest.raises(InputError, match=words):
            train_tiny_gpt(tmp_path / "none", **{**SMALL, **options})
    with pytest.raises(InputError, match="not empty"):
        train_tiny_gpt(toy.paths[0].parent, **SMALL)


@pytest.mark.slow
def test_three_checkpoints_analysed_and_compared(tmp_path: Path) -> None:
    """End to end: train, analyse checkpoints, compare; what training changes is seen to change."""
    toy = train_tiny_gpt(tmp_path / "gpt", steps=300, checkpoints=[0, 30, 300])
    assert toy.losses[-20:].mean() < toy.unigram_entropy - 0.5
    first = toy.load(0)
    texts = [first.to_tokens(text)[0, :16] for text in builtin_corpus(seed=1)[:120]]
    runs = [
        tls.analyze(
            toy.load(step), texts, out=tmp_path / f"run{step}", jacobian_samples=4, jobs=1,
            spectrum_samples=4, louvain_runs=3, permutations=100, power_texts=8,
        )
        for step in toy.steps
    ]  # fmt: skip
    comparison = compare(*runs, steps=toy.steps)
    assert comparison.labels == ("step_000000", "step_000030", "step_000300")
    table = comparison.trajectory()
    rank = table[(table["metric"] == "effective_rank") & (table["family"] == "chain")]
    rank = rank[rank["units"] == "raw"].set_index("step")
    assert rank["mean"][300] < 0.7 * rank["mean"][0]  # the funnel is learned
    # Four layers make no usable interval; the error over prompts does.
    assert rank["difference"][300] + 3 * rank["sampling_error"][300] < 0
    assert set(table["family"]) >= {"spectra", "chain", "coupling", "communities", "ov"}
    comparison.plot()
    comparison.plot_trajectory().write_html(tmp_path / "trajectory.html")
