"""What tokens are measured against: a layer's modes, and the controls, with their closed forms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from tl_spectral.layer_modes import leading_modes, modes_of_factors
from tl_spectral.model import ModelView
from tl_spectral.modes import (
    Mode,
    chance_alignment,
    dominant_modes,
    eigensystem,
    layer_matrix,
    left_vectors,
)
from tl_spectral.power.rho import criterion_sides, predicted_rho


@dataclass
class Target:
    """A subspace to measure alignment with; several draws of a random one are averaged.

    Attributes:
        name: ``"v1"`` or a control.
        modes: One, or one per draw.
        facts: What holds whatever the tokens: chance, eigenvalue, criterion, predicted ρ.
        before: Alignment of isotropic random tokens, one column per draw.
        after: The same once they went through the linear map.
    """

    name: str
    modes: list[Mode]
    facts: dict[str, Any]
    before: Float[Tensor, "token draw"]
    after: Float[Tensor, "token draw"]


class Targets:
    """Makes the targets of one layer after the other; no d × d matrix of a layer is kept.

    Args:
        view: The model.
        chosen: Layers that will be asked for.
        skip: Whether tokens go through ``x + F x`` or ``F x``, and dominance follows.
        fold: Gains folded into F.
        count: Modes measured, v1 included.
        draws: Random maps of equal norm.
        x: Isotropic random tokens.
        generator: Draws the random maps.
    """

    def __init__(
        self,
        view: ModelView,
        chosen: tuple[int, ...],
        *,
        skip: bool,
        fold: str,
        count: int,
        draws: int,
        x: Float[Tensor, "token d_model"],
        generator: torch.Generator,
    ) -> None:
        self.view, self.skip, self.fold, self.count, self.x = view, skip, fold, count, x
        # Two more than asked for: conjugate pairs and null spaces are passed over among controls.
        self.found = {layer: self._modes(layer) for layer in chosen}
        if len(chosen) == 1 and view.n_layers > 1:
            other = (chosen[0] + 1) % view.n_layers
            self.found[other] = self._modes(other)
        self.gaussians = [_Gaussian(view.d_model, x, generator) for _ in range(draws)]

    def _modes(self, layer: int) -> tuple[Mode, ...]:
        return leading_modes(self.view, layer, skip=self.skip, fold=self.fold, count=self.count + 2)

    def of(self, layer: int) -> list[Target]:
        """v1, the next modes, v1 of another layer, and v1 of the random maps."""
        W_V, W_O = self.view.ov_factors(layer, fold=self.fold)
        F = layer_matrix(W_V, W_O)
        M, modes = self._with_skip(F), self.found[layer]
        narrow = [mode for mode in modes[1:] if mode.subspace.shape[1] <= 2][: self.count - 1]
        named = {"v1": modes[0]} | {f"v{k}": mode for k, mode in enumerate(narrow, 2)}
        other = self._other(layer)
        if other is not None:
            named["other layer"] = other
        image = self.x @ M.T
        targets = [self._target(name, [mode], [M], [image]) for name, mode in named.items()]
        if self.gaussians:
            scaled = [G.scaled(F.norm().item(), self.skip) for G in self.gaussians]
            maps = [self._with_skip(own) for own, _, _ in scaled]
            images = [image + self.skip * self.x for _, image, _ in scaled]
            targets.append(self._target("random F", [mode for *_, mode in scaled], maps, images))
            U = self.gaussians[0].rotation
            mode = modes_of_factors(
                W_V.double().cpu(), W_O.double().cpu() @ U.T, skip=self.skip, count=1
            )[0]
            M = self._with_skip(U @ F)
            targets.append(self._target("rotated F", [mode], [M], [self.x @ M.T]))
        return targets

    def _with_skip(self, F: Tensor) -> Tensor:
        return F + torch.eye(len(F), dtype=F.dtype) if self.skip else F

    def _other(self, layer: int) -> Mode | None:
        """v1 of the next layer whose v1 is another; ``None`` if all share their weights."""
        order = list(self.found)
        at = order.index(layer)
        own = self.found[layer][0].subspace
        for other in order[at + 1 :] + order[:at]:
            mode = self.found[other][0]
            if not torch.equal(mode.subspace, own):
                return mode
        return None

    def _target(
        self, name: str, modes: list[Mode], maps: list[Tensor], images: list[Tensor]
    ) -> Target:
        return Target(
            name,
            modes,
            _facts(modes, maps),
            torch.stack([alignment(self.x, mode.subspace) for mode in modes], dim=1),
            torch.stack(
                [alignment(y, mode.subspace) for y, mode in zip(images, modes, strict=True)], dim=1
            ),
        )


class _Gaussian:
    """A random matrix whose eigensystem serves every layer: a scale moves eigenvalues alone."""

    def __init__(self, d: int, x: Tensor, generator: torch.Generator) -> None:
        self.G = torch.randn(d, d, generator=generator, dtype=torch.float64)
        self.values, self.vectors = eigensystem(self.G)
        self.left = left_vectors(self.vectors)
        self.image = x @ self.G.T

    def scaled(self, norm: float, skip: bool) -> tuple[Tensor, Tensor, Mode]:
        """The matrix of that norm, what it makes of the tokens, and its v1."""
        scale = norm / self.G.norm().item()
        F, system = scale * self.G, (scale * self.values, self.vectors)
        mode = dominant_modes(F, skip=skip, system=system, left=self.left)[0]
        return F, scale * self.image, mode

    @property
    def rotation(self) -> Float[Tensor, "d d"]:
        """A uniformly random rotation (Mezzadri 2007)."""
        Q, R = torch.linalg.qr(self.G)
        rotation: Tensor = Q * R.diagonal().sign()
        return rotation


def alignment(x: Float[Tensor, "token d"], Q: Float[Tensor, "d dim"]) -> Float[Tensor, " token"]:
    """Length of the projection of each unit vector ``x̂`` on a subspace; 0 for a zero vector."""
    norms = x.norm(dim=-1)
    length: Tensor = (x @ Q).norm(dim=-1) / torch.where(norms > 0, norms, torch.ones_like(norms))
    return length


def _facts(modes: list[Mode], maps: list[Tensor]) -> dict[str, Any]:
    """Means over draws of a random map; an eigenvalue is told of a single mode only."""
    mode, n = modes[0], len(modes)
    pairs = [(M, each.subspace) for M, each in zip(maps, modes, strict=True)]
    left, right = (sum(s) / n for s in zip(*(criterion_sides(*p) for p in pairs), strict=True))
    return {
        "chance": sum(chance_alignment(*Q.shape) for _, Q in pairs) / n,
        "dimension": mode.subspace.shape[1] if n == 1 else None,
        "eigenvalue_re": mode.eigenvalue.real if n == 1 else None,
        "eigenvalue_im": mode.eigenvalue.imag if n == 1 else None,
        "criterion": left > right,
        "criterion_left": left,
        "criterion_right": right,
        "predicted_rho": sum(predicted_rho(*p) for p in pairs) / n,
    }
