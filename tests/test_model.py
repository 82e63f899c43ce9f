"""The seam: what is refused and how, and that a model is left as it was found.

Changed to see these tests fail: requires_grad flags not restored; facts about a model never
refreshed; train mode looked for at the top module only; the wrong value head of a group
(repeat for repeat_interleave); NaN let through; compatibility mode not recorded.
"""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from oracles import ENCODERS, prompts, relative
from torch import Tensor
from transformer_lens import TransformerBridgeConfig
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.model_bridge.sources import build_bridge_from_module
from zoo import ARCHITECTURES, HEADS, LAYERS, WIDTH, tiny

import tl_spectral as tls
from tl_spectral.errors import (
    InputError,
    ModelStateError,
    ProvenanceError,
    TLSpectralWarning,
    UnsupportedModelError,
)
from tl_spectral.model import ModelView

ModelOf = Callable[..., Any]
every_architecture = pytest.mark.parametrize("name", ARCHITECTURES)


def native(**options: Any) -> Any:
    shape: dict[str, Any] = {
        "d_model": 12, "d_head": 4, "n_heads": 3, "n_layers": 2, "n_ctx": 8,
        "d_vocab": 20, "d_mlp": 16, "act_fn": "gelu", "seed": 0,
    }  # fmt: skip
    return TransformerBridge.boot_native(TransformerBridgeConfig(**{**shape, **options})).eval()


# ---------------------------------------------------------------------------------- left as found


def everything(model: Any, tokens: Tensor) -> None:
    """One of each thing that runs the model."""
    tls.capture(model, tokens)
    tls.block_jacobian(model, tokens, 1)
    tls.block_jacobian(model, tokens, 1, context="isolated")
    tls.block_jacobian(model, tokens, 1, -1, -2)
    tls.span_jacobian(model, tokens, 0, 2)
    operator = tls.jacobian_operator(model, tokens, 1)
    operator @ torch.ones(WIDTH)
    _ = list(tls.block_jacobians(model, tokens, engine="reference"))


def picture(model: Any, tokens: Tensor) -> dict[str, Any]:
    with torch.no_grad():
        logits = model(tokens)
    return {
        "weights": {name: p.detach().clone() for name, p in model.named_parameters()},
        "buffers": {name: b.clone() for name, b in model.named_buffers()},
        "identity": [id(p) for p in model.parameters()],
        "versions": [p._version for p in model.parameters()],
        "flags": [p.requires_grad for p in model.parameters()],
        "grads": [p.grad for p in model.parameters()],
        "training": [m.training for m in model.modules()],
        "hooks": {
            name: (len(point.fwd_hooks), len(point.bwd_hooks), len(point._forward_hooks))
            for name, point in model.hook_dict.items()
        },
        "logits": logits,
        "config": copy.deepcopy(vars(model.cfg)),
    }


def assert_same(before: dict[str, Any], after: dict[str, Any]) -> None:
    for kind in ("weights", "buffers"):
        assert before[kind].keys() == after[kind].keys()
        assert all(torch.equal(before[kind][name], after[kind][name]) for name in before[kind])
    for kind in ("identity", "versions", "flags", "grads", "training", "hooks"):
        assert before[kind] == after[kind], kind
    assert torch.equal(before["logits"], after["logits"])
    assert str(before["config"]) == str(after["config"])


@every_architecture
def test_model_is_left_as_found(name: str, prompt: Tensor) -> None:
    model = tiny(name)
    for number, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(number % 3 != 0)
    before = picture(model, prompt)
    random = torch.get_rng_state()
    everything(model, prompt)
    assert_same(before, picture(model, prompt))
    assert torch.equal(random, torch.get_rng_state())


def test_users_hooks_stay_and_fire_and_count(prompt: Tensor) -> None:
    model = tiny("llama")
    plain = tls.block_jacobian(model, prompt, 1).matrix
    fired: list[str] = []
    model.add_hook("blocks.1.hook_mlp_out", lambda a, hook: fired.append(hook.name))
    model.add_hook("blocks.1.attn.hook_out", lambda a, hook: a * 0, is_permanent=True)
    before = picture(model, prompt)
    fired.clear()
    everything(model, prompt)
    assert fired
    assert_same(before, picture(model, prompt))
    # The Jacobian is that of the model as the user has it: attention switched off.
    edited = tls.block_jacobian(model, prompt, 1)
    assert relative(edited.matrix - plain, plain) > 1e-2
    mlp = tls.block_jacobian(model, prompt, 1, scope="mlp").matrix
    assert torch.allclose(edited.matrix, mlp, atol=1e-5)


