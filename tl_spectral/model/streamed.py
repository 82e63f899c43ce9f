"""A model on disk of which one block at a time is in memory.

Each block becomes a hooked model of its own: the architecture's forward pass around a single block,
with the embeddings of the tokens in use and nothing else of the vocabulary. What a block reads is
handed to it (:meth:`StreamedBlock.feed`); everything else — masks, rotary angles, local or global
attention, routing — is the architecture's own code.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from tl_spectral.errors import InputError, UnsupportedModelError
from tl_spectral.model.checkpoint import Checkpoint

_INDEX_OF_LAYER = ("layer_idx", "layer_id", "layer_number")
_BY_DEPTH = ("scale_attn_by_inverse_layer_idx",)  # options that make a block ask for its own depth
_PROBE = 5  # the token that finds the anatomy of a block


class StreamedModel:
    """What is known of a model without loading it, and its blocks one by one.

    Args:
        folder: Folder with ``config.json`` and safetensors weights, sharded or not.
        dtype: dtype that blocks are loaded in.

    Attributes:
        folder: That folder.
        checkpoint: Its tensors.
        n_layers: Number of blocks.

    Raises:
        InputError: If weights are missing or damaged.
        UnsupportedModelError: If the architecture cannot be taken apart into blocks.
    """

    def __init__(self, folder: str | Path, *, dtype: torch.dtype = torch.float32) -> None:
        from transformer_lens.factories.architecture_adapter_factory import (
            ArchitectureAdapterFactory,
        )
        from transformer_lens.model_bridge.sources._bridge_builder import (
            build_bridge_config_from_hf,
        )
        from transformers import AutoConfig

        self.folder = Path(folder)
        self.dtype = dtype
        self.checkpoint = Checkpoint.open(self.folder)
        self.config = AutoConfig.from_pretrained(self.folder)
        self.architecture = str((getattr(self.config, "architectures", None) or ["none"])[0])
        _require_plain(self.config, self.architecture)
        self.n_layers: int = self.config.num_hidden_layers
        settings = build_bridge_config_from_hf(
            self.config, self.architecture, str(self.folder), dtype
        )
        adapter = ArchitectureAdapterFactory.select_architecture_adapter(settings)
        self._path: str = adapter.component_mapping["blocks"].name
        self._names = self.checkpoint.blocks(self._path)

    def block(self, layer: int, texts: Sequence[Int[Tensor, " pos"]] = ()) -> StreamedBlock:
        """Load one block.

        Args:
            layer: Which.
            texts: The texts that will pass through it: only their tokens are in its vocabulary.

        Raises:
            InputError: If the weights of the block are damaged or not all there.
        """
        from transformer_lens.model_bridge.sources import build_bridge_from_module

        used = torch.unique(torch.cat([*texts, torch.tensor([min(_PROBE, self._vocabulary - 1)])]))
        hf = self._skeleton(layer)
        self._fill(hf, layer, used)
        gate = _Gate(hf.get_input_embeddings(), used, self._vocabulary)
        model = build_bridge_from_module(
            hf,
            architecture=self.architecture,
            hf_config=hf.config,
            tokenizer=tokenizer_of(self.folder),
            model_name=str(self.folder),
        ).eval()
        model.blocks[0].register_forward_pre_hook(gate.admit, with_kwargs=True)
        return StreamedBlock(model, layer, gate)

    @property
    def _vocabulary(self) -> int:
        return int(self.config.vocab_size)

    def _skeleton(self, layer: int) -> Any:
        """The model class around one block, as that block knows itself in the whole model."""
        from accelerate import init_empty_weights

        config = copy.deepcopy(self.config)
        config._attn_implementation = "eager"
        with init_empty_weights(include_buffers=False):
            hf = _model_class(self.architecture)(config).eval()
        owner = hf.get_submodule(self._path.rpartition(".")[0])
        name = self._path.rpartition(".")[2]
        block = getattr(owner, name)[layer]
        setattr(owner, name, nn.ModuleList([block]))
        for module in block.modules():
            for attribute in _INDEX_OF_LAYER:  # where it keeps its keys, nothing else
                if isinstance(getattr(module, attribute, None), int):
                    setattr(module, attribute, 0)
        for config in {
            id(m.config): m.config for m in hf.modules() if hasattr(m, "config")
        }.values():
            _of_one_layer(config, layer, self.n_layers)
        return hf

    def _fill(self, hf: Any, layer: int, used: Int[Tensor, " token"]) -> None:
        """Give every parameter its values; transformers knows old names and fused experts."""
        tensors = {as_first: self.checkpoint.read(n) for n, as_first in self._names.of(layer)}
        for name in self.checkpoint.files:
            if name not in self._names.layer:
                shape = self.checkpoint.shape(name)
                rows = used if shape and shape[0] == self._vocabulary else None
                tensors[name] = self.checkpoint.read(name, rows)
        config = copy.deepcopy(hf.config)
        config.vocab_size = len(used)
        config.pad_token_id = None
        small, report = type(hf).from_pretrained(
            None, config=config, state_dict=tensors, dtype=self.dtype, output_loading_info=True
        )
        inside = [name for name in report["missing_keys"] if name.startswith(f"{self._path}.0.")]
        if inside:
            raise InputError(
                f"{self.folder} lacks weights of layer {layer}, such as {sorted(inside)[0]} "
                "(numbered as in the first layer). Download it again."
            )
        given = dict(small.named_parameters(remove_duplicate=False))
        for name, module in hf.named_modules():
            for own, _ in list(module.named_parameters(recurse=False)):
                full = f"{name}.{own}" if name else own
                setattr(module, own, nn.Parameter(given[full].data, requires_grad=False))


class StreamedBlock:
    """One block in memory, as a hooked model with a single layer.

    Attributes:
        model: A ``TransformerBridge`` of one block; the library calls it layer 0.
        layer: Which layer it is in the whole model.
    """

    def __init__(self, model: Any, layer: int, gate: _Gate) -> None:
        self.model = model
        self.layer = layer
        self._gate = gate

    @contextmanager
    def feed(
        self,
        texts: Sequence[Int[Tensor, " pos"]],
        states: Sequence[Float[Tensor, "pos d_model"]],
    ) -> Iterator[Any]:
        """Let each text enter the block with its own states, in place of its embeddings.

        Args:
            texts: Token ids.
            states: ``resid_pre`` of the block at every position of each text.
        """
        self._gate.states = {
            tuple(text.tolist()): state for text, state in zip(texts, states, strict=True)
        }
        try:
            yield self.model
        finally:
            self._gate.states = None


class _Gate:
    """Sees which texts come in, and gives the block what they are at its depth."""

    def __init__(self, embedding: nn.Module, used: Int[Tensor, " token"], vocabulary: int) -> None:
        self.states: dict[tuple[int, ...], Tensor] | None = None
        self._texts = torch.empty(0, 0, dtype=torch.long)
        self._row = torch.full((vocabulary,), -1)
        self._row[used] = torch.arange(len(used))
        embedding.padding_idx = None  # type: ignore[assignment]
        embedding.register_forward_pre_hook(self.look)

    def look(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Note the token ids, and number them as the small embedding does."""
        self._texts = args[0]
        rows = self._row[args[0]]
        if (rows < 0).any():
            raise InputError(
                f"Token {int(args[0][rows < 0][0])} is not in the texts that this block was loaded "
                "for. Load it for these texts."
            )
        return (rows, *args[1:])

    def admit(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Put the states of the texts in place of what comes in."""
        if self.states is None:
            return None
        found = [self.states.get(tuple(text.tolist())) for text in self._texts]
        given = [state for state in found if state is not None]
        if not given and self._texts.shape[1] == 1:
            return None  # a token by itself: whoever sends one says what it is through a hook
        if len(given) < len(found):
            raise InputError("A text came to a streamed block that was fed no states for it.")
        old = args[0] if args else kwargs["hidden_states"]
        new = torch.stack(given).to(old).reshape(old.shape)
        return ((new, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": new})


def tokenizer_of(folder: Path) -> Any:
    """The tokenizer in a folder, or ``None``: then the model takes token ids only."""
    from transformers import AutoTokenizer

    if not any(folder.glob("tokenizer*")):  # transformers would make up an empty one
        return None
    return AutoTokenizer.from_pretrained(folder)


def _model_class(architecture: str) -> Any:
    import transformers

    return getattr(transformers, architecture)


def _require_plain(config: Any, architecture: str) -> None:
    import transformers

    if config.get_text_config() is not config or getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"{architecture} is more than one stack of blocks, which is not streamed. Load it "
            "whole."
        )
    if config.model_type == "albert":
        raise UnsupportedModelError(
            "ALBERT's layers share one block, so there is nothing to stream. Load it whole."
        )
    if not hasattr(transformers, architecture):
        raise UnsupportedModelError(
            f"transformers has no class {architecture}, which config.json names. Load the model "
            "whole."
        )
    by_depth = [name for name in _BY_DEPTH if getattr(config, name, False)]
    if by_depth:
        raise UnsupportedModelError(
            f"With {by_depth[0]} a block depends on its own depth; this is not streamed. Load the "
            "model whole."
        )


def _of_one_layer(config: Any, layer: int, n_layers: int) -> None:
    """What is said layer by layer is said of this one only."""
    for name, value in list(vars(config).items()):
        per_layer = isinstance(value, (list, tuple)) and len(value) == n_layers
        if per_layer and not re.match("architectures|.*token_id", name):
            setattr(config, name, [value[layer]])
    config.num_hidden_layers = 1
