"""A read-only view of a hooked model: names, positions, checks, and how to run it.

The view never changes the model: hooks are removed, gradient flags restored and nothing is
written, also when a forward pass ends in an exception.
"""

from __future__ import annotations

import copy
import hashlib
import operator
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_spectral.errors import (
    InputError,
    ModelStateError,
    TLSpectralWarning,
    UnsupportedModelError,
)
from tl_spectral.model.anatomy import BlockAnatomy, Norm, dissect
from tl_spectral.model.fingerprint import weights_fingerprint
from tl_spectral.model.gradients import differentiable
from tl_spectral.model.memo import remembered
from tl_spectral.results import Provenance

Site = Literal["resid_pre", "resid_mid", "resid_post"]
Fold = Literal["none", "norm", "norm+post"]
FOLDS: tuple[Fold, ...] = ("none", "norm", "norm+post")
SITES: tuple[Site, ...] = ("resid_pre", "resid_mid", "resid_post")
Hook = Callable[[Tensor], Tensor | None]
_HALF = (torch.float16, torch.bfloat16)


class StopForward(Exception):  # noqa: N818 - it ends a forward pass early, it is no error
    """Raised by a hook when everything that was asked for has been seen."""


class ModelView:
    """What the analysis needs to know of a model, and the only way it touches one.

    Args:
        model: A TransformerLens ``TransformerBridge`` or a ``HookedAlbert``, in evaluation mode.

    Raises:
        UnsupportedModelError: If it is no such model, or has no single residual stream.
        ModelStateError: If a submodule is in train mode or a weight is not finite.
    """

    def __init__(self, model: Any) -> None:
        _require_bridge(model)
        _require_eval(model)
        if any(parameter.is_inference() for parameter in model.parameters()):
            raise ModelStateError(
                f"{model.cfg.model_name} was loaded inside torch.inference_mode(), which bars its "
                "weights from every derivative. Load it outside."
            )
        self.source = model
        self.dtype: torch.dtype = next(model.parameters()).dtype
        self.fingerprint: str = remembered(model, "hash", lambda: weights_fingerprint(model))
        self.model = _float32_copy(model) if self.dtype in _HALF else model
        cfg = model.cfg
        self.name = str(cfg.model_name or getattr(cfg, "architecture", None) or "unnamed")
        self.architecture = str(getattr(cfg, "architecture", None) or type(model).__name__)
        self.n_layers = len(model.blocks)
        self.d_model = int(cfg.d_model)
        self.n_heads = int(cfg.n_heads)
        self.n_ctx = int(cfg.n_ctx)
        self.n_vocab = int(cfg.d_vocab)
        processed = model.compatibility_mode or getattr(model, "_weights_processed", False)
        self.weights = "compat" if processed else "raw"

    @property
    def device(self) -> torch.device:
        """Device of the embedding, where tokens are sent."""
        device: torch.device = next(self.model.parameters()).device
        return device

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype that the analysis runs in (half precision is upcast to float32)."""
        return torch.float32 if self.dtype in _HALF else self.dtype

    @cached_property
    def anatomy(self) -> tuple[BlockAnatomy, ...]:
        """Per layer, found by running one token: where ``resid_mid`` is, which norm reads first."""
        with self.frozen():
            return remembered(self.model, "anatomy", lambda: dissect(self))

    # ------------------------------------------------------------------ names and positions

    def layer(self, layer: int) -> int:
        """Resolve a layer index (negative counts from the end) or raise ``InputError``."""
        layer = _integer(layer, "layer")
        if not -self.n_layers <= layer < self.n_layers:
            raise InputError(
                f"layer {layer} does not exist: {self.name} has {self.n_layers} layers, "
                f"0 to {self.n_layers - 1}."
            )
        return layer % self.n_layers

    def layers(self, layers: Sequence[int] | None) -> tuple[int, ...]:
        """Resolve a selection of layers, all of them by default; no layer may come twice."""
        if layers is None:
            return tuple(range(self.n_layers))
        if isinstance(layers, (int, str)):
            raise InputError(f"layers must be a sequence of integers, got {layers!r}.")
        chosen = tuple(self.layer(layer) for layer in layers)
        if not chosen:
            raise InputError("layers is empty. Name at least one layer, or pass None for all.")
        if len(set(chosen)) != len(chosen):
            raise InputError(f"layers names a layer twice: {list(chosen)}.")
        return chosen

    def hook_name(self, layer: int, site: Site) -> str:
        """Canonical hook name of a residual state.

        Raises:
            InputError: If the block has no ``resid_mid`` (attention and MLP in parallel).
        """
        if site == "resid_pre":
            return f"blocks.{layer}.hook_in"
        if site == "resid_post":
            return f"blocks.{layer}.hook_out"
        if site != "resid_mid":
            raise InputError(f"site must be one of {SITES}, got {site!r}.")
        name = self.anatomy[layer].resid_mid
        if name is None:
            raise InputError(
                f"Block {layer} of {self.name} ({self.architecture}) has no resid_mid: attention "
                "and MLP read the same state, or the block is not attention followed by an MLP. "
                "Use scope='block'."
            )
        return name

    @property
    def has_mid(self) -> bool:
        """Whether every block has a state between attention and MLP."""
        return all(block.resid_mid is not None for block in self.anatomy)

    def norm_gain(self, layer: int) -> Float[Tensor, " d_model"] | None:
        """Gain of the norm that reads ``resid_pre`` (Gemma's 1 + w included), if there is one."""
        return self.anatomy[layer].norm_gain

    def position(self, pos: int, length: int, what: str = "pos") -> int:
        """Resolve a position in a text of ``length`` tokens or raise ``InputError``."""
        pos = _integer(pos, what)
        if not -length <= pos < length:
            raise InputError(
                f"{what} {pos} does not exist in a text of {length} tokens. Use longer texts, or "
                f"{what} between {-length} and {length - 1}."
            )
        return pos % length

    # ------------------------------------------------------------------ texts

    def tokens(self, texts: Any, *, first: int | None = None) -> list[Int[Tensor, " _"]]:
        """Token ids of each text, on the CPU, never padded, and never truncated unasked.

        Args:
            texts: A string, a list of strings, token ids ``[pos]`` or ``[batch, pos]``, or a list
                of such tensors. Strings are tokenised as ``model.to_tokens`` does.
            first: Keep so many tokens of each text, so that longer ones fit as well.

        Raises:
            InputError: If there is no text, a text is empty, too long, or not text at all.
        """
        if isinstance(texts, (str, Tensor)):
            texts = [texts]
        elif not isinstance(texts, Iterable):
            raise InputError(
                f"Expected texts or token ids, got {texts!r}. Pass a string, a list of strings, or "
                "integer tensors [pos] or [batch, pos]."
            )
        rows: list[Tensor] = []
        for index, text in enumerate(texts):
            if isinstance(text, str):
                rows.append(self._tokenise(text, index))
            elif _holds_ids(text):
                ids = text.detach().cpu().long()
                rows.extend([ids] if ids.ndim == 1 else ids.unbind())
            else:
                raise InputError(
                    f"Text {index} is a {type(text).__name__}; texts are strings or integer tensors"
                    " [pos] or [batch, pos]."
                )
        if not rows:
            raise InputError("There is no text. Pass at least one.")
        rows = [row[:first] for row in rows]
        for index, row in enumerate(rows):
            if row.numel() == 0:
                raise InputError(f"Text {index} is empty. Leave it out.")
            if not 0 <= row.min() <= row.max() < self.n_vocab:
                raise InputError(
                    f"Text {index} holds a token id outside 0 to {self.n_vocab - 1}, the vocabulary"
                    f" of {self.name}. Was it made by another model's tokenizer?"
                )
            if row.numel() > self.n_ctx:
                raise InputError(
                    f"Text {index} has {row.numel()} tokens, {self.name} takes {self.n_ctx}. "
                    "Shorten it; nothing is truncated silently."
                )
        return rows

    def _tokenise(self, text: str, index: int) -> Int[Tensor, " pos"]:
        if self.model.tokenizer is None:
            raise InputError(
                f"{self.name} has no tokenizer, so text {index} cannot be read. Pass token ids."
            )
        if not text.strip():
            raise InputError(f"Text {index} is empty. Leave it out.")
        tokens: Tensor = self.model.to_tokens(text, truncate=False, move_to_device=False)
        return tokens[0].cpu()

    # ------------------------------------------------------------------ running

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """No parameter asks for a gradient inside; the flags are put back after."""
        flags = [(p, p.requires_grad) for p in self.model.parameters()]
        try:
            for parameter, _ in flags:
                parameter.requires_grad_(False)
            yield
        finally:
            for parameter, flag in flags:
                parameter.requires_grad_(flag)

    def run(
        self,
        tokens: Int[Tensor, "sample pos"],
        hooks: Mapping[str, Hook],
        *,
        cache: Any = None,
    ) -> None:
        """Run the model for its hooks' sake.

        Args:
            tokens: Token ids of equal length; no mask, no padding.
            hooks: Hook name → function of the activation; a returned tensor replaces it. A hook
                may raise :class:`StopForward` when no later activation is of interest.
            cache: Key/value cache of the preceding tokens (see ``branches.prefill``).
        """

        def adapt(function: Hook) -> Callable[..., Tensor | None]:
            return lambda activation, hook: function(activation)

        fwd_hooks = [(name, adapt(function)) for name, function in hooks.items()]
        kwargs = {} if cache is None else {"past_key_values": cache}
        with suppress(StopForward):
            self.model.run_with_hooks(
                tokens.to(self.device), return_type=None, fwd_hooks=fwd_hooks, **kwargs
            )

    @cached_property
    def causal(self) -> bool:
        """Whether a position can only look back (False for BERT-like encoders)."""
        return getattr(self.model.cfg, "attention_dir", "causal") == "causal" and bool(
            self.model.adapter.supports_causal_loss
        )

    # ------------------------------------------------------------------ weights

    def ov_factors(
        self, layer: int, fold: Fold | str = "none"
    ) -> tuple[Float[Tensor, "head d_model d_head"], Float[Tensor, "head d_head d_model"]]:
        """``W_V`` (key-value heads repeated over their query group) and ``W_O`` of a layer.

        Args:
            layer: Layer.
            fold: Which norms to fold in: ``"none"``; ``"norm"``, the one that attention reads
                through (:attr:`BlockAnatomy.attention_norm`: gain, and centring for LayerNorm);
                ``"norm+post"``, also the one on its output. A norm that is not there folds nothing;
                :meth:`folded` says what is.

        Raises:
            InputError: If ``fold`` is none of these.
            UnsupportedModelError: If the layer has no value and output weights (Mamba, MLA, …).
        """
        norms = self.folded(layer, fold)
        attention = getattr(self.model.blocks[layer], "attn", None)
        try:
            if attention is None:
                raise AttributeError("the block has no attention")
            W_V, W_O = attention.W_V.detach(), attention.W_O.detach()
        except (AttributeError, NotImplementedError, ValueError) as error:
            raise UnsupportedModelError(
                f"Layer {layer} of {self.name} ({self.architecture}) has no value and output "
                f"weights per head ({error}). OV circuits need standard attention; in a hybrid "
                "model, choose the layers that have it."
            ) from error
        if W_V.ndim == 2:  # [d_model, head * d_head]
            d_head = int(self.model.cfg.d_head)
            W_V = W_V.reshape(W_V.shape[0], -1, d_head).transpose(0, 1)
        if W_O.ndim == 2:
            W_O = W_O.reshape(self.n_heads, -1, W_O.shape[-1])
        if "norm" in norms:
            W_V = norms["norm"].before(W_V)
        if "post" in norms:
            W_O = norms["post"].after(W_O)
        group = self.n_heads // W_V.shape[0]
        return (W_V if group == 1 else W_V.repeat_interleave(group, dim=0)), W_O

    def folded(self, layer: int, fold: Fold | str) -> dict[str, Norm]:
        """The norms of a layer that ``fold`` means and that are there: ``"norm"``, ``"post"``.

        Raises:
            InputError: If there is no such option.
        """
        if fold not in FOLDS:
            raise InputError(f"fold must be one of {FOLDS}, got {fold!r}.")
        if fold == "none":
            return {}
        block = self.anatomy[layer]
        norms = {"norm": block.attention_norm}
        if fold == "norm+post":
            norms["post"] = block.attention_post_norm
        return {name: norm for name, norm in norms.items() if norm is not None}

    # ------------------------------------------------------------------ provenance

    def provenance(
        self,
        tokens: Sequence[Tensor] | None = None,
        *,
        seed: int | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Provenance:
        """Where a number computed from this model comes from."""
        dtype = str(self.dtype).removeprefix("torch.")
        if self.dtype in _HALF:
            dtype += " upcast to float32"
        return Provenance(
            model=self.name,
            weights=self.weights,
            fingerprint=self.fingerprint,
            dtype=dtype,
            seed=seed,
            texts="" if tokens is None else hash_tokens(tokens),
            options=dict(options or {}),
        )


def _integer(value: Any, what: str) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise InputError(f"{what} must be an integer, got {value!r}.") from None


def _holds_ids(text: Any) -> bool:
    return (
        isinstance(text, Tensor)
        and text.dtype not in (torch.bool, torch.complex64, torch.complex128)
        and not text.is_floating_point()
        and text.ndim in (1, 2)
    )


def hash_tokens(tokens: Sequence[Tensor]) -> str:
    """SHA-256 over the token ids of all texts, in order."""
    digest = hashlib.sha256()
    for row in tokens:
        digest.update(row.long().cpu().numpy().tobytes() + b"|")
    return digest.hexdigest()


def by_length(tokens: Sequence[Int[Tensor, " _"]]) -> dict[int, list[int]]:
    """Indices of the texts of each length: texts of one length form a batch without padding."""
    groups: dict[int, list[int]] = {}
    for index, row in enumerate(tokens):
        groups.setdefault(row.numel(), []).append(index)
    return groups


def _require_bridge(model: Any) -> None:
    from transformer_lens.model_bridge import TransformerBridge

    from tl_spectral.model.albert import HookedAlbert

    if not isinstance(model, (TransformerBridge, HookedAlbert)):
        raise UnsupportedModelError(
            f"Expected a TransformerLens TransformerBridge, got {type(model).__name__}. Load one "
            "with TransformerBridge.boot_transformers(name) or tls.load_model(name), ALBERT with "
            "tls.boot_albert(name); remote bridges (vLLM, Inspect) have neither weights nor "
            "gradients."
        )
    name = model.cfg.model_name
    if not hasattr(model, "blocks") or hasattr(model, "encoder_blocks"):
        raise UnsupportedModelError(
            f"{name} has no single stack of blocks (encoder-decoder models have two residual "
            "streams). Analyse a decoder-only or encoder-only model."
        )
    hooks = model.hook_dict  # put together anew at each access
    for layer, block in enumerate(model.blocks):
        if not getattr(block, "hook_out_is_single_residual_stream", True):
            raise UnsupportedModelError(
                f"Block {layer} of {name} ({type(block).__name__}) does not output one residual "
                "stream. Such blocks have no d_model × d_model Jacobian."
            )
        for hook in ("hook_in", "hook_out"):
            if f"blocks.{layer}.{hook}" not in hooks:
                raise UnsupportedModelError(
                    f"Block {layer} of {name} has no {hook}; its residual stream is out of reach."
                )


def _require_eval(model: Any) -> None:
    roots = (model, getattr(model, "original_model", None))
    training = [
        name or "the model itself"
        for root in roots
        if isinstance(root, torch.nn.Module)
        for name, module in root.named_modules()
        if module.training
    ]
    if training:
        raise ModelStateError(
            f"{model.cfg.model_name} is in train mode at {training[0]} (and "
            f"{len(training) - 1} more modules): dropout would mix random masks into the numbers. "
            "Call model.eval() first."
        )


def _float32_copy(model: Any) -> Any:
    """A float32 twin of a half-precision model, kept while the original lives unchanged."""
    warnings.warn(
        f"{model.cfg.model_name} is in half precision; it is analysed in a float32 copy.",
        TLSpectralWarning,
        stacklevel=4,
    )
    with differentiable():
        return remembered(model, "float32", lambda: copy.deepcopy(model).to(torch.float32))
