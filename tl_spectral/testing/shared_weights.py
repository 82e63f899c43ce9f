"""A small trained model whose layers share their weights: the paper's cleanest case, made here.

ALBERT applies one block again and again, so its F is one matrix and theory has a limit to predict
([B] arXiv 2605.25619). Its checkpoints are large; this one is trained in half a minute on one core,
from prose that every Python has.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_spectral.errors import InputError
from tl_spectral.texts import builtin_corpus

ALPHABET = "abcdefghijklmnopqrstuvwxyz ,.-'()0123456789"
"""Characters that the toy reads, lower case; all others are one unknown token."""

_PAD, _CLS, _MASK, _UNKNOWN = range(4)
_IDS = {character: index + _UNKNOWN + 1 for index, character in enumerate(ALPHABET)}
_VOCABULARY = _UNKNOWN + 1 + len(_IDS)
_MASKED = 0.3  # share of characters hidden
_SHALLOW, _DEEP = 0.6, 0.8  # shares of the steps: one layer until here, all of them from there
_WARM_UP = 0.04  # share of the steps over which the learning rate rises


@dataclass(frozen=True, eq=False)
class SharedWeightsToy:
    """A trained ALBERT-like masked language model of characters.

    Attributes:
        model: Hugging Face ``AlbertForMaskedLM`` in evaluation mode: one block, applied
            ``num_hidden_layers`` times.
        untrained: The same model before the first step.
        losses: Cross-entropy of the hidden characters at every step, nats.
        unigram_entropy: Entropy of the characters' frequencies in the training text, nats: the loss
            of a model that knows frequencies but no context.
    """

    model: Any
    untrained: Any
    losses: Float[Tensor, " step"]
    unigram_entropy: float

    @staticmethod
    def encode(text: str) -> Int[Tensor, " pos"]:
        """Token ids of a text: ``[CLS]``, then one per character, lower case."""
        return torch.tensor([_CLS, *(_IDS.get(c, _UNKNOWN) for c in text.lower())])


def train_shared_weights(
    *,
    steps: int = 1200,
    seed: int = 0,
    hidden: int = 64,
    layers: int = 6,
    heads: int = 4,
    embedding: int = 32,
    length: int = 24,
    batch: int = 64,
    learning_rate: float = 2e-3,
    texts: Sequence[str] | None = None,
) -> SharedWeightsToy:
    """Train a small ALBERT to fill in hidden characters; the same seed gives the same weights.

    Three choices make it leave the plateau of mere frequencies within seconds instead of minutes:
    the output bias starts at the log frequencies; positions start as sine waves; and the block is
    applied once for the first 60 % of the steps, then ever more often (progressive stacking, Gong
    et al. 2019, which with shared weights changes no parameter).

    One thread, CPU, no dropout; half a minute at the defaults. Torch's global random state and
    number of threads are as before afterwards.

    Args:
        steps: Optimiser steps (AdamW; short warm-up, cosine to zero over the last 40 %).
        seed: Seed of weights, batches and masks.
        hidden: Width of the residual stream.
        layers: How often the one block is applied in the end.
        heads: Attention heads.
        embedding: Width of the embedding, projected to ``hidden`` as ALBERT does.
        length: Characters per training sequence, ``[CLS]`` included.
        batch: Sequences per step.
        learning_rate: Highest learning rate.
        texts: What to train on; by default the built-in corpus
            (:func:`tl_spectral.texts.builtin_corpus`).

    Returns:
        The model and how its training went.

    Raises:
        InputError: If a count is too small or the texts are shorter than one sequence.
    """
    if min(steps, layers, batch) < 1 or length < 3:
        raise InputError(
            f"steps, layers and batch must be at least 1 and length 3, got {steps}, {layers}, "
            f"{batch}, {length}."
        )
    stream = SharedWeightsToy.encode(" ".join(builtin_corpus() if texts is None else texts))[1:]
    if len(stream) < length:
        raise InputError(f"The texts have {len(stream)} characters; one sequence takes {length}.")
    counts = torch.bincount(stream, minlength=_VOCABULARY).double()
    with _one_thread():
        model, untrained = (
            _untrained(hidden, layers, heads, embedding, length, counts, seed) for _ in range(2)
        )
        losses = _train(model, stream, steps, seed, length, batch, learning_rate)
    return SharedWeightsToy(
        model=model.eval(),
        untrained=untrained.eval(),
        losses=losses,
        unigram_entropy=torch.special.entr(counts / counts.sum()).sum().item(),
    )


def _untrained(
    hidden: int, layers: int, heads: int, embedding: int, length: int, counts: Tensor, seed: int
) -> Any:
    from transformers import AlbertConfig, AlbertForMaskedLM

    config = AlbertConfig(
        vocab_size=_VOCABULARY,
        embedding_size=embedding,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=2 * hidden,
        max_position_embeddings=length,
        type_vocab_size=1,
        pad_token_id=_PAD,
        bos_token_id=None,
        eos_token_id=None,
        classifier_dropout_prob=0.0,
        initializer_range=0.1,  # 0.02 is for widths near a thousand
    )
    config._attn_implementation = "eager"  # TransformerLens' hooks see the pattern
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AlbertForMaskedLM(config)
    frequencies = (counts + 0.5) / (counts + 0.5).sum()
    model.predictions.bias.data.copy_(frequencies.log())
    model.predictions.LayerNorm.weight.data.fill_(0.3)  # a guess barely off the frequencies
    angles = torch.arange(length)[:, None] * 0.3 ** torch.arange(embedding // 2)
    waves = 0.3 * torch.cat([angles.sin(), angles.cos()], dim=1)
    model.albert.embeddings.position_embeddings.weight.data[:, : waves.shape[1]] = waves
    return model


def _train(
    model: Any,
    stream: Int[Tensor, " character"],
    steps: int,
    seed: int,
    length: int,
    batch: int,
    learning_rate: float,
) -> Float[Tensor, " step"]:
    generator = torch.Generator().manual_seed(seed)
    optimiser = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.98))
    config, layers = model.albert.encoder.config, model.config.num_hidden_layers
    window = torch.arange(length - 1)
    losses = torch.zeros(steps)
    model.train()
    for step in range(steps):
        for group in optimiser.param_groups:
            group["lr"] = learning_rate * _share_of_rate(step / steps)
        config.num_hidden_layers = _depth(step / steps, layers)
        starts = torch.randint(len(stream) - length + 2, (batch, 1), generator=generator)
        true = torch.cat([torch.full((batch, 1), _CLS), stream[starts + window]], dim=1)
        hidden = torch.rand(true.shape, generator=generator) < _MASKED
        hidden[:, 0] = False
        hidden[:, 1] |= ~hidden.any(dim=1)  # every sequence asks something
        logits = model(torch.where(hidden, _MASK, true)).logits[hidden]
        loss = torch.nn.functional.cross_entropy(logits, true[hidden])
        optimiser.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        losses[step] = loss.detach()
    config.num_hidden_layers = layers
    return losses


def _share_of_rate(progress: float) -> float:
    if progress < _SHALLOW:
        return min(1.0, (progress + 1e-3) / _WARM_UP)
    return 0.5 * (1 + math.cos(math.pi * (progress - _SHALLOW) / (1 - _SHALLOW)))


def _depth(progress: float, layers: int) -> int:
    """1, then 2, 4, … in even shares of the time between, then all layers."""
    if progress >= _DEEP:
        return layers
    between = [2**k for k in range(1, layers.bit_length()) if 2**k < layers]
    if progress < _SHALLOW or not between:
        return 1
    depth: int = between[int(len(between) * (progress - _SHALLOW) / (_DEEP - _SHALLOW))]
    return depth


@contextmanager
def _one_thread() -> Iterator[None]:
    """Sums are split between threads, and rounding with them: one thread, one result."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