def test_users_backward_hooks_do_not_disturb(prompt: Tensor) -> None:
    model = tiny("gpt2")
    plain = tls.block_jacobian(model, prompt, 1, engine="reference").matrix
    model.add_hook("blocks.1.hook_mlp_out", lambda gradient, hook: None, dir="bwd")
    again = tls.block_jacobian(model, prompt, 1, engine="reference").matrix
    assert torch.allclose(plain, again, atol=1e-6)


def test_left_as_found_after_an_exception_in_a_hook(prompt: Tensor) -> None:
    model = tiny("gpt2")
    everything(model, prompt)
    calls = 0

    def fail(activation: Tensor, hook: Any) -> None:
        nonlocal calls
        calls += 1
        if calls > 1:  # the picture's own forward pass may go through
            raise RuntimeError("the user's own hook fails")

    model.add_hook("blocks.1.hook_mlp_out", fail)
    before = picture(model, prompt)
    for analyse in (
        lambda: tls.capture(model, prompt),
        lambda: tls.block_jacobian(model, prompt, 1),
        lambda: tls.block_jacobian(model, prompt, 1, engine="reference"),
        lambda: tls.span_jacobian(model, prompt, 0, 3),
        lambda: tls.jacobian_operator(model, prompt, 1),
    ):
        with pytest.raises(RuntimeError, match="own hook"):
            analyse()
    calls = 0
    assert_same(before, picture(model, prompt))


def test_left_as_found_after_refused_input(prompt: Tensor) -> None:
    model = tiny("gpt2")
    before = picture(model, prompt)
    for refused in (
        lambda: tls.capture(model, [], 0),
        lambda: tls.block_jacobian(model, prompt, 9),
        lambda: tls.block_jacobian(model, prompt, 0, 9),
        lambda: tls.block_jacobians(model, prompt, [7]),
        lambda: tls.span_jacobian(model, prompt, 2, 1),
    ):
        with pytest.raises(InputError):
            refused()
    assert_same(before, picture(model, prompt))


def test_an_abandoned_iterator_leaves_nothing_behind(prompt: Tensor) -> None:
    model = tiny("gpt2")
    before = picture(model, prompt)
    iterator = tls.block_jacobians(model, prompt)
    next(iterator)
    assert_same(before, picture(model, prompt))
    del iterator
    assert_same(before, picture(model, prompt))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_callers_gradient_mode_does_not_matter(mode: Any, prompt: Tensor) -> None:
    """Also when it is the first thing that ever looks at the model."""
    model, twin = tiny("llama"), tiny("llama")
    with mode():
        inside = tls.block_jacobian(model, prompt, 1).matrix
        product = tls.jacobian_operator(model, prompt, 1) @ torch.eye(WIDTH)
    outside = tls.block_jacobian(twin, prompt, 1).matrix
    assert torch.equal(inside, outside)
    assert torch.allclose(product, outside, atol=1e-5)
    assert torch.equal(tls.block_jacobian(model, prompt, 1).matrix, outside)


def test_weights_made_under_inference_mode_are_refused(prompt: Tensor) -> None:
    with torch.inference_mode():
        model = tiny("gpt2")
    with pytest.raises(ModelStateError, match="Load it outside"):
        tls.capture(model, prompt)


# --------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    "what",
    [None, "gpt2", torch.nn.Linear(2, 2), object()],
    ids=["None", "a name", "a module", "an object"],
)
def test_what_is_no_bridge(what: Any, prompt: Tensor) -> None:
    for call in (
        lambda: tls.capture(what, prompt),
        lambda: tls.block_jacobian(what, prompt, 0),
        lambda: tls.reinitialised(what),
    ):
        with pytest.raises(UnsupportedModelError, match=r"Expected a .*TransformerBridge.*boot_tr"):
            call()


def test_a_bare_hugging_face_model_is_refused(prompt: Tensor) -> None:
    hf = tf.GPT2LMHeadModel(tf.GPT2Config(vocab_size=9, n_embd=8, n_head=2, n_layer=1))
    with pytest.raises(UnsupportedModelError, match="got GPT2LMHeadModel"):
        tls.capture(hf, prompt)


def test_encoder_decoders_are_refused(prompt: Tensor) -> None:
    config = tf.T5Config(vocab_size=64, d_model=16, d_kv=4, d_ff=20, num_layers=2, num_heads=4)
    hf = tf.T5ForConditionalGeneration(config).eval()
    model = build_bridge_from_module(
        hf, architecture="T5ForConditionalGeneration", hf_config=config, model_name="tiny-t5",
        dtype=torch.float32,
    )  # fmt: skip
    with pytest.raises(UnsupportedModelError, match="tiny-t5 has no single stack of blocks"):
        tls.block_jacobian(model, prompt, 0)


