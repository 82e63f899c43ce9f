"""Every architecture's Jacobians against finite differences through the model.

Lines that were changed to see these tests fail, and which did:
  J transposed .......................... block_jacobian_is_the_derivative, source_and_target
  target position off by one ............ span_is_the_derivative_through_the_model
  gradient summed over positions ........ source_and_target, block_jacobian_is_the_derivative[bert]
  identity of OPT's branch left out ..... block_jacobian_is_the_derivative[opt], scopes_compose[opt]
  identity added between positions ...... source_and_target_positions[opt]
  resid_mid of BERT after its MLP ....... anatomy, block_jacobian_is_the_derivative[bert, roberta]
  gain w instead of Gemma's 1 + w ....... norm_gain_is_the_one_applied[gemma2, gemma3]
  isolated token with another's state ... block_jacobian_is_the_derivative[isolated]
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracles import (
    ENCODERS,
    PARALLEL,
    accuracy,
    block_differences,
    differences,
    prompts,
    relative,
    states,
)
from torch import Tensor
from zoo import ARCHITECTURES, LAYERS, WIDTH

import tl_spectral as tls
from tl_spectral.errors import InputError
from tl_spectral.model import ModelView

every_architecture = pytest.mark.parametrize("name", ARCHITECTURES)
POSITIONS = (0, 4, 8)
ModelOf = Callable[..., Any]


def serial(model_of: ModelOf, name: str) -> tuple[Any, float, float]:
    how = accuracy(name)
    return model_of(name, how.dtype), how.eps, how.tolerance


@every_architecture
@pytest.mark.parametrize("context", ["full", "isolated"])
def test_block_jacobian_is_the_derivative(
    name: str, context: Any, model_of: ModelOf, prompt: Tensor
) -> None:
    """Positions first, middle and last; all layers; all scopes that exist."""
    model, eps, tolerance = serial(model_of, name)
    identity = torch.eye(WIDTH)
    scopes: tuple[Any, ...] = ("block",) if name in PARALLEL else ("block", "attn", "mlp")
    for pos in POSITIONS:
        found = {
            scope: list(tls.block_jacobians(model, prompt, None, pos, context, scope))
            for scope in scopes
        }
        for layer in range(LAYERS):
            state = None
            tokens, at = prompt, pos
            if context == "isolated":
                state = states(model, prompt, layer, pos)
                tokens, at = prompt[:, pos : pos + 1], 0
            block, mid = block_differences(
                model, tokens, layer, eps, pos=at, state=state, architecture=name
            )
            J = {scope: found[scope][layer].matrix.double() for scope in scopes}
            assert relative(J["block"] - block, block - identity) < tolerance
            if mid is None:
                continue
            assert relative(J["attn"] - mid, mid - identity) < tolerance
            # The MLP acts on each position by itself: nudging its input by mid moves its output.
            through = J["mlp"] @ mid
            assert relative(through - block, block - identity) < 2 * tolerance


@pytest.mark.parametrize("name", PARALLEL)
def test_parallel_blocks_have_no_middle(name: str, model_of: ModelOf, prompt: Tensor) -> None:
    model = model_of(name)
    assert not ModelView(model).has_mid
    assert tls.capture(model, prompt).resid_mid is None
    for scope in ("attn", "mlp"):
        with pytest.raises(InputError, match=r"no resid_mid.*scope='block'"):
            tls.block_jacobian(model, prompt, 1, scope=scope)


@every_architecture
def test_source_and_target_positions(name: str, model_of: ModelOf, prompt: Tensor) -> None:
    model, eps, tolerance = serial(model_of, name)
    pairs = [(8, 6), (4, 3)] + ([(2, 6)] if name in ENCODERS else [])
    for pos, source in pairs:
        J = tls.block_jacobian(model, prompt, 1, pos, source)
        block, mid = block_differences(
            model, prompt, 1, eps, pos=pos, source_pos=source, architecture=name
        )
        assert relative(J.matrix - block, block) < tolerance
        assert J.update is J.matrix  # no skip connection joins two positions
        if mid is not None:
            attn = tls.block_jacobian(model, prompt, 1, pos, source, scope="attn").matrix
            assert relative(attn - mid, mid) < tolerance
            # The MLP does not look at other positions.
            assert not tls.block_jacobian(model, prompt, 1, pos, source, scope="mlp").matrix.any()


@every_architecture
def test_span_is_the_derivative_through_the_model(
    name: str, model_of: ModelOf, prompt: Tensor
) -> None:
    model, eps, tolerance = serial(model_of, name)
    for start, stop, source in ((0, 3, 8), (1, 3, 8), (0, 2, 6)):
        span = tls.span_jacobian(model, prompt, start, stop, -1, source)
        reads = {"post": (f"blocks.{stop - 1}.hook_out", 8)}
        truth = differences(model, prompt, start, eps, source_pos=source, reads=reads)["post"]
        assert relative(span.matrix - truth, truth) < 2 * tolerance
        assert (span.scope, span.layer, span.stop) == ("span", start, stop)


@every_architecture
def test_span_is_not_the_product_of_blocks(name: str, model_of: ModelOf, prompt: Tensor) -> None:
    """The product leaves out the paths through other positions; the first position has none."""
    model = model_of(name)
    blocks = [J.matrix for J in tls.block_jacobians(model, prompt)]
    product = blocks[2] @ blocks[1] @ blocks[0]
    span = tls.span_jacobian(model, prompt, 0, 3).matrix
    if name in ENCODERS:
        assert relative(span - product, span) > 1e-3
        return
    # A decoder's last position feeds no other one inside the span: product and span agree there,
    # and in the middle too, for only positions before it can be seen.
    assert relative(span - product, span) < 1e-5


@every_architecture
def test_samples_do_not_mix(name: str, model_of: ModelOf) -> None:
    """Prompts of several lengths in one call = each by itself, and the mean is their mean."""
    model = model_of(name)
    texts = [*prompts(1, 9), *prompts(1, 6), *prompts(1, 9, seed=7)]
    for context in ("full", "isolated"):
        (_, together), *_ = tls.sample_jacobians(model, texts, [1], context=context)
        alone = [tls.block_jacobian(model, t, 1, context=context).matrix for t in texts]
        for J, single in zip(together, alone, strict=True):
            assert relative(J - single, single) < 1e-5
        mean = tls.block_jacobian(model, texts, 1, context=context)
        assert mean.n_samples == 3
        assert relative(mean.matrix - torch.stack(alone).mean(0), mean.matrix) < 1e-5


@every_architecture
def test_isolated_token_sees_itself_only(name: str, model_of: ModelOf, prompt: Tensor) -> None:
    """The context decides what the state is; the block then sees that state alone."""
    model = model_of(name)
    full = tls.block_jacobian(model, prompt, 1).matrix
    isolated = tls.block_jacobian(model, prompt, 1, context="isolated").matrix
    assert relative(full - isolated, isolated) > 1e-2
    first = tls.block_jacobian(model, prompt, 1, 0).matrix
    first_alone = tls.block_jacobian(model, prompt, 1, 0, context="isolated").matrix
    if name in ENCODERS:
        assert relative(first - first_alone, first) > 1e-2
    else:  # the first token of a decoder is alone anyway
        assert relative(first - first_alone, first) < 1e-5


@every_architecture
def test_only_encoders_look_ahead(name: str, model_of: ModelOf, prompt: Tensor) -> None:
    model, changed = model_of(name), prompt.clone()
    changed[0, 7] = 3 if changed[0, 7] != 3 else 4
    before = tls.block_jacobian(model, prompt, 1, 4).matrix
    after = tls.block_jacobian(model, changed, 1, 4).matrix
    assert torch.allclose(before, after, atol=1e-6) == (name not in ENCODERS)
    if name not in ENCODERS:
        with pytest.raises(InputError, match="cannot depend on a later one"):
            tls.block_jacobian(model, prompt, 1, 4, 5)


@pytest.mark.parametrize(
    ("name", "local"),
    [("mistral", (0, 1, 2)), ("gpt_neo", (0, 2)), ("gemma2", (0, 2)), ("gemma3", (0, 1, 2))],
)
def test_sliding_windows(
    name: str, local: tuple[int, ...], model_of: ModelOf, prompt: Tensor
) -> None:
    """Four tokens wide: position 8 sees 5 to 8 in local layers, everything in global ones."""
    model = model_of(name)
    for layer in range(LAYERS):
        for source in range(8):
            J = tls.block_jacobian(model, prompt, layer, 8, source).matrix
            assert J.any().item() == (layer not in local or source >= 5), (layer, source)


MIDDLES = {
    **dict.fromkeys(ARCHITECTURES, "ln2.hook_in"),
    **dict.fromkeys(PARALLEL),
    "olmo2": "mlp.hook_in",
    "bert": "ln1.hook_out",
    "roberta": "ln1.hook_out",
    "albert": "ln1.hook_out",
}


@every_architecture
def test_anatomy(name: str, model_of: ModelOf) -> None:
    for layer, block in enumerate(ModelView(model_of(name)).anatomy):
        middle = MIDDLES[name]
        assert block.resid_mid == (None if middle is None else f"blocks.{layer}.{middle}")
        assert block.mid_on_branch == (name == "opt")


@every_architecture
def test_norm_gain_is_the_one_applied(name: str, model_of: ModelOf, prompt: Tensor) -> None:
    model = model_of(name)
    view = ModelView(model)
    for layer in range(LAYERS):
        gain = view.norm_gain(layer)
        if name in ("olmo2", *ENCODERS):  # no norm reads resid_pre
            assert gain is None
            continue
        weight = model.blocks[layer].ln1.original_component.weight.detach()
        if name.startswith("gemma"):
            weight = 1 + weight
        assert gain is not None
        assert torch.allclose(gain, weight, atol=1e-5)
    J = tls.block_jacobian(model, prompt, 1)
    if J.norm_gain is not None:
        assert torch.equal(J.norm_gain, view.norm_gain(1))


def test_bert_middle_is_the_state_that_the_mlp_and_its_skip_read(
    model_of: ModelOf, prompt: Tensor
) -> None:
    """TransformerLens' alias hook_resid_mid is the sum after the MLP there."""
    model = model_of("bert")
    captured = tls.capture(model, prompt)
    for layer in range(LAYERS):
        truth = states(model, prompt, layer, 8, "ln1.hook_out")
        alias = states(model, prompt, layer, 8, "hook_resid_mid")
        assert torch.equal(captured.resid_mid[layer], truth)
        assert not torch.allclose(truth, alias, atol=1e-2)
        encoder = model.original_model.bert.encoder.layer[layer].original_component
        with torch.no_grad():
            end = encoder.output(encoder.intermediate(truth), truth)
        assert torch.allclose(end, captured.resid_post[layer], atol=1e-5)


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name not in PARALLEL])
def test_scopes_compose(name: str, model_of: ModelOf, prompt: Tensor) -> None:
    model = model_of(name)
    for context in ("full", "isolated"):
        block, attn, mlp = (
            tls.block_jacobian(model, prompt, 2, 4, context=context, scope=scope).matrix
            for scope in ("block", "attn", "mlp")
        )
        assert relative(mlp @ attn - block, block) < 1e-5
        assert relative(attn @ mlp - block, block) > 1e-3
