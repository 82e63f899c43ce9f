"""Classes of tokens: by position, by word, or as the caller says."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from tl_spectral.errors import InputError
from tl_spectral.model import ModelView

TokenClasses = str | Mapping[str, Collection[int]] | Callable[[int, int], str]
"""``"position"``, ``"words"``, a dict of class → token ids, or a function of id and position."""

_TAKEN = ("all", "first", "rest", "random")
_WORD_STARTS = ("Ġ", "▁")  # byte-level BPE and SentencePiece; WordPiece marks all other pieces

_FUNCTION_WORDS = """
a an the this that these those such some any each every either neither no all both half other
another same own much many more most few fewer less least several enough
i me my mine myself we us our ours ourselves you your yours yourself yourselves he him his
himself she her hers herself it its itself they them their theirs themselves one ones someone
somebody something anyone anybody anything everyone everybody everything nobody nothing none
who whom whose which what whatever whoever whichever
of in on at by for with from to into onto about against between among through during before
after above below over under up down out off around across along behind beside besides beyond
near since until till toward towards upon within without via per than as like unlike despite
and or but nor so yet if unless because although though while whereas whether when whenever
where wherever why how once
be am is are was were been being have has had having do does did doing can could may might must
shall should will would ought
not also only just even too very quite rather still already again ever never always often
here there then thus hence therefore however moreover
"""
FUNCTION_WORDS = frozenset(_FUNCTION_WORDS.split())
"""English words that carry grammar more than content: determiners, pronouns, prepositions,
conjunctions, auxiliaries, and the commonest adverbs of degree, time and place. A fixed list, so
that a result does not depend on a tagger; it takes every ``that`` or ``like`` alike."""


def token_classes(
    view: ModelView, tokens: Sequence[Int[Tensor, " _"]], classes: TokenClasses
) -> dict[str, Bool[Tensor, " token"]]:
    """Which tokens of all texts, one after the other, belong to each class.

    Args:
        view: The model, for its tokenizer.
        tokens: Token ids of each text.
        classes: ``"position"``: nothing beyond ``all``, ``first`` (first position of each text: the
            BOS token or ``[CLS]`` where the tokenizer puts one) and ``rest``. ``"words"``: also,
            among ``rest``, ``function words`` and ``content words`` (every piece of a word, by
            :data:`FUNCTION_WORDS`), ``punctuation`` (digits and symbols too) and ``special
            tokens``. A dict of class → token ids, or a function of token id and position that
            names a class, count every position; a token may be in several classes of a dict, and
            in none.

    Returns:
        One mask per class that has any token.

    Raises:
        InputError: If ``classes`` is none of these, takes a name that is in use, or needs a
            tokenizer where there is none.
    """
    first = torch.cat([torch.arange(row.numel()) == 0 for row in tokens])
    masks = {"all": torch.ones_like(first), "first": first, "rest": ~first}
    if isinstance(classes, str):
        if classes not in ("position", "words"):
            raise InputError(
                f"classes must be 'position', 'words', a dict of class → token ids, or a function "
                f"of token id and position; got {classes!r}."
            )
        named = _of_words(view, tokens, ~first) if classes == "words" else {}
    elif isinstance(classes, Mapping):
        everything = torch.cat(list(tokens))
        named = {
            name: torch.isin(everything, torch.tensor(sorted(map(int, ids)), dtype=torch.long))
            for name, ids in classes.items()
        }
    else:
        called = [
            classes(int(token), position) for row in tokens for position, token in enumerate(row)
        ]
        if not all(isinstance(name, str) for name in called):
            raise InputError("The function that names token classes must return a string.")
        named = {
            name: torch.tensor([other == name for other in called])
            for name in dict.fromkeys(called)
        }
    for name in named:
        if name in _TAKEN or not isinstance(name, str):
            raise InputError(f"{name!r} cannot name a token class; {', '.join(_TAKEN)} are taken.")
    return {name: mask for name, mask in (masks | named).items() if mask.any()}


def _of_words(
    view: ModelView, tokens: Sequence[Tensor], rest: Bool[Tensor, " token"]
) -> dict[str, Bool[Tensor, " token"]]:
    tokenizer = view.source.tokenizer
    if tokenizer is None:
        raise InputError(
            f"{view.name} has no tokenizer, so its tokens have no words. Give classes as a dict of "
            "class → token ids, or as a function."
        )
    special = set(tokenizer.all_special_ids)
    # Byte-level vocabularies hold "##" too, as Markdown's heading.
    wordpiece = not any(piece.startswith(_WORD_STARTS) for piece in tokenizer.get_vocab())
    known = {i: _read(tokenizer, i, wordpiece) for i in set(torch.cat(list(tokens)).tolist())}
    known |= dict.fromkeys(special, (True, None))
    names = [name for row in tokens for name in word_classes([known[i] for i in row.tolist()])]
    kinds = ("function words", "content words", "punctuation", "special tokens")
    return {kind: torch.tensor([name == kind for name in names]) & rest for kind in kinds}


def _read(tokenizer: Any, token: int, wordpiece: bool) -> tuple[bool, str]:
    """Whether a piece starts a word, and what it reads as."""
    piece = tokenizer.convert_ids_to_tokens(token)
    text = tokenizer.decode([token]).strip()
    if wordpiece:
        return not piece.startswith("##"), text.removeprefix("##")
    return piece.startswith(_WORD_STARTS), text


def word_classes(pieces: Sequence[tuple[bool, str | None]]) -> list[str]:
    """Class of each piece of a text; the pieces of one word share theirs.

    Args:
        pieces: Per piece whether it is marked as the start of a word, and its text (``None`` for a
            special token). After a piece without letters a word starts in any case.
    """
    words: list[list[int]] = []
    names = []
    open_word = False
    for index, (starts, text) in enumerate(pieces):
        wordy = text is not None and any(character.isalpha() for character in text)
        if wordy and open_word and not starts:
            words[-1].append(index)
        elif wordy:
            words.append([index])
        open_word = wordy
        names.append("special tokens" if text is None else "punctuation")
    for word in words:
        function = _is_function_word("".join(pieces[i][1] or "" for i in word))
        for index in word:
            names[index] = "function words" if function else "content words"
    return names


def _is_function_word(word: str) -> bool:
    head, apostrophe, _ = word.lower().replace("’", "'").partition("'")
    return head in FUNCTION_WORDS or bool(apostrophe and head.removesuffix("n") in FUNCTION_WORDS)


def describe(classes: Any) -> Any:
    """The option for the provenance, where a function is known by its name."""
    if isinstance(classes, str):
        return classes
    if isinstance(classes, Mapping):
        return {name: sorted(map(int, ids)) for name, ids in classes.items()}
    return getattr(classes, "__qualname__", type(classes).__name__)
