"""Residual states: right layer, right position, nothing from padding, nothing kept beyond need.

Changed to see these tests fail: position off by one; resid_post read in place of resid_pre; members
of a batch written in another order; the forward pass not stopped.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracles import ENCODERS, PARALLEL, prompts, states
from torch import Tensor
from zoo import ARCHITECTURES, CONTEXT, LAYERS, WIDTH, tiny

import tl_spectral as tls
from tl_spectral.errors import InputError, ModelStateError

ModelOf = Callable[..., Any]


@pytest.fixture
def ragged() -> list[Tensor]:
    """Texts of different lengths, in an order that no sorting would keep."""
    return [prompts(1, n, seed=i)[0] for i, n in enumerate((5, 9, 3, 9, 5, 7))]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_padding_never_leaks(name: str, model_of: ModelOf, ragged: list[Tensor]) -> None:
    """Texts of different lengths together = each alone, on every architecture."""
    model = model_of(name)
    for pos in (-1, 1):
        together = tls.capture(model, ragged, pos)
        for sample, text in enumerate(ragged):
            alone = tls.capture(model, text, pos)
            for site in ("resid_pre", "resid_mid", "resid_post"):
                both = getattr(together, site), getattr(alone, site)
                if both[0] is None:
                    assert name in PARALLEL
                    assert both == (None, None)
                    continue
                # Batched matrix products may round the last bit differently.
                assert torch.allclose(both[0][:, sample], both[1][:, 0], atol=1e-5)


@pytest.mark.parametrize("name", ["gpt2", "opt", "gemma2", "bert", "pythia"])
def test_states_are_what_the_hooks_see(name: str, model_of: ModelOf, ragged: list[Tensor]) -> None:
    model = model_of(name)
    for pos in (-1, 0, 2, -3):
        captured = tls.capture(model, ragged, pos)
        for sample, text in enumerate(ragged):
            at = pos % len(text)
            for layer in range(LAYERS):
                pre = states(model, text[None], layer, at)[0]
                post = states(model, text[None], layer, at, "hook_out")[0]
                assert torch.allclose(captured.resid_pre[layer, sample], pre, atol=1e-5)
                assert torch.allclose(captured.resid_post[layer, sample], post, atol=1e-5)
    assert torch.equal(captured.resid_post[:-1], captured.resid_pre[1:])


@pytest.mark.parametrize("name", ["gpt2", "opt", "olmo2", "bert", "roberta", "gptj"])
def test_from_cache_equals_capture(name: str, model_of: ModelOf) -> None:
    model, batch = model_of(name), prompts(3, 7)
    _, cache = model.run_with_cache(batch)
    for pos in (-1, 3):
        theirs = tls.ResidualStates.from_cache(model, cache, pos)
        ours = tls.capture(model, batch, pos)
        assert torch.equal(theirs.resid_pre, ours.resid_pre)
        assert torch.equal(theirs.resid_post, ours.resid_post)
        assert (theirs.resid_mid is None) == (ours.resid_mid is None) == (name == "gptj")
        if ours.resid_mid is not None:
            assert torch.equal(theirs.resid_mid, ours.resid_mid)
        assert (theirs.norm_gain is None) == (name in ("olmo2", *ENCODERS))
        assert theirs.layers == ours.layers
        assert theirs.pos == pos
        ours.provenance.require_same_model(theirs.provenance, "states")


def test_from_cache_refuses(gpt2: Any, prompt: Tensor) -> None:
    _, cache = gpt2.run_with_cache(prompt)
    with pytest.raises(InputError, match=r"pos 9 does not exist in a text of 9"):
        tls.ResidualStates.from_cache(gpt2, cache, 9)
    _, partial = gpt2.run_with_cache(prompt, names_filter="blocks.0.hook_in")
    with pytest.raises(InputError, match=r"no blocks\.1\.hook_in.*names_filter"):
        tls.ResidualStates.from_cache(gpt2, partial)
    _, flat = gpt2.run_with_cache(prompt, remove_batch_dim=True)
    with pytest.raises(InputError, match="keep the batch dimension"):
        tls.ResidualStates.from_cache(gpt2, flat)


def test_from_cache_without_the_middle(gpt2: Any, prompt: Tensor) -> None:
    """A cache of what enters and leaves the blocks is enough."""
    _, cache = gpt2.run_with_cache(
        prompt, names_filter=lambda name: name.endswith(("resid_pre", "resid_post"))
    )
    states = tls.ResidualStates.from_cache(gpt2, cache)
    assert states.resid_mid is None
    assert torch.equal(states.resid_pre, tls.capture(gpt2, prompt).resid_pre)


def test_from_cache_takes_a_plain_dict(gpt2: Any, prompt: Tensor) -> None:
    _, cache = gpt2.run_with_cache(prompt)
    plain = {name: cache[name] for name in cache}
    assert torch.equal(
        tls.ResidualStates.from_cache(gpt2, plain).resid_pre, tls.capture(gpt2, prompt).resid_pre
    )


def test_layers_and_sites(gpt2: Any, prompt: Tensor) -> None:
    everything = tls.capture(gpt2, prompt)
    some = tls.capture(gpt2, prompt, layers=[2, 0])
    assert some.layers == (2, 0)
    assert torch.equal(some.resid_pre, everything.resid_pre[[2, 0]])
    assert torch.equal(some.resid_post, everything.resid_post[[2, 0]])
    assert torch.equal(some.norm_gain, everything.norm_gain[[2, 0]])
    assert (some.index(2), some.index(0)) == (0, 1)
    with pytest.raises(InputError, match="Layer 1 was not captured"):
        some.index(1)
    assert tls.capture(gpt2, prompt, layers=[-1]).layers == (2,)
    without = tls.capture(gpt2, prompt, sites=["resid_post"])
    assert without.resid_mid is None
    with pytest.raises(InputError, match="resid_mid was not captured"):
        without.site("resid_mid")


def test_batches_do_not_change_states(gpt2: Any) -> None:
    texts, counts = prompts(7, 5), []
    whole = tls.capture(gpt2, texts)
    pieces = tls.capture(gpt2, texts, batch_tokens=10, progress=counts.append)
    assert counts == [2, 4, 6, 7]
    assert torch.allclose(whole.resid_post, pieces.resid_post, atol=1e-6)
    assert tls.capture(gpt2, texts, batch_tokens=1).n_samples == 7


def test_forward_pass_ends_at_the_last_layer_asked_for(gpt2: Any, prompt: Tensor) -> None:
    reached: list[str] = []
    with gpt2.hooks(
        fwd_hooks=[(lambda n: n.endswith("hook_in"), lambda a, hook: reached.append(hook.name))]
    ):
        tls.capture(gpt2, prompt)  # fills the memory of the anatomy
        reached.clear()
        tls.capture(gpt2, prompt, layers=[1, 0])
    assert "blocks.1.hook_in" in reached
    assert not any(name.startswith(("blocks.2", "ln_final", "unembed")) for name in reached)


def test_only_the_position_asked_for_is_kept(gpt2: Any) -> None:
    """No activation of a whole sequence outlives its forward pass."""
    alive: list[weakref.ref[Tensor]] = []
    most = 0

    def watch(activation: Tensor, hook: Any) -> None:
        nonlocal most
        alive.append(weakref.ref(activation))
        if hook.name == "blocks.0.hook_in":  # a new forward pass begins
            most = max(most, sum(r() is not None for r in alive))

    with gpt2.hooks(
        fwd_hooks=[(f"blocks.{i}.hook_{s}", watch) for i in range(3) for s in ("in", "out")]
    ):
        captured = tls.capture(gpt2, prompts(6, 9), batch_tokens=9)
    gc.collect()
    assert len(alive) >= 6 * 6 - 6
    assert most <= 2  # that of this pass, not those of the passes before
    for tensor in (captured.resid_pre, captured.resid_mid, captured.resid_post):
        assert tensor.untyped_storage().nbytes() == LAYERS * 6 * WIDTH * 4
        assert not tensor.requires_grad


def test_scale_is_the_standard_deviation(gpt2: Any) -> None:
    captured = tls.capture(gpt2, prompts(5, 4))
    expected = captured.resid_post[1].double().std(dim=0)
    assert torch.equal(captured.scale(1, "resid_post"), expected)
    assert captured.scale(1).dtype == torch.float64
    with pytest.raises(InputError, match="two samples"):
        tls.capture(gpt2, prompts(1, 4)).scale(1)


def test_dataframe(gpt2: Any, model_of: ModelOf) -> None:
    captured = tls.capture(gpt2, prompts(5, 4), layers=[2, 1])
    frame = captured.to_dataframe()
    assert len(frame) == 2 * 3
    row = frame[(frame.layer == 1) & (frame.site == "resid_pre")].iloc[0]
    norms = captured.resid_pre[1].double().norm(dim=-1)
    assert row.mean_norm == pytest.approx(norms.mean().item())
    assert row.sd_norm == pytest.approx(norms.std().item())
    assert len(tls.capture(model_of("gptj"), prompts(1, 4)).to_dataframe()) == LAYERS * 2


def test_round_trip(gpt2: Any, tmp_path: Any) -> None:
    captured = tls.capture(gpt2, prompts(2, 4))
    loaded = tls.ResidualStates.load(captured.save(tmp_path / "states"))
    assert torch.equal(loaded.resid_mid, captured.resid_mid)
    assert loaded.layers == captured.layers
    assert loaded.provenance == captured.provenance
    bare = tls.capture(gpt2, prompts(2, 4), sites=["resid_pre"])
    assert tls.ResidualStates.load(bare.save(tmp_path / "bare")).resid_mid is None


def test_provenance_tells_texts_apart(gpt2: Any) -> None:
    first = tls.capture(gpt2, prompts(2, 4)).provenance
    assert first.texts == tls.capture(gpt2, list(prompts(2, 4))).provenance.texts
    assert first.texts != tls.capture(gpt2, prompts(2, 4).flip(0)).provenance.texts
    assert first.texts != tls.capture(gpt2, prompts(2, 4).reshape(1, 8)).provenance.texts
    assert first.model == "tiny-gpt2"
    assert first.weights == "raw"
    assert first.dtype == "float32"
    assert first.options == {"pos": -1}


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"pos": 4}, r"pos \(in text 1\) 4 does not exist in a text of 4 tokens"),
        ({"pos": -5}, r"pos \(in text 1\) -5"),
        ({"pos": True}, "must be an integer"),
        ({"layers": [3]}, "layer 3 does not exist: tiny-gpt2 has 3 layers, 0 to 2"),
        ({"layers": [-4]}, "layer -4 does not exist"),
        ({"layers": []}, "layers is empty"),
        ({"layers": [1, -2]}, "names a layer twice"),
    ],
    ids=str,
)
def test_bad_arguments(bad: dict[str, Any], message: str, gpt2: Any) -> None:
    with pytest.raises(InputError, match=message):
        tls.capture(gpt2, [torch.arange(3, 9), torch.arange(3, 7)], **bad)


def test_absent_middle_is_refused_when_asked_for(model_of: ModelOf, prompt: Tensor) -> None:
    with pytest.raises(InputError, match="has no resid_mid"):
        tls.capture(model_of("pythia"), prompt, sites=["resid_mid"])


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ([], "no text"),
        (torch.zeros(0, 3, dtype=torch.long), "no text"),
        ([torch.tensor([3, 4]), torch.tensor([], dtype=torch.long)], "Text 1 is empty"),
        (torch.zeros(2, 0, dtype=torch.long), "Text 0 is empty"),
        (torch.full((1, CONTEXT + 1), 3), f"has {CONTEXT + 1} tokens, tiny-gpt2 takes {CONTEXT}"),
        (torch.tensor([[3, 64]]), "outside 0 to 63"),
        (torch.tensor([[3, -1]]), "outside 0 to 63"),
        (torch.ones(1, 4), "integer tensors"),
        (torch.ones(1, 4, dtype=torch.bool), "integer tensors"),
        (torch.ones(1, 1, 4, dtype=torch.long), "integer tensors"),
        ([3, 4, 5], "Text 0 is a int"),
        (None, "Expected texts or token ids, got None"),
        (7, "Expected texts or token ids, got 7"),
        ("some text", "has no tokenizer"),
        (["some text"], "Pass token ids"),
    ],
    ids=repr,
)
def test_bad_texts(texts: Any, message: str, gpt2: Any) -> None:
    with pytest.raises(InputError, match=message):
        tls.capture(gpt2, texts)
    with pytest.raises(InputError, match=message):
        tls.block_jacobian(gpt2, texts, 0)


def test_full_context_is_taken(gpt2: Any) -> None:
    assert tls.capture(gpt2, torch.full((1, CONTEXT), 3)).n_samples == 1


def test_states_that_are_not_finite_are_refused(prompt: Tensor) -> None:
    model = tiny("gpt2")

    def poison(activation: Tensor, hook: Any) -> Tensor:
        return activation * float("inf")

    with model.hooks(fwd_hooks=[("blocks.1.hook_out", poison)]):
        with pytest.raises(ModelStateError, match="not finite for text 0"):
            tls.capture(model, prompt)
        with pytest.raises(ModelStateError, match="not finite for text 0"):
            tls.block_jacobian(model, prompt, 2)
