"""Forward passes while chosen units of a block's input are scaled; nothing permanent is changed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_spectral.model.passes import instead
from tl_spectral.model.view import ModelView


class ScaledInput:
    """Texts of one length, run again and again with some units of one block's input scaled.

    Nothing before the block changes, so its predecessor's output is kept from the first run and
    given back. Where that does not reproduce the first run bit for bit, every run is a whole one.

    Args:
        view: The model.
        tokens: Token ids of equal length.
        layer: The block.
        pos: Position, not negative: the only one at which the input is changed and looked at.

    Attributes:
        states: ``resid_pre`` of the block at the position, float64.
        outputs: ``resid_post`` there, float64.
        log_probs: Log-probabilities of the distribution at the position, float64.
    """

    def __init__(
        self, view: ModelView, tokens: Int[Tensor, "sample pos"], layer: int, pos: int
    ) -> None:
        self._view, self._tokens, self._layer, self._pos = view, tokens, layer, pos
        self._before: Any = None
        self._replays = False
        seen: list[Tensor] = []
        with ExitStack() as stack:
            if layer > 0:
                stack.enter_context(instead(view.model.blocks[layer - 1], self._keep))
            self.outputs, self.log_probs = self._run(lambda state: seen.append(state.clone()))
        self.states: Float[Tensor, "sample d_model"] = seen[0].double().cpu()
        if layer > 0:
            again, log_probs = self._replay(lambda state: None)
            self._replays = torch.equal(again, self.outputs) and torch.equal(
                log_probs, self.log_probs
            )

    def scaled(
        self, factors: Float[Tensor, " d_model"], centre: Float[Tensor, " d_model"]
    ) -> tuple[Float[Tensor, "sample d_model"], Float[Tensor, "sample d_vocab"]]:
        """``resid_post`` and log-probabilities with ``x → centre + factors · (x − centre)``.

        Args:
            factors: One per unit; 1 leaves a unit exactly as it is.
            centre: What each unit is scaled around.
        """

        def scale(state: Tensor) -> Tensor:
            by, around = factors.to(state), centre.to(state)
            return torch.where(by == 1, state, around + by * (state - around))

        return self._replay(scale) if self._replays else self._run(scale)

    def _keep(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._before = forward(*args, **kwargs)
        return self._before

    def _replay(self, change: Callable[[Tensor], Tensor | None]) -> tuple[Tensor, Tensor]:
        def give(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            return self._before

        with ExitStack() as stack:
            for skipped in self._view.model.blocks[: self._layer]:
                stack.enter_context(instead(skipped, give))
            return self._run(change)

    def _run(self, change: Callable[[Tensor], Tensor | None]) -> tuple[Tensor, Tensor]:
        view, (samples, length) = self._view, self._tokens.shape
        outputs: list[Tensor] = []

        def alter(activation: Tensor, hook: Any) -> Tensor | None:
            states = activation.detach().reshape(samples, length, -1)
            changed = change(states[:, self._pos])
            if changed is None:
                return None
            states = states.clone()
            states[:, self._pos] = changed
            return states.reshape(activation.shape)

        def keep(activation: Tensor, hook: Any) -> None:
            states = activation.detach().reshape(samples, length, -1)
            outputs.append(states[:, self._pos].double().cpu())

        hooks = [
            (view.hook_name(self._layer, "resid_pre"), alter),
            (view.hook_name(self._layer, "resid_post"), keep),
        ]
        with torch.no_grad():
            logits: Tensor = view.model.run_with_hooks(
                self._tokens.to(view.device), return_type="logits", fwd_hooks=hooks
            )
        return outputs[0], torch.log_softmax(logits[:, self._pos].double().cpu(), dim=-1)