def test_blocks_without_a_single_stream_are_refused(
    prompt: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("gpt2")
    kind = type(model.blocks[1])
    monkeypatch.setattr(kind, "hook_out_is_single_residual_stream", False, raising=False)
    with pytest.raises(UnsupportedModelError, match="does not output one residual stream"):
        tls.capture(model, prompt)


def test_train_mode_anywhere_is_refused(prompt: Tensor) -> None:
    model = tiny("gpt2")
    tls.capture(model, prompt)
    quiet = model.blocks[2].mlp.original_component.dropout
    quiet.train()
    with pytest.raises(ModelStateError, match=r"train mode at .*dropout.*model\.eval\(\)"):
        tls.block_jacobian(model, prompt, 0)
    model.eval()
    tls.block_jacobian(model, prompt, 0)
    with pytest.raises(ModelStateError, match="train mode"):
        tls.capture(model.train(), prompt)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_are_refused(value: float, prompt: Tensor) -> None:
    model = tiny("gpt2")
    tls.capture(model, prompt)  # the fingerprint is remembered, and must be forgotten
    weight = model.blocks[1].mlp.out.original_component.weight
    with torch.no_grad():
        weight[3, 4] = value
    for call in (
        lambda: tls.capture(model, prompt),
        lambda: tls.block_jacobian(model, prompt, 0),
        lambda: tls.reinitialised(model),
    ):
        with pytest.raises(ModelStateError, match=r"mlp.*weight.* holds NaN or infinite values"):
            call()
    with torch.no_grad():
        weight[3, 4] = 0.0
    tls.capture(model, prompt)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"layer": 3}, "layer 3 does not exist: tiny-gpt2 has 3 layers, 0 to 2"),
        ({"layer": -4}, "layer -4 does not exist"),
        ({"layer": True}, "layer must be an integer"),
        ({"pos": 9}, "pos 9 does not exist in a text of 9 tokens"),
        ({"pos": -10}, "pos -10 does not exist"),
        ({"source_pos": 9}, "source_pos 9 does not exist"),
        ({"pos": 3, "source_pos": 4}, "cannot depend on a later one"),
        ({"source_pos": 3, "context": "isolated"}, "no other position"),
        ({"engine": "fast", "source_pos": 3}, "follows one position only"),
        ({"chunk": 0}, "chunk must be a positive integer"),
        ({"chunk": -1}, "chunk must be a positive integer"),
    ],
    ids=str,
)
def test_bad_arguments(bad: dict[str, Any], message: str, gpt2: Any, prompt: Tensor) -> None:
    with pytest.raises(InputError, match=message):
        tls.block_jacobian(gpt2, prompt, **{"layer": 1, **bad})


def test_bad_iterator_arguments_are_refused_before_the_first_step(
    gpt2: Any, prompt: Tensor
) -> None:
    with pytest.raises(InputError, match="names a layer twice"):
        tls.block_jacobians(gpt2, prompt, [0, 0])
    with pytest.raises(InputError, match="pos 9"):
        tls.sample_jacobians(gpt2, prompt, pos=9)


@pytest.mark.parametrize(("start", "stop"), [(0, 0), (2, 1), (0, 4), (0, -1), (1, True)])
def test_bad_spans(start: int, stop: int, gpt2: Any, prompt: Tensor) -> None:
    with pytest.raises(InputError, match=r"stop must be an integer from \d to 3"):
        tls.span_jacobian(gpt2, prompt, start, stop)
    with pytest.raises(InputError, match="layer 3 does not exist"):
        tls.span_jacobian(gpt2, prompt, 3, 4)


