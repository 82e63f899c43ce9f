"""The fast engine gives the reference engine's matrix, knows when it cannot, and says so.

Lines that were changed to see these tests fail, and which did:
  own key, own weight or gate left out of the matrix ... equals_reference
  a wrong factor, found out and not used ............... reason_names_what_is_assembled
  plain attention assumed without a look at its result . reason_names_what_is_assembled[gemma2]
  another softmax scale assumed ........................ keys_are_not_read_over_and_over
  check of the replayed output skipped ................. a_context_that_lies, another_kind
  check of the cuts skipped ............................ hooks_of_the_user, wrong_weights
  leak check skipped ................................... a_cut_that_is_bypassed
  own key of an encoder's token held fixed ............. equals_reference[bert]
  identity of OPT's branch left out .................... equals_reference[opt]
  product of a span in the wrong order ................. span
  batches not split .................................... memory_bound
  precision of products left as it was ................. precision_of_products
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from oracles import ENCODERS, PARALLEL, prompts, relative
from torch import Tensor
from zoo import ARCHITECTURES, WIDTH, tiny

import tl_spectral as tls
from tl_spectral.errors import InputError, UnsupportedModelError
from tl_spectral.jacobian import assembly, blocks, query
from tl_spectral.model import ModelView
from tl_spectral.model.branches import Context, branches

ModelOf = Callable[..., Any]
every_architecture = pytest.mark.parametrize("name", ARCHITECTURES)
IDENTITY = torch.eye(WIDTH)


def worst(fast: Tensor, reference: Tensor) -> float:
    """Largest error over samples, relative to what the block adds."""
    error = (fast - reference).norm(dim=(1, 2))
    return (error / (reference - IDENTITY.to(reference)).norm(dim=(1, 2))).max().item()


# -------------------------------------------------------------------------------------- exactness


@every_architecture
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_equals_reference(name: str, dtype: torch.dtype, model_of: ModelOf) -> None:
    """First, middle and last position of a batch; both contexts; all scopes that exist."""
    if name == "mixtral" and dtype == torch.float64:
        pytest.skip("its experts run in float32 alone")
    model, batch = model_of(name, dtype), prompts(3, 9, seed=1)
    cases = [("full", "block", pos) for pos in (0, 4, 8)] + [("isolated", "block", 4)]
    if name not in PARALLEL and dtype == torch.float32:
        cases += [("full", "attn", 4), ("full", "mlp", 4)]
    for context, scope, pos in cases:
        fast, reference = (
            tls.sample_jacobians(model, batch, None, pos, context, scope, engine=engine)
            for engine in ("fast", "reference")
        )
        for (layer, a), (same, r) in zip(fast, reference, strict=True):
            assert layer == same
            assert a.dtype == r.dtype == dtype
            assert worst(a, r) < 1e-5, (context, scope, pos, layer)


@every_architecture
def test_reason_names_what_is_assembled(name: str, model_of: ModelOf) -> None:
    J = tls.block_jacobian(model_of(name), prompts(2, 9), 1)
    assert J.engine == J.provenance.options["engine"] == "fast"
    assert J.engine_reason == J.provenance.options["engine_reason"]
    assert "agree with the forward pass to 0.0001" in J.engine_reason
    closed = {
        "olmo2": "; MLP in closed form",  # its queries are normalised over all heads together
        "mixtral": "; attention in closed form; experts as routed for this token",
    }
    assert J.engine_reason.endswith(closed.get(name, "; attention and MLP in closed form"))


@pytest.mark.parametrize("name", ["llama", "olmo2", "bert"])
def test_chunks_do_not_change_the_matrix(name: str, model_of: ModelOf, prompt: Tensor) -> None:
    model = model_of(name)
    whole = tls.block_jacobian(model, prompt, 1, engine="reference", chunk=WIDTH).matrix
    for engine in ("fast", "reference"):
        for options in ({"chunk": 1}, {"chunk": 7}, {"chunk": 1000}, {"max_bytes": 1}):
            J = tls.block_jacobian(model, prompt, 1, engine=engine, **options).matrix
            assert torch.allclose(J, whole, atol=1e-6)


@every_architecture
def test_span(name: str, model_of: ModelOf) -> None:
    model, batch = model_of(name), prompts(2, 9, seed=3)
    fast = tls.span_jacobian(model, batch, 0, 3, 4)
    slow = tls.span_jacobian(model, batch, 0, 3, 4, engine="reference")
    assert relative(fast.matrix - slow.matrix, slow.matrix) < 1e-5
    assert fast.engine == ("reference" if name in ENCODERS else "fast")
    if name in ENCODERS:
        assert "lead back" in fast.engine_reason
    else:
        assert "product of blocks" in fast.engine_reason
        between = tls.span_jacobian(model, batch, 0, 3, 4, 2)
        assert between.engine == "reference"


def test_half_precision_is_analysed_in_float32(prompt: Tensor) -> None:
    half = tiny("llama", dtype=torch.bfloat16)
    with pytest.warns(tls.TLSpectralWarning, match="float32 copy"):
        J = tls.block_jacobian(half, prompt, 1)
    exact = tls.block_jacobian(tiny("llama", dtype=torch.bfloat16).to(torch.float32), prompt, 1)
    assert (J.engine, J.matrix.dtype) == ("fast", torch.float32)
    assert "bfloat16 upcast to float32" in J.provenance.dtype
    assert torch.allclose(J.matrix, exact.matrix, atol=1e-6)


def test_inside_inference_mode(gpt2: Any, prompt: Tensor) -> None:
    outside = tls.block_jacobian(gpt2, prompt, 1).matrix
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            assert torch.equal(tls.block_jacobian(gpt2, prompt, 1).matrix, outside)


def test_precision_of_products_is_full_and_put_back(
    gpt2: Any, prompt: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    assembled = query.assemble

    def spy(*args: Any, **kwargs: Any) -> Tensor:
        seen.append(torch.get_float32_matmul_precision())
        return assembled(*args, **kwargs)

    monkeypatch.setattr(query, "assemble", spy)
    torch.set_float32_matmul_precision("medium")
    try:
        for _ in tls.block_jacobians(gpt2, prompt):
            assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert seen == ["highest"] * 3


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3", "bert"])
def test_keys_are_not_read_over_and_over(
    name: str, model_of: ModelOf, prompt: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain softmax attention is differentiated from its factors, at a cost that T hardly moves."""
    asked: dict[int, int] = {}
    pulled, checked = assembly._rows, query.sound_cuts
    cuts = []

    def spy(output: Tensor, leaves: Any, cotangents: Tensor) -> Any:
        asked[id(output)] = asked.get(id(output), 0) + len(cotangents)
        return pulled(output, leaves, cotangents)

    def keep(source: Tensor, target: Tensor, found: Any) -> Any:
        cuts.extend(found)
        return checked(source, target, found)

    monkeypatch.setattr(assembly, "_rows", spy)
    monkeypatch.setattr(query, "sound_cuts", keep)
    tls.block_jacobian(model_of(name), prompt, 1)
    (attention,) = (cut for cut in cuts if cut.branch.kind == "attention")
    heads_per_key = len(attention.branch.W_in[0]) // len(attention.branch.W_in[1])
    assert asked[id(attention.core)] == 2 * heads_per_key


