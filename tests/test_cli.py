"""The command line: what it prints, what it writes, and how it fails."""

from __future__ import annotations

import inspect
import re
import warnings
from pathlib import Path

import pandas as pd
import pytest
import torch
import transformers as tf
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from typer.testing import CliRunner

import tl_spectral as tls
from tl_spectral import cli
from tl_spectral.errors import InputError, TLSpectralWarning

WORDS = [
    *("the", "cat", "sat", "on", "a", "mat", "and", "dog"),
    *("ran", "far", "from", "red", "house", "by", "old", "sea"),
]
QUICK = ["--jacobian-samples", "2", "--spectrum-samples", "2", "--tokens", "5", "--jobs", "1"]


def command(*arguments: object, width: int = 200):
    return CliRunner().invoke(
        cli.app, [str(argument) for argument in arguments], env={"COLUMNS": str(width)}
    )


def words(text: str) -> str:
    """Text without the line breaks and frames of a terminal."""
    return " ".join(re.sub(r"[│┃╭╮╰╯─]", " ", text).split())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama in a directory: what a user may name on the command line."""
    path = tmp_path_factory.mktemp("model") / "tiny-llama"
    vocabulary = {word: i for i, word in enumerate(["<unk>", "<s>", "</s>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}
    tf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(path)
    config = tf.LlamaConfig(
        vocab_size=len(vocabulary), hidden_size=16, intermediate_size=32, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        tf.LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    generator = torch.Generator().manual_seed(0)
    picked = torch.randint(len(WORDS), (24, 6), generator=generator).tolist()
    path = tmp_path_factory.mktemp("texts") / "prompts.txt"
    path.write_text("\n".join(" ".join(WORDS[i] for i in row) for row in picked))
    return path


@pytest.fixture(scope="module")
def finished(model: Path, texts: Path, tmp_path_factory: pytest.TempPathFactory):
    out = tmp_path_factory.mktemp("runs") / "tiny"
    arguments = ["--texts", texts, "--control", "random-init", "--out", out]
    return command("analyze", model, *arguments, *QUICK), out, arguments


def test_analyze_ends_with_findings_and_the_report(finished):
    result, out, _ = finished
    assert result.exit_code == 0, (result.output, result.exception)
    run = tls.load(out)
    told = words(result.stdout)
    for row in run.findings.fillna("").to_dict("records"):
        assert words(row["sentence"]) in told
        assert f"{row['claim']} ({row['verdict']})" in told
    assert result.stdout.splitlines()[-1] == f"Report: {out / 'report.html'}"
    assert (out / "report.html").read_text().startswith("<!doctype html>")


def test_progress_goes_to_stderr_with_the_time_left(finished):
    result, _, _ = finished
    assert re.search(r"\d+% trained: .+, \d+:\d\d left\)", result.stderr)
    assert "100%" in result.stderr
    assert "%" not in result.stdout.split("Findings")[0]


def test_every_option_reaches_the_run(finished, model, texts, tmp_path):
    _, first, _ = finished
    expected = tls.load(first).options
    assert (expected["layers"], expected["tokens_per_text"]) == ([0, 1, 2], 5)
    out = tmp_path / "run"
    result = command(
        "analyze", model, "--texts", texts, "--out", out, "--layers", "1-2", "--samples", 20,
        "--jacobian-samples", 3, "--spectrum-samples", 1, "--tokens", 0, "--pos", -2,
        "--context", "isolated", "--seed", 7, "--jobs", 1,
    )  # fmt: skip
    assert result.exit_code == 0, (result.output, result.exception)
    options = tls.load(out).options
    given = {
        "layers": [1, 2], "samples": 20, "jacobian_samples": 3, "spectrum_samples": 1,
        "tokens_per_text": None, "pos": -2, "context": "isolated", "seed": 7, "control": None,
    }  # fmt: skip
    assert {name: options[name] for name in given} == given


def test_defaults_are_those_of_python():
    here = inspect.signature(cli.analyze).parameters
    there = inspect.signature(tls.analyze).parameters
    names = {"tokens": "tokens_per_text"}
    compared = 0
    for name, parameter in here.items():
        other = there.get(names.get(name, name))
        if other is not None and name not in ("model", "out", "texts"):
            assert parameter.default == other.default, name
            compared += 1
    assert compared >= 10


def test_a_repeated_command_only_tells_again(finished, model):
    first, out, arguments = finished
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*.safetensors")}
    result = command("analyze", model, *arguments, *QUICK)
    assert result.exit_code == 0
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*.safetensors")} == before
    said = [text.split("\nTook")[0] for text in (first.stdout, result.stdout)]
    assert said[0] == said[1]


def test_a_directory_of_another_run_is_refused(finished, model):
    _, _, arguments = finished
    result = command("analyze", model, *arguments, *QUICK, "--seed", "1")
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1].startswith("Error: ")
    assert "seed" in result.stderr
    assert "Traceback" not in result.output


def test_report_is_made_again(finished, tmp_path):
    _, out, _ = finished
    made = (out / "report.html").read_bytes()
    other = tmp_path / "again.html"
    result = command("report", out, "--out", other)
    assert result.exit_code == 0
    assert result.stdout == f"Report: {other}\n"
    assert other.read_bytes() == made


def test_warnings_are_one_line(finished, model, texts, tmp_path):
    result = command(
        "analyze", model, "--texts", texts, "--samples", 10, "--layers", "0", "--out",
        tmp_path / "few", *QUICK,
    )  # fmt: skip
    assert result.exit_code == 0
    lines = [line for line in result.stderr.splitlines() if "10 texts for 16 units" in line]
    assert len(lines) == 1
    assert lines[0].startswith("Warning: ")


def test_warnings_of_others_are_left_to_python():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        shown: list[object] = []
        warnings.showwarning = lambda message, *rest, **more: shown.append(message)
        with cli._one_line_each():
            warnings.warn("someone else's", UserWarning, stacklevel=1)
            warnings.warn("ours", TLSpectralWarning, stacklevel=1)
    assert [str(message) for message in shown] == ["someone else's"]
    assert caught == []


@pytest.mark.parametrize(
    ("arguments", "words_in_it"),
    [
        (["analyze", "MODEL", "--texts", "nowhere.txt", "--out", "OUT"], "no file nowhere.txt"),
        (["analyze", "MODEL", "--texts", "TEXTS", "--dataset", "x", "--out", "OUT"], "not both"),
        (["analyze", "MODEL", "--texts", "TEXTS", "--layers", "3-1", "--out", "OUT"], "0,4,8-11"),
        (["analyze", "MODEL", "--texts", "TEXTS", "--layers", "0-3", "--out", "OUT"], "3"),
        (["analyze", "MODEL", "--texts", "TEXTS", "--pos", "40", "--out", "OUT"], "40"),
        (["analyze", "MODEL", "--texts", "TEXTS", "--samples", "2", "--out", "OUT"], "at least 3"),
        (["analyze", "./nowhere", "--texts", "TEXTS", "--out", "OUT"], "nowhere"),
        (["report", "OUT"], "no run"),
        (["ov", "MODEL", "--layers", "7"], "7"),
        (["ov", "nowhere.gguf"], "nowhere.gguf"),
    ],
)
def test_bad_input_gets_a_line_and_writes_nothing(arguments, words_in_it, model, texts, tmp_path):
    out = tmp_path / "out"
    names = {"MODEL": model, "TEXTS": texts, "OUT": out}
    result = command(*(names.get(argument, argument) for argument in arguments))
    assert result.exit_code == 2
    last = result.stderr.splitlines()[-1]
    assert last.startswith("Error: ")
    assert words_in_it in last
    assert "Traceback" not in result.output
    assert not out.exists()


def test_stopped_by_hand_says_how_to_go_on(monkeypatch, model, texts, tmp_path):
    def stop(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("tl_spectral.analysis.analyze", stop)
    result = command("analyze", model, "--texts", texts, "--out", tmp_path / "run")
    assert result.exit_code == 130
    assert "same command" in result.stderr


@pytest.mark.parametrize(
    ("layers", "chosen"),
    [(None, None), ("0", [0]), ("0-2,7", [0, 1, 2, 7]), (" 3 , 1-2, 2", [1, 2, 3])],
)
def test_layers(layers, chosen):
    assert cli._numbers(layers) == chosen


@pytest.mark.parametrize("layers", ["", "a", "1-", "-1", "2-1", "1,,2", "1.5", "0-3-5"])
def test_layers_that_are_none(layers):
    with pytest.raises(InputError, match="--layers takes"):
        cli._numbers(layers)


def test_models_lists_what_to_type():
    result = command("models")
    assert result.exit_code == 0
    assert "smollm2-135m" in result.stdout


def test_ov_prints_every_head_and_writes_the_matrices(model, tmp_path):
    out = tmp_path / "ov"
    result = command("ov", model, "--layers", "0,2", "--out", out)
    assert result.exit_code == 0, (result.output, result.exception)
    heads = pd.read_csv(out / "heads.csv")
    assert len(heads) == 2 * 4
    for score in heads["copying_score"]:
        assert f"{score:+.2f}" in result.stdout
    modes = pd.read_csv(out / "layers.csv")
    matrices = load_file(out / "F.safetensors")
    assert sorted(matrices) == ["F.0", "F.2"]
    # the dominant mode without the skip is the spectral radius of the matrix that was written
    for layer in (0, 2):
        row = modes[(modes["layer"] == layer) & (modes["rule"] == "without_skip")].iloc[0]
        radius = torch.linalg.eigvals(matrices[f"F.{layer}"]).abs().max().item()
        assert abs(complex(row["eigenvalue_re"], row["eigenvalue_im"])) == pytest.approx(radius)


@pytest.mark.parametrize("name", ["analyze", "report", "models", "ov"])
def test_help_has_an_example(name):
    result = command(name, "--help")
    assert result.exit_code == 0
    assert f"Example: tl-spectral {name}" in words(result.stdout)


def test_time_is_told_in_minutes_and_seconds():
    assert [cli._duration(s) for s in (0.4, 61.0, 3599.9)] == ["0:00", "1:01", "59:59"]


# ---------------------------------------------------------------------- steer


@pytest.fixture(scope="module")
def steered(model: Path, texts: Path, tmp_path_factory: pytest.TempPathFactory):
    out = tmp_path_factory.mktemp("steered") / "cat"
    few = out.parent / "few.txt"
    few.write_text("\n".join(texts.read_text().splitlines()[:3]))
    arguments = ["--texts", few, "--generate", 4, "--sweep", "--out", out]
    return command("steer", model, "--toward", "cat", *arguments, width=240), out


def test_steer_prints_conditions_tokens_and_continuations(steered):
    result, out = steered
    assert result.exit_code == 0, (result.output, result.exception)
    table = pd.read_csv(out / "steering.csv").set_index("condition")
    told = words(result.stdout)
    for condition in table.index:
        assert condition in told
    for name in ("original", "steered"):
        assert f"{table.loc[name, 'alignment']:.3f} ± {table.loc[name, 'alignment_se']:.3f}" in told
        assert f"{table.loc[name, 'perplexity']:.3g}" in told
    report = tls.SteeringReport.load(out / "steering.safetensors")
    assert (report.source, report.layer, report.method) == ("token 'cat'", 2, "weights")
    assert report.gap == pytest.approx(5, rel=1e-5)
    for spoken in report.generations:
        for text in spoken.values():
            assert words(text) in told
    assert f"{report.reach:.0%} of w can be read" in told
    assert repr(report.top_tokens[0]["after"][0][0]) in told


def test_steer_writes_the_sweep_and_a_page_that_needs_nothing_else(steered):
    result, out = steered
    sweep = pd.read_csv(out / "sweep.csv")
    assert set(sweep["method"]) == {"weights", "hook"}
    last = sweep[(sweep["condition"] == "steered") & (sweep["gap"] == 20)].iloc[-1]
    assert f"{last['alignment']:.3f}" in result.stdout
    page = (out / "steering.html").read_text()
    assert page.count('class="plotly-graph-div"') == 2
    assert "towards token &#x27;cat&#x27;" in page
    assert "<script src=" not in page
    assert result.stdout.splitlines()[-1] == f"Figures and tables: {out / 'steering.html'}"
    assert "100% done" in result.stderr


def test_steer_by_contrast_alpha_and_added_vector(model, texts, tmp_path):
    few = tmp_path / "few.txt"
    few.write_text("the cat sat\non a mat")
    for method, extra in (("additive", ["--layer", 0]), ("hook", ["--away", "the dog ran"])):
        result = command(
            "steer", model, "--toward", "cat", "--texts", few, "--generate", 0, "--seed", 3,
            "--method", method, "--alpha", 0.5, "--out", tmp_path / method, *extra,
        )  # fmt: skip
        assert result.exit_code == 0, (result.output, result.exception)
        report = tls.SteeringReport.load(tmp_path / method / "steering.safetensors")
        assert (report.method, report.alpha, report.generations) == (method, 0.5, ())
        assert report.provenance.seed == 3
        assert not (tmp_path / method / "sweep.csv").exists()
    assert report.source == "contrast of texts"
    assert tls.SteeringReport.load(tmp_path / "additive" / "steering").layer == 0


@pytest.mark.parametrize(
    ("arguments", "words_in_it"),
    [
        (["--toward", "cat", "--texts", "nowhere.txt"], "no file nowhere.txt"),
        (["--toward", "cat sat"], "2 tokens"),
        (["--toward", "cat", "--layer", 3], "layer 3 does not exist"),
        (["--toward", "cat", "--gap", 1], "above 1"),
        (["--toward", "cat", "--gap", 2, "--alpha", 1], "not both"),
        (["--toward", "cat", "--method", "additive"], "Give alpha"),
    ],
)
def test_steer_refuses_in_a_line_and_writes_nothing(arguments, words_in_it, model, texts, tmp_path):
    out = tmp_path / "out"
    given = [] if "--texts" in arguments else ["--texts", texts]
    result = command("steer", model, *given, *arguments, "--out", out)
    assert result.exit_code == 2
    last = result.stderr.splitlines()[-1]
    assert last.startswith("Error: ")
    assert words_in_it in last
    assert not out.exists()


def test_steer_help_has_an_example():
    result = command("steer", "--help")
    assert result.exit_code == 0
    assert "Example: tl-spectral steer" in words(result.stdout)