def test_wrong_types_get_a_sentence_without_the_type_checker() -> None:
    """Under pytest jaxtyping refuses these first; a user has no such checker."""
    code = """
    import tl_spectral as tls, torch
    from tl_spectral.errors import InputError
    from zoo import tiny
    model, tokens = tiny("gpt2"), torch.full((1, 5), 3)
    J = lambda **bad: tls.block_jacobian(model, tokens, **{"layer": 1, **bad})
    for call, message in [
        (lambda: J(layer=1.0), "layer must be an integer"),
        (lambda: J(layer="1"), "layer must be an integer"),
        (lambda: J(layer=None), "layer must be an integer"),
        (lambda: J(pos="last"), "pos must be an integer"),
        (lambda: J(context="none"), "context must be one of"),
        (lambda: J(scope="head"), "scope must be one of"),
        (lambda: J(engine="slow"), "engine must be"),
        (lambda: J(chunk=2.5), "chunk must be a positive integer"),
        (lambda: tls.capture(model, tokens, 1.0), "must be an integer"),
        (lambda: tls.capture(model, tokens, layers=1), "must be a sequence"),
        (lambda: tls.capture(model, tokens, layers="01"), "must be a sequence"),
        (lambda: tls.capture(model, tokens, layers=[0.0]), "layer must be an integer"),
        (lambda: tls.capture(model, tokens, sites=["resid_end"]), "sites must be among"),
        (lambda: tls.capture(model, tokens).site("resid_end"), "hook must be one of"),
        (lambda: tls.span_jacobian(model, tokens, 0, 1.5), "stop must be an integer"),
    ]:
        try:
            call()
        except InputError as error:
            assert message in str(error), (message, str(error))
        else:
            raise AssertionError(message)
    import numpy as np
    assert J(layer=np.int64(1), pos=np.int64(2)).pos == 2
    assert tls.capture(model, tokens, layers=np.arange(2)).layers == (0, 1)
    """
    environment = {"PYTHONPATH": str(Path(__file__).parent)}
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        check=True,
        env={**os.environ, **environment},
    )


# --------------------------------------------------------------------------------- half precision


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_upcast_and_recorded(dtype: torch.dtype, prompt: Tensor) -> None:
    model = tiny("gpt2").to(dtype)
    twin = tiny("gpt2")  # the same weights, rounded
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.copy_(parameter.to(dtype))
    with pytest.warns(TLSpectralWarning, match="half precision; it is analysed in a float32 copy"):
        J = tls.block_jacobian(model, prompt, 1)
    assert J.matrix.dtype == torch.float32
    name = str(dtype).removeprefix("torch.")
    assert J.provenance.dtype == f"{name} upcast to float32"
    expected = tls.block_jacobian(twin, prompt, 1)
    assert relative(J.matrix - expected.matrix, expected.update) < 1e-5
    assert expected.provenance.dtype == "float32"
    with pytest.warns(TLSpectralWarning):
        states = tls.capture(model, prompt)
    assert states.resid_pre.dtype == torch.float32
    assert {p.dtype for p in model.parameters()} == {dtype}


def test_the_float32_copy_follows_its_original(prompt: Tensor) -> None:
    model = tiny("llama").to(torch.bfloat16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TLSpectralWarning)
        first = tls.block_jacobian(model, prompt, 1)
        again = tls.block_jacobian(model, prompt, 1)
        assert torch.equal(first.matrix, again.matrix)
        for parameter in model.parameters():
            parameter.data.mul_(1.5)  # leaves no trace in the parameter's version
        changed = tls.block_jacobian(model, prompt, 1)
    assert relative(changed.matrix - first.matrix, first.matrix) > 1e-2
    assert changed.provenance.fingerprint != first.provenance.fingerprint


def test_float64_stays(model_of: ModelOf, prompt: Tensor) -> None:
    model = model_of("gpt2", torch.float64)
    assert tls.block_jacobian(model, prompt, 1).matrix.dtype == torch.float64
    assert tls.capture(model, prompt).resid_pre.dtype == torch.float64
    assert ModelView(model).provenance().dtype == "float64"


# ------------------------------------------------------------------------------------- provenance


def test_fingerprints() -> None:
    prints = {
        ModelView(tiny(name, seed=seed)).fingerprint
        for name in ("gpt2", "llama")
        for seed in (0, 1)
    }
    assert len(prints) == 4
    model = tiny("gpt2")
    first = ModelView(model).fingerprint
    assert (
        ModelView(tiny("gpt2")).fingerprint == first == ModelView(copy.deepcopy(model)).fingerprint
    )
    with torch.no_grad():
        model.blocks[0].mlp.out.original_component.weight[1, 2] += 1e-3
    assert ModelView(model).fingerprint != first


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2"])
def test_compatibility_mode_is_recorded_and_not_mixed(name: str, prompt: Tensor) -> None:
    """Folding and centring: R becomes P R with P = I − 11ᵀ/d for LayerNorm, J stays for RMSNorm."""
    model = tiny(name)
    raw = tls.block_jacobian(model, prompt, 1)
    model.enable_compatibility_mode(disable_warnings=True)
    compat = tls.block_jacobian(model, prompt, 1)
    assert (raw.provenance.weights, compat.provenance.weights) == ("raw", "compat")
    assert raw.provenance.model == compat.provenance.model
    with pytest.raises(ProvenanceError, match="weights is 'raw' for one and 'compat'"):
        raw.provenance.require_same_model(compat.provenance, "Jacobians")
    P = torch.eye(WIDTH) - 1 / WIDTH if name == "gpt2" else torch.eye(WIDTH)
    assert relative(compat.update - P @ raw.update, raw.update) < 1e-5
    assert torch.allclose(compat.norm_gain, torch.ones(WIDTH), atol=1e-5)
    assert ModelView(tls.reinitialised(model)).weights == "compat"