# ------------------------------------------------------------------------------- when it must not


@pytest.mark.parametrize("scope", ["block", "attn"])
def test_a_context_that_lies_is_found_out(
    scope: Any, prompt: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache that is dropped, or another prompt's, gives other numbers; nobody may get them."""
    model = tiny("llama")
    truth = tls.block_jacobian(model, prompt, 1, scope=scope, engine="reference")
    honest = query.prefill

    def other(view: Any, tokens: Tensor, hooks: Any) -> Context:
        context = honest(view, tokens, hooks)
        assert context is not None
        return Context(tuple((k.flip(2), v) for k, v in context.layers))

    def shorter(view: Any, tokens: Tensor, hooks: Any) -> Context:
        context = honest(view, tokens, hooks)
        assert context is not None
        return Context(tuple((k[:, :, 1:], v[:, :, 1:]) for k, v in context.layers))

    for lie in (other, shorter):
        monkeypatch.setattr(query, "prefill", lie)
        J = tls.block_jacobian(model, prompt, 1, scope=scope)
        assert J.engine == "reference"
        assert "differs from the forward pass by" in J.engine_reason
        assert torch.equal(J.matrix, truth.matrix)
        with pytest.raises(UnsupportedModelError, match=r"differs from.*Use engine='auto'"):
            tls.block_jacobian(model, prompt, 1, scope=scope, engine="fast")


def test_hooks_of_the_user(prompt: Tensor) -> None:
    """They are part of the model: what the fast engine cannot follow goes to the reference."""

    def damp(activation: Tensor, hook: Any) -> Tensor:
        return 0.5 * activation

    def by_position(activation: Tensor, hook: Any) -> Tensor:
        scale = 1 + torch.arange(activation.shape[1], dtype=activation.dtype)
        return activation * scale[:, None]

    for name, hook, engine in (
        ("mlp.out.hook_out", damp, "fast"),  # replayed as it is, but no weight knows of it
        ("attn.q.hook_out", lambda a, hook: a.tanh(), "fast"),
        ("hook_out", by_position, "reference"),  # another position is another function
    ):
        model = tiny("llama")
        plain = tls.block_jacobian(model, prompt, 1).matrix
        model.add_hook(f"blocks.1.{name}", hook)
        J = tls.block_jacobian(model, prompt, 1)
        truth = tls.block_jacobian(model, prompt, 1, engine="reference").matrix
        assert J.engine == engine, name
        if engine == "fast":
            assert "attention and MLP" not in J.engine_reason
        assert relative(J.matrix - truth, truth - IDENTITY) < 1e-5
        assert relative(plain - truth, truth - IDENTITY) > 1e-2


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
@pytest.mark.parametrize("which", [0, 1], ids=["attention", "MLP"])
def test_wrong_weights_are_not_believed(
    name: str, which: int, model_of: ModelOf, prompt: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quantised or adapted layer may show weights that are not what it applies."""
    model = model_of(name)
    truth = tls.block_jacobian(model, prompt, 1, engine="reference").matrix
    first = branches(ModelView(model), 1)[which]
    wrong = (
        {"W_out": first.W_out * 1.001},
        {"W_in": (first.W_in[0] * 1.001, *first.W_in[1:])},
        {"W_out": first.W_out[:, :-1]},
        {"W_in": (first.W_in[0][:-1], *first.W_in[1:])},
    )
    for change in wrong:

        def lying(view: Any, layer: int, change: Any = change) -> Any:
            found = list(branches(view, layer))
            found[which] = replace(found[which], **change)
            return tuple(found)

        monkeypatch.setattr(query, "branches", lying)
        J = tls.block_jacobian(model, prompt, 1)
        assert J.engine == "fast"
        assert J.engine_reason.endswith(f"; {('MLP', 'attention')[which]} in closed form")
        assert relative(J.matrix - truth, truth - IDENTITY) < 1e-5


def test_a_cut_that_is_bypassed_is_not_believed(
    model_of: ModelOf, prompt: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a hook returns may be ignored; the graph then leads past the cut."""
    model = model_of("gpt2")
    truth = tls.block_jacobian(model, prompt, 1, engine="reference").matrix

    class Deaf(query._Taps):
        def change(self, name: str, **options: Any) -> None:
            super().change(name, **options)
            hook = self.hooks[name]
            if name.endswith("mlp.out.hook_out"):
                self.hooks[name] = lambda activation: (hook(activation), activation)[1]

    monkeypatch.setattr(query, "_Taps", Deaf)
    J = tls.block_jacobian(model, prompt, 1)
    assert J.engine_reason.endswith("; attention in closed form")
    assert relative(J.matrix - truth, truth - IDENTITY) < 1e-5


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_unknown_blocks(
    name: str, model_of: ModelOf, prompt: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is known of a block: a decoder is still followed, an encoder cannot be."""
    model = model_of(name)
    truth = tls.block_jacobian(model, prompt, 1, engine="reference").matrix
    monkeypatch.setattr(query, "branches", lambda view, layer: ())
    J = tls.block_jacobian(model, prompt, 1)
    assert relative(J.matrix - truth, truth - IDENTITY) < 1e-5
    if name == "bert":
        assert J.engine_reason == "the attention of this encoder is not known"
    else:
        assert J.engine == "fast"
        assert "closed form" not in J.engine_reason
    monkeypatch.setattr(query, "prefill", lambda view, tokens, hooks: None)
    if name == "llama":
        J = tls.block_jacobian(model, prompt, 1)
        assert J.engine_reason == "the model does not show keys and values"
        assert torch.equal(J.matrix, truth)


def test_attention_of_another_kind(prompt: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """An encoder whose scores are not scaled products of queries and keys."""
    model = tiny("bert")
    for block in model.original_model.bert.encoder.layer:
        block.original_component.attention.self.scaling *= 2
    J = tls.block_jacobian(model, prompt, 1)
    assert J.engine == "reference"
    assert "differs from the forward pass by" in J.engine_reason


def test_engine_reasons(gpt2: Any, model_of: ModelOf, prompt: Tensor) -> None:
    def why(**options: Any) -> tuple[str, str]:
        J = tls.block_jacobian(gpt2, prompt, 1, **options)
        return J.engine, J.engine_reason

    assert why()[0] == "fast"
    assert why(pos=0)[0] == "fast"  # nothing before it: an empty cache
    assert why(engine="reference") == ("reference", "asked for")
    assert why(source_pos=3) == ("reference", "source and target positions differ")
    assert why(source_pos=8)[0] == "fast"
    engine, reason = why(context="isolated")
    assert engine == "fast"
    assert reason.startswith("a single token is its own context; replayed outputs agree")
    with pytest.raises(InputError, match="follows one position only"):
        tls.block_jacobian(gpt2, prompt, 1, source_pos=3, engine="fast")
    with pytest.raises(UnsupportedModelError, match="lead back"):
        tls.span_jacobian(model_of("bert"), prompt, 0, 2, engine="fast")


def test_memory_bound(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts are taken in turns, rows in chunks; neither changes the numbers."""
    batch = prompts(5, 9)
    (_, whole), *_ = tls.sample_jacobians(llama, batch, [1])
    sizes = []
    followed = blocks.query_graphs

    def spy(view: Any, tokens: Tensor, *args: Any, **kwargs: Any) -> Any:
        sizes.append(len(tokens))
        return followed(view, tokens, *args, **kwargs)

    monkeypatch.setattr(blocks, "query_graphs", spy)
    each = 8 * 4 * WIDTH**2  # eight matrices of float32
    (_, split), *_ = tls.sample_jacobians(llama, batch, [1], max_bytes=2 * each)
    assert sizes == [2, 2, 1]
    assert torch.allclose(split, whole, atol=1e-6)
