"""A checked request for Jacobians: everything is known to exist before the first forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from jaxtyping import Int
from torch import Tensor

from tl_spectral.errors import InputError
from tl_spectral.jacobian.engine import Route
from tl_spectral.model import ModelView

Context = Literal["full", "isolated"]
Scope = Literal["block", "attn", "mlp"]
Engine = Literal["auto", "fast", "reference"]
CONTEXTS = ("full", "isolated")
ENGINES = ("auto", "fast", "reference")
_SITES: dict[str, tuple[Any, Any]] = {
    "block": ("resid_pre", "resid_post"),
    "attn": ("resid_pre", "resid_mid"),
    "mlp": ("resid_mid", "resid_post"),
}


@dataclass(frozen=True)
class Plan:
    """What to compute, in resolved terms.

    Attributes:
        view: The model.
        rows: Token ids of each text.
        routes: What is differentiated with respect to what, layer by layer.
        pos: Target position, as counted by the user.
        source_pos: Source position; equal to ``pos`` if it means the same in every text.
        context: ``"full"`` or ``"isolated"``.
        scope: ``"block"``, ``"attn"`` or ``"mlp"``; ``"span"`` for several blocks.
        engine: What was asked for.
    """

    view: ModelView
    rows: list[Int[Tensor, " _"]]
    routes: tuple[Route, ...]
    pos: int
    source_pos: int
    context: str
    scope: str
    engine: str


def checked_plan(
    model: Any,
    tokens: Any,
    layers: Sequence[int] | None,
    pos: int,
    source_pos: int | None,
    context: str,
    scope: str,
    engine: str,
    chunk: int | None,
) -> Plan:
    """Check the arguments of :func:`tl_spectral.block_jacobians`.

    Raises:
        InputError: If something does not exist or does not go together.
    """
    view = ModelView(model)
    if context not in CONTEXTS:
        raise InputError(f"context must be one of {CONTEXTS}, got {context!r}.")
    if chunk is not None and (isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1):
        raise InputError(f"chunk must be a positive integer or None, got {chunk!r}.")
    if scope not in _SITES:
        raise InputError(f"scope must be one of {tuple(_SITES)}, got {scope!r}.")
    if engine not in ENGINES:
        raise InputError(f"engine must be one of {ENGINES}, got {engine!r}.")
    rows = view.tokens(tokens)
    source_pos = pos if source_pos is None else source_pos
    same = set()
    for row in rows:
        t, s = view.position(pos, len(row)), view.position(source_pos, len(row), "source_pos")
        same.add(s == t)
        if view.causal and s > t:
            raise InputError(
                f"source_pos {s} lies after pos {t}: in {view.name} a position cannot depend on a "
                "later one, the Jacobian is zero."
            )
        if context == "isolated" and s != t:
            raise InputError("An isolated token has no other position; leave out source_pos.")
        if engine == "fast" and s != t:
            raise InputError(
                "The fast engine follows one position only; from one position to another use "
                "engine='auto'."
            )
    if len(same) > 1:
        raise InputError(
            f"pos {pos} and source_pos {source_pos} are the same position in some texts and not in "
            "others; a mean over both has no meaning. Count both from the same end."
        )
    if same == {True}:  # written in two ways, as -1 and 8: from here on in one
        source_pos = pos
    source, target = _SITES[scope]
    routes = tuple(Route(layer, layer + 1, source, target) for layer in view.layers(layers))
    for route in routes:  # fails for a resid_mid that does not exist
        view.hook_name(route.start, source), view.hook_name(route.start, target)
    return Plan(view, rows, routes, int(pos), int(source_pos), context, scope, engine)