# ------------------------------------------------------------------------------------- OV factors


@every_architecture
def test_ov_factors_give_the_attention_output(name: str, model_of: ModelOf) -> None:
    """One token, so every pattern is 1: Σ_h (x W_V + b_V) W_O + b_O, linear in x."""
    model, seen = model_of(name), {}
    token = prompts(1, 1)

    def watch(key: str) -> Any:
        return lambda a, hook: seen.__setitem__(key, a.reshape(-1, a.shape[-1]).clone())

    def nudge(activation: Tensor, hook: Any) -> Tensor:
        return activation + torch.linspace(-1, 1, WIDTH)

    # attn.hook_out of BLOOM holds the skip connection, that of encoders the norm after it.
    parts = {"bloom": "hook_attn_out", **dict.fromkeys(ENCODERS, "attn.o.hook_out")}
    out = f"blocks.1.{parts.get(name, 'attn.hook_out')}"
    outputs, inputs = [], []
    for hooks in ([], [("blocks.1.hook_in", nudge)]):
        watching = [("blocks.1.attn.hook_in", watch("in")), (out, watch("out"))]
        with torch.no_grad():
            model.run_with_hooks(token, return_type=None, fwd_hooks=hooks + watching)
        inputs.append(seen["in"])
        outputs.append(seen["out"])
    W_V, W_O = ModelView(model).ov_factors(1)
    assert W_V.shape == (HEADS, WIDTH, WIDTH // HEADS)
    assert W_O.shape == (HEADS, WIDTH // HEADS, WIDTH)
    assert not W_V.requires_grad
    change = torch.einsum("bi,hik,hko->bo", inputs[1] - inputs[0], W_V, W_O)
    assert relative(change - (outputs[1] - outputs[0]), change) < 1e-4


def test_grouped_queries_share_their_own_value_head(llama: Any) -> None:
    grouped = llama.blocks[0].attn.W_V.detach()
    assert grouped.shape[0] == 2
    W_V, _ = ModelView(llama).ov_factors(0)
    for head in range(HEADS):
        assert torch.equal(W_V[head], grouped[head // 2])


def test_models_without_heads_have_no_ov() -> None:
    config = tf.MambaConfig(vocab_size=20, hidden_size=16, num_hidden_layers=2, state_size=4)
    model = build_bridge_from_module(
        tf.MambaForCausalLM(config).eval(), architecture="MambaForCausalLM", hf_config=config,
        model_name="tiny-mamba", dtype=torch.float32,
    )  # fmt: skip
    with pytest.raises(UnsupportedModelError, match="OV circuits need standard attention"):
        ModelView(model).ov_factors(0)
    J = tls.block_jacobian(model, torch.tensor([[3, 4, 5]]), 1)  # its Jacobian is one like any
    assert J.engine == "reference"
    assert J.matrix.isfinite().all()


# ------------------------------------------------------------------------------- small and odd ones


def test_small_vocabulary_and_odd_width() -> None:
    config = tf.GPT2Config(vocab_size=3, n_embd=15, n_head=3, n_layer=2, n_positions=8)
    hf = tf.GPT2LMHeadModel(config).eval()
    weight = torch.linspace(0.5, 2, 15)
    hf.transformer.h[1].ln_1.weight.data = weight.clone()
    model = build_bridge_from_module(
        hf, architecture="GPT2LMHeadModel", hf_config=config, model_name="odd", dtype=torch.float32
    )
    assert torch.allclose(ModelView(model).norm_gain(1), weight, atol=1e-5)


def test_models_without_norms_have_no_gain() -> None:
    view = ModelView(native(normalization_type=None))
    assert view.norm_gain(0) is None
    assert ModelView(native()).norm_gain(0) is not None


def test_layer_and_position_names(gpt2: Any) -> None:
    view = ModelView(gpt2)
    assert [view.layer(i) for i in (-3, -1, 0, 2)] == [0, 2, 0, 2]
    assert [view.position(i, 5) for i in (-5, -1, 0, 4)] == [0, 4, 0, 4]
    assert view.layers(None) == tuple(range(LAYERS))
    assert view.hook_name(1, "resid_pre") == "blocks.1.hook_in"
    assert view.hook_name(1, "resid_post") == "blocks.1.hook_out"
    assert view.name == "tiny-gpt2"
    assert view.architecture == "GPT2LMHeadModel"
