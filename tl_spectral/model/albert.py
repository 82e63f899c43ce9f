"""ALBERT as a hooked model: one set of weights, a block with its own hooks for every application.

TransformerLens has no adapter for ALBERT, and one would fold all applications of the shared layer
into a single block whose activations overwrite each other. Here every *virtual* layer is a block;
the parameters are shared, exactly as Hugging Face stores them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformer_lens import ActivationCache, FactoredMatrix, HookedRootModule
from transformer_lens.config import TransformerBridgeConfig

from tl_spectral.errors import InputError
from tl_spectral.model.albert_blocks import AlbertBlock, AlbertEmbed, AlbertUnembed

_BLOCK_ALIASES = {
    "hook_resid_pre": "hook_in",
    "hook_resid_mid": "ln1.hook_out",
    "hook_resid_post": "hook_out",
    "hook_attn_out": "attn.hook_out",
    "hook_mlp_out": "mlp.hook_out",
    "attn.hook_q": "attn.q.hook_out",
    "attn.hook_k": "attn.k.hook_out",
    "attn.hook_v": "attn.v.hook_out",
    "attn.hook_z": "attn.o.hook_in",
    "mlp.hook_pre": "mlp.in.hook_out",
    "mlp.hook_post": "mlp.out.hook_in",
}


class HookedAlbert(HookedRootModule):  # type: ignore[misc]  # TransformerLens is untyped here
    """ALBERT with hook points for each virtual layer; made by :func:`tl_spectral.boot_albert`.

    ``run_with_cache``, ``run_with_hooks``, ``hooks`` and ``to_tokens`` work as on a
    ``TransformerBridge``, under its hook names and the older ones (``blocks.3.hook_resid_pre`` is
    ``blocks.3.hook_in``). ``hook_resid_mid`` is the state between attention and MLP, after the
    norm.

    Attributes:
        cfg: Shape and name of the model, with TransformerLens' field names.
        blocks: One block per virtual layer. All applications of a layer share its parameters:
            writing to one block's weights writes to every block.
        tokenizer: Tokenizer, or ``None``.
        compatibility_mode: Always False: weights are as Hugging Face stores them.
    """

    compatibility_mode = False

    def __init__(self, hf_model: Any, *, tokenizer: Any = None, name: str = "albert") -> None:
        super().__init__()
        config = hf_model.config
        self.hf_config, self.hf_class, self.tokenizer = config, type(hf_model), tokenizer
        encoder = hf_model.albert.encoder
        per_group = config.num_hidden_layers / config.num_hidden_groups
        layers = [
            layer
            for i in range(config.num_hidden_layers)
            for layer in encoder.albert_layer_groups[int(i / per_group)].albert_layers
        ]
        self.cfg = TransformerBridgeConfig(
            d_model=config.hidden_size,
            d_head=config.hidden_size // config.num_attention_heads,
            n_layers=len(layers),
            n_ctx=config.max_position_embeddings,
            n_heads=config.num_attention_heads,
            d_vocab=config.vocab_size,
            d_mlp=config.intermediate_size,
            architecture=self.hf_class.__name__,
            model_name=name,
            act_fn=config.hidden_act,
            eps=config.layer_norm_eps,
            attention_dir="bidirectional",
            device=str(next(hf_model.parameters()).device),
        )
        self.embed = AlbertEmbed(hf_model.albert)
        self.blocks = nn.ModuleList(AlbertBlock(layer) for layer in layers)
        self.unembed = AlbertUnembed(hf_model.predictions)
        self.setup()
        self.aliases = {"hook_embed": "embed.hook_out"} | {
            f"blocks.{layer}.{alias}": f"blocks.{layer}.{name}"
            for layer in range(len(layers))
            for alias, name in _BLOCK_ALIASES.items()
        }
        for alias, canonical in self.aliases.items():  # hooks may be added under either name
            self.mod_dict[alias] = self.mod_dict[canonical]
        self.train(hf_model.training)

    def forward(
        self,
        input: Any,
        return_type: str | None = "logits",
        *,
        token_type_ids: Int[Tensor, "batch pos"] | None = None,
        attention_mask: Int[Tensor, "batch pos"] | None = None,
    ) -> Float[Tensor, "batch pos d_vocab"] | None:
        """Logits of the masked-token head.

        Args:
            input: Token ids ``[batch, pos]`` or ``[pos]``, a text, or a list of texts (padded, and
                the padding masked).
            return_type: ``"logits"`` or ``None`` (run for the hooks' sake).
            token_type_ids: Segment of each token, 0 by default.
            attention_mask: 1 for tokens to be attended to, 0 for padding.

        Raises:
            InputError: For another return type (a masked model has no next-token loss).
        """
        if return_type not in ("logits", None):
            raise InputError(
                f"return_type must be 'logits' or None, got {return_type!r}: a masked model has no "
                "next-token loss. Compute a loss from the logits at the masked positions."
            )
        if not isinstance(input, Tensor):
            encoded = self._encode(input)
            input = encoded["input_ids"]
            attention_mask = encoded["attention_mask"] if attention_mask is None else attention_mask
        device = next(self.parameters()).device
        tokens = _as_batch(input).to(device)
        x = self.embed(tokens, token_type_ids)
        mask = None
        if attention_mask is not None and not attention_mask.all():
            hidden = attention_mask.to(device)[:, None, None, :] == 0
            mask = torch.zeros_like(hidden, dtype=x.dtype)
            mask = mask.masked_fill(hidden, torch.finfo(x.dtype).min)
        for block in self.blocks:
            x = block(x, mask)
        logits: Tensor = self.unembed(x)
        return logits if return_type == "logits" else None

    def run_with_cache(
        self,
        *model_args: Any,
        names_filter: Any = None,
        remove_batch_dim: bool = False,
        **kwargs: Any,
    ) -> tuple[Any, ActivationCache]:
        """Run and keep activations, under canonical and older names alike.

        Args:
            *model_args: As for :meth:`forward`.
            names_filter: Hook name, list of hook names, or a function of them; all by default.
            remove_batch_dim: Drop the batch dimension of a batch of one.
            **kwargs: As for TransformerLens' ``run_with_cache``.

        Raises:
            KeyError: If a name does not exist.
        """
        if isinstance(names_filter, (str, list, tuple)):
            names = [names_filter] if isinstance(names_filter, str) else names_filter
            wanted = [self.aliases.get(name, name) for name in names]
            for name in wanted:
                if name not in self.hook_dict:
                    raise KeyError(f"There is no hook {name} on {self.cfg.model_name}.")
            names_filter = wanted
        elif callable(names_filter):
            asked, other = names_filter, {name: alias for alias, name in self.aliases.items()}
            names_filter = lambda name: asked(name) or asked(other.get(name, name))  # noqa: E731
        out, kept = super().run_with_cache(
            *model_args, names_filter=names_filter, remove_batch_dim=remove_batch_dim, **kwargs
        )
        kept |= {alias: kept[name] for alias, name in self.aliases.items() if name in kept}
        return out, ActivationCache(kept, self, has_batch_dim=not remove_batch_dim)

    # ------------------------------------------------------------------ texts

    def _encode(self, text: str | Sequence[str], truncate: bool = True) -> Any:
        if self.tokenizer is None:
            raise InputError(
                f"{self.cfg.model_name} has no tokenizer, so text cannot be read. Pass token ids, "
                "or boot_albert(..., tokenizer=...)."
            )
        return self.tokenizer(
            text if isinstance(text, str) else list(text),
            return_tensors="pt",
            padding=True,
            truncation=truncate,
            max_length=self.cfg.n_ctx if truncate else None,
        )

    def to_tokens(
        self,
        text: str | Sequence[str],
        prepend_bos: bool | None = None,
        *,
        truncate: bool = True,
        move_to_device: bool = True,
    ) -> Int[Tensor, "batch pos"]:
        """Token ids, ``[CLS]`` and ``[SEP]`` included unless ``prepend_bos`` is False.

        Args:
            text: A text or a list of texts (padded to one length).
            prepend_bos: False leaves out the special tokens.
            truncate: Cut at the longest text the model takes.
            move_to_device: Put them where the model is.

        Raises:
            InputError: If there is no tokenizer.
        """
        if prepend_bos is False and self.tokenizer is not None:
            rows = self.tokenizer(
                [text] if isinstance(text, str) else list(text),
                return_tensors="pt",
                padding=True,
                truncation=truncate,
                max_length=self.cfg.n_ctx if truncate else None,
                add_special_tokens=False,
            )
            tokens: Tensor = rows["input_ids"]
        else:
            tokens = _as_batch(self._encode(text, truncate)["input_ids"])
        return tokens.to(next(self.parameters()).device) if move_to_device else tokens

    def to_string(self, tokens: Int[Tensor, "..."]) -> str | list[str]:
        """Text of token ids ``[pos]``, or texts of ``[batch, pos]``."""
        if tokens.ndim > 1:
            return [str(self.tokenizer.decode(row)) for row in tokens]
        return str(self.tokenizer.decode(tokens.reshape(-1)))

    def to_str_tokens(self, text: str | Int[Tensor, " pos"]) -> list[str]:
        """The tokens of a text (or ids) as strings."""
        tokens = text if isinstance(text, Tensor) else self.to_tokens(text)[0]
        return [str(self.tokenizer.decode([int(token)])) for token in tokens]

    # ------------------------------------------------------------------ weights

    def _stacked(self, name: str) -> Tensor:
        return torch.stack([getattr(block.attn, name) for block in self.blocks])

    @property
    def W_Q(self) -> Float[Tensor, "layer head d_model d_head"]:  # noqa: N802
        """Query weights; equal for all layers that share them."""
        return self._stacked("W_Q")

    @property
    def W_K(self) -> Float[Tensor, "layer head d_model d_head"]:  # noqa: N802
        """Key weights."""
        return self._stacked("W_K")

    @property
    def W_V(self) -> Float[Tensor, "layer head d_model d_head"]:  # noqa: N802
        """Value weights."""
        return self._stacked("W_V")

    @property
    def W_O(self) -> Float[Tensor, "layer head d_head d_model"]:  # noqa: N802
        """Output weights."""
        return self._stacked("W_O")

    @property
    def W_E(self) -> Float[Tensor, "d_vocab d_model"]:  # noqa: N802
        """Word embedding through the map to ``d_model`` (the norm between them is left out)."""
        weight: Tensor = self.embed.W_E
        return weight

    @property
    def W_U(self) -> Float[Tensor, "d_model d_vocab"]:  # noqa: N802
        """Unembedding: the head's linear maps without its activation and norm."""
        weight: Tensor = self.unembed.W_U
        return weight

    @property
    def OV(self) -> FactoredMatrix:  # noqa: N802
        """``W_V W_O`` of every layer and head."""
        return FactoredMatrix(self.W_V, self.W_O)

    @property
    def QK(self) -> FactoredMatrix:  # noqa: N802
        """``W_Q W_Kᵀ`` of every layer and head, without the scale."""
        return FactoredMatrix(self.W_Q, self.W_K.mT)

    @property
    def all_head_labels(self) -> list[str]:
        """Names of the heads: ``L0H0``, ``L0H1`` and so on."""
        return [f"L{i}H{h}" for i in range(self.cfg.n_layers) for h in range(self.cfg.n_heads)]


def _as_batch(tokens: Tensor) -> Int[Tensor, "batch pos"]:
    return tokens[None] if tokens.ndim == 1 else tokens
