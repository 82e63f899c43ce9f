"""Tiny random models of every architecture under test, built from Hugging Face configs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as tf
from transformer_lens.model_bridge.sources import build_bridge_from_module

from tl_spectral import boot_albert

VOCAB, WIDTH, LAYERS, HEADS, CONTEXT = 64, 24, 3, 4, 32

_LLAMA_LIKE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "max_position_embeddings": CONTEXT,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GEMMA = {**_LLAMA_LIKE, "head_dim": 6, "sliding_window": 4, "query_pre_attn_scalar": 6}
_NEOX = {key: value for key, value in _LLAMA_LIKE.items() if key != "num_key_value_heads"}
_GPT2_LIKE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "n_embd": WIDTH,
    "n_layer": LAYERS,
    "n_head": HEADS,
    "n_positions": CONTEXT,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_BERT = {**_NEOX, "max_position_embeddings": CONTEXT + 2, "type_vocab_size": 2}

ARCHITECTURES: dict[str, tuple[str, Callable[[], Any]]] = {
    "gpt2": ("GPT2LMHeadModel", lambda: tf.GPT2Config(**_GPT2_LIKE)),
    "gpt_neo": (
        "GPTNeoForCausalLM",
        lambda: tf.GPTNeoConfig(
            vocab_size=VOCAB,
            hidden_size=WIDTH,
            num_layers=LAYERS,
            num_heads=HEADS,
            max_position_embeddings=CONTEXT,
            attention_types=[[["local", "global", "local"], 1]],
            window_size=4,
        ),
    ),
    "pythia": ("GPTNeoXForCausalLM", lambda: tf.GPTNeoXConfig(**_NEOX)),
    "gptj": ("GPTJForCausalLM", lambda: tf.GPTJConfig(**_GPT2_LIKE, rotary_dim=4)),
    "opt": (
        "OPTForCausalLM",
        lambda: tf.OPTConfig(
            **{k: v for k, v in _NEOX.items() if k != "intermediate_size"},
            ffn_dim=40,
            word_embed_proj_dim=WIDTH,
        ),
    ),
    "llama": ("LlamaForCausalLM", lambda: tf.LlamaConfig(**_LLAMA_LIKE)),
    "mistral": (
        "MistralForCausalLM",
        lambda: tf.MistralConfig(**_LLAMA_LIKE, sliding_window=4, head_dim=6),
    ),
    "qwen2": ("Qwen2ForCausalLM", lambda: tf.Qwen2Config(**_LLAMA_LIKE)),
    "qwen3": ("Qwen3ForCausalLM", lambda: tf.Qwen3Config(**_LLAMA_LIKE, head_dim=6)),
    "gemma2": ("Gemma2ForCausalLM", lambda: tf.Gemma2Config(**_GEMMA)),
    "gemma3": ("Gemma3ForCausalLM", lambda: tf.Gemma3TextConfig(**_GEMMA)),
    "olmo2": ("Olmo2ForCausalLM", lambda: tf.Olmo2Config(**_LLAMA_LIKE)),
    "phi3": ("Phi3ForCausalLM", lambda: tf.Phi3Config(**_LLAMA_LIKE)),
    "bloom": (
        "BloomForCausalLM",
        lambda: tf.BloomConfig(vocab_size=VOCAB, hidden_size=WIDTH, n_layer=LAYERS, n_head=HEADS),
    ),
    "mixtral": (
        "MixtralForCausalLM",
        lambda: tf.MixtralConfig(**_LLAMA_LIKE, num_local_experts=4, num_experts_per_tok=2),
    ),
    "bert": ("BertForMaskedLM", lambda: tf.BertConfig(**_BERT)),
    "roberta": ("RobertaForMaskedLM", lambda: tf.RobertaConfig(**{**_BERT, "pad_token_id": 1})),
    "albert": (
        "AlbertForMaskedLM",
        lambda: tf.AlbertConfig(**{**_BERT, "max_position_embeddings": CONTEXT}, embedding_size=16),
    ),
}


def tiny(name: str, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """A tiny random model: every weight moved off its special value, norms and biases included."""
    architecture, _ = ARCHITECTURES[name]
    hf = tiny_hf(name, seed=seed, dtype=dtype)
    if name == "albert":
        hf.config.name_or_path = f"tiny-{name}"
        return boot_albert(hf)
    return build_bridge_from_module(
        hf, architecture=architecture, hf_config=hf.config, model_name=f"tiny-{name}", dtype=dtype
    )


def tiny_hf(name: str, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """The same before it is hooked."""
    architecture, config = ARCHITECTURES[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        hf = getattr(tf, architecture)(config()).eval()
        for parameter in hf.parameters():
            # Larger than the init scheme's 0.02, so that attention and gating are far from flat.
            parameter.data.add_(torch.randn_like(parameter) * 0.15)
    hf = hf.to(dtype)
    hf.set_attn_implementation("eager")
    return hf
