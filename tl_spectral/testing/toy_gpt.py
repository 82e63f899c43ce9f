"""A small GPT-2 trained from scratch, with checkpoints on the way: is a property learned, and when?

Trained on prose that every Python has, in a minute or two on one core. Its checkpoints are ordinary
model directories, so the whole package works on them as on those of a released model.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_spectral.errors import InputError
from tl_spectral.texts import builtin_corpus
from tl_spectral.threads import torch_threads_for

END = "<|endoftext|>"
_WARM_UP = 0.05  # share of the steps over which the learning rate rises


@dataclass(frozen=True, eq=False)
class TinyGPT:
    """A trained GPT-2 and its checkpoints.

    Attributes:
        steps: Optimiser steps of each checkpoint; 0 is the untrained model.
        paths: Directory of each checkpoint, for :func:`tl_spectral.load_model`.
        losses: Cross-entropy at every step, nats per token.
        unigram_entropy: Entropy of the tokens' frequencies in the training text, nats: the loss of
            a model that knows frequencies but no context.
    """

    steps: tuple[int, ...]
    paths: tuple[Path, ...]
    losses: Float[Tensor, " step"]
    unigram_entropy: float

    def load(self, step: int) -> Any:
        """The checkpoint of a step as a ``TransformerBridge``.

        Raises:
            InputError: If there is no checkpoint of that step.
        """
        from tl_spectral.model import load_model

        if step not in self.steps:
            raise InputError(f"There is no checkpoint of step {step}; there are {self.steps}.")
        return load_model(self.paths[self.steps.index(step)])


def log_spaced(steps: int, count: int = 8) -> tuple[int, ...]:
    """0 and so many steps up to the last, evenly spaced on a log scale.

    Args:
        steps: The last step.
        count: How many after 0; fewer where whole numbers coincide.
    """
    powers = [steps ** (i / max(1, count - 1)) for i in range(count)]
    return (0, *sorted({round(power) for power in powers}))


def train_tiny_gpt(
    out: str | os.PathLike[str],
    *,
    steps: int = 800,
    seed: int = 0,
    checkpoints: Sequence[int] | None = None,
    hidden: int = 64,
    layers: int = 4,
    heads: int = 4,
    vocabulary: int = 512,
    length: int = 64,
    batch: int = 16,
    learning_rate: float = 3e-3,
    texts: Sequence[str] | None = None,
) -> TinyGPT:
    """Train a small GPT-2 to predict the next token; the same seed gives the same weights.

    One thread, CPU, no dropout; about a minute at the defaults. Torch's global random state and
    number of threads are as before afterwards.

    Args:
        out: Directory for the checkpoints ``step_000000``, …; one that is not empty is refused.
        steps: Optimiser steps (AdamW; linear warm-up over a twentieth of them, then cosine to a
            tenth).
        seed: Seed of weights and batches.
        checkpoints: Steps after which the model is saved; by default 0 and eight log-spaced ones.
        hidden: Width of the residual stream.
        layers: Number of blocks.
        heads: Attention heads.
        vocabulary: Size of the byte-pair vocabulary that is learned from the texts first.
        length: Tokens per training sequence, and the longest text that the model takes.
        batch: Sequences per step.
        learning_rate: Highest learning rate.
        texts: What to train on; by default the built-in corpus
            (:func:`tl_spectral.texts.builtin_corpus`).

    Returns:
        The checkpoints and how the training went.

    Raises:
        InputError: If a number is out of range, the texts are shorter than one sequence, or the
            directory is not empty.
    """
    saved = log_spaced(steps) if checkpoints is None else tuple(sorted(set(checkpoints)))
    _check(out, steps, saved, hidden, layers, heads, vocabulary, length, batch)
    prose = list(builtin_corpus() if texts is None else texts)
    tokenizer = _tokenizer(prose, vocabulary, length)
    read = tokenizer.backend_tokenizer.encode_batch(prose)
    stream = torch.tensor([i for text in read for i in (*text.ids, tokenizer.eos_token_id)])
    if len(stream) <= length:
        raise InputError(f"The texts have {len(stream)} tokens; one sequence takes {length + 1}.")
    folder = Path(out)
    paths = tuple(folder / f"step_{step:06d}" for step in saved)

    def save(model: Any, step: int) -> None:
        if step in saved:
            path = paths[saved.index(step)]
            with _quiet():
                model.save_pretrained(path)
            tokenizer.save_pretrained(path)

    with torch_threads_for(os.cpu_count() or 1), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # sums are split between threads: one thread, one result
        model = _untrained(tokenizer, hidden, layers, heads, length)
        losses = _train(model, stream, steps, seed, length, batch, learning_rate, save)
    share = torch.bincount(stream).double() / len(stream)
    entropy = -float(torch.special.xlogy(share, share).sum())
    record = {"steps": saved, "seed": seed, "unigram_entropy": entropy, "losses": losses.tolist()}
    (folder / "training.json").write_text(json.dumps(record) + "\n", encoding="utf-8")
    return TinyGPT(saved, paths, losses, entropy)


def _check(
    out: str | os.PathLike[str],
    steps: int,
    saved: tuple[int, ...],
    hidden: int,
    layers: int,
    heads: int,
    vocabulary: int,
    length: int,
    batch: int,
) -> None:
    if min(steps, layers, heads, batch) < 1 or length < 2 or hidden % max(heads, 1):
        raise InputError(
            "steps, layers, heads and batch must be at least 1, length 2, and hidden a multiple of "
            f"heads; got {steps}, {layers}, {heads}, {batch}, {length}, {hidden}."
        )
    if vocabulary < 300:
        raise InputError(f"vocabulary must be at least 300 (256 are bytes), got {vocabulary}.")
    if not saved or saved[0] < 0 or saved[-1] > steps:
        raise InputError(f"checkpoints lie between 0 and {steps} steps, got {list(saved)}.")
    folder = Path(out)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder} is not empty. Choose another directory for the checkpoints.")


@contextmanager
def _quiet() -> Iterator[None]:
    """No loading bar for each of a dozen small files."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _tokenizer(texts: list[str], vocabulary: int, length: int) -> Any:
    """A byte-pair tokenizer learned from the texts, as GPT-2's."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=END,
        eos_token=END,
        pad_token=END,
        model_max_length=length,
        verbose=False,
    )


def _untrained(tokenizer: Any, hidden: int, layers: int, heads: int, length: int) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=length,
        n_embd=hidden,
        n_layer=layers,
        n_head=heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        attn_implementation="eager",
    )
    return GPT2LMHeadModel(config)


def _train(
    model: Any,
    stream: Int[Tensor, " token"],
    steps: int,
    seed: int,
    length: int,
    batch: int,
    learning_rate: float,
    save: Callable[[Any, int], None],
) -> Float[Tensor, " step"]:
    generator = torch.Generator().manual_seed(seed)
    optimiser = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95))
    warm = max(1, round(_WARM_UP * steps))

    def share(step: int) -> float:
        if step < warm:
            return (step + 1) / warm
        return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, share)
    window = torch.arange(length + 1)
    losses = torch.zeros(steps)
    save(model.eval(), 0)
    model.train()
    for step in range(steps):
        starts = torch.randint(len(stream) - length, (batch, 1), generator=generator)
        rows = stream[starts + window]
        logits = model(rows[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        losses[step] = loss.detach()
        save(model, step + 1)
    return losses
