"""Forward passes of a model as it stands, edits included: states, predictions, continuations.

Half-precision models run as they are here: it is their own edited weights that matter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from tl_spectral.model.edits import forward_hook
from tl_spectral.model.view import ModelView


class Rerun:
    """One text, run again and again while one block is edited or what it hands on is shifted.

    No edit of a block changes the blocks before it, so their last output is kept from the first
    run and given back. Where that does not reproduce the first run bit for bit (blocks that depend
    on more than the state handed on), every run is a whole one.

    Args:
        view: The model.
        tokens: Token ids of the text.
        layer: The block.

    Attributes:
        tokens: Token ids of the text.
        log_probs: Log-probabilities of the first run, float64.
        states: ``resid_post`` of the block in the first run, float64.
    """

    def __init__(self, view: ModelView, tokens: Int[Tensor, " pos"], layer: int) -> None:
        self.tokens = tokens
        self._view, self._layer = view, layer
        self._outputs: dict[int, Any] = {}
        with ExitStack() as stack:
            for block in {layer - 1, layer} - {-1}:
                stack.enter_context(self._keeping(block))
            self.log_probs, self.states = self._run()
        self._replays = all(
            torch.equal(self._replayed(block, self._outputs[block])[0], self.log_probs)
            for block in self._outputs
        )

    def edited(self) -> tuple[Float[Tensor, "pos d_vocab"], Float[Tensor, "pos d_model"]]:
        """Log-probabilities and ``resid_post`` of the block, as the model stands now."""
        before = self._layer - 1
        if before < 0 or not self._replays:
            return self._run()
        return self._replayed(before, self._outputs[before])

    def shifted(
        self, vector: Float[Tensor, " d_model"]
    ) -> tuple[Float[Tensor, "pos d_vocab"], Float[Tensor, "pos d_model"]]:
        """The same as the first run, with a vector added to ``resid_post`` at every position."""

        def shift(output: Any) -> Any:
            if isinstance(output, tuple):
                return (shift(output[0]), *output[1:])
            return output + vector.to(output.device, output.dtype)

        if self._replays:
            log_probs, _ = self._replayed(self._layer, shift(self._outputs[self._layer]))
        else:
            block = self._view.source.blocks[self._layer]
            with forward_hook(block, lambda module, args, output: shift(output)):
                log_probs, _ = self._run()
        return log_probs, self.states + vector.to(self.states)

    def _run(self) -> tuple[Tensor, Tensor]:
        seen: list[Tensor] = []

        def keep(module: Any, args: Any, state: Tensor) -> None:
            seen[:] = [state]

        view = self._view
        with torch.no_grad(), forward_hook(view.source.blocks[self._layer].hook_out, keep):
            logits: Tensor = view.source(self.tokens[None].to(view.device))
        log_probs = torch.log_softmax(logits[0].detach().cpu().double(), dim=-1)
        if not seen:  # the block was replayed whole
            return log_probs, self.states
        return log_probs, seen[0].detach().reshape(len(self.tokens), -1).cpu().double()

    def _keeping(self, block: int) -> Any:
        def keep(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            self._outputs[block] = forward(*args, **kwargs)
            return self._outputs[block]

        return instead(self._view.source.blocks[block], keep)

    def _replayed(self, block: int, output: Any) -> tuple[Tensor, Tensor]:
        def give(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            return output

        with ExitStack() as stack:
            for skipped in self._view.source.blocks[: block + 1]:
                stack.enter_context(instead(skipped, give))
            return self._run()


@contextmanager
def instead(module: nn.Module, function: Callable[..., Any]) -> Iterator[None]:
    """``function(forward, …)`` in place of ``forward(…)`` of one module; its hooks still run."""
    own = vars(module).get("forward")
    forward = module.forward
    vars(module)["forward"] = lambda *args, **kwargs: function(forward, *args, **kwargs)
    try:
        yield
    finally:
        if own is None:
            del vars(module)["forward"]
        else:
            vars(module)["forward"] = own


def continuation(view: ModelView, tokens: Int[Tensor, " pos"], count: int) -> Int[Tensor, " new"]:
    """The likeliest token, ``count`` times over, by plain forward passes of a causal model.

    Ends early after the tokenizer's end-of-text token, and at the longest text the model takes.
    """
    end = getattr(view.source.tokenizer, "eos_token_id", None)
    text = tokens
    while len(text) < min(len(tokens) + count, view.n_ctx):
        with torch.no_grad():
            logits: Tensor = view.source(text[None].to(view.device))
        text = torch.cat([text, logits[0, -1].argmax().reshape(1).to(text)])
        if text[-1] == end:
            break
    return text[len(tokens) :]
