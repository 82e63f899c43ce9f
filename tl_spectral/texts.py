"""Texts to analyse: a list, a file, a dataset of the hub, or prose that every Python has.

The built-in corpus is gathered at run time from the docstrings of Python's standard library, so no
text is shipped. It is the same for one Python version; the run's provenance holds the hash of the
tokens, so two runs can be told apart.
"""

from __future__ import annotations

import ast
import functools
import json
import os
import random
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tl_spectral.errors import InputError

MIN_WORDS = 24
_PROSE = 0.93  # least share of letters and spaces: code, tables and option lists have less
_NOT_PROSE = (">>>", "::", "http", "\\", "`")
_LEFT_OUT = {
    *("test", "tests", "idlelib", "idle_test", "lib2to3", "turtledemo", "__pycache__"),
    *("site-packages", "dist-packages"),  # what others installed is not the standard library
}
_FILES = {".txt", ".jsonl", ".json", ".csv", ".tsv", ".md", ".gz", ".zst", ".parquet"}
_HUB_DEFAULT = 1000  # some datasets of the hub never end


def load_texts(source: Any = None, *, n: int | None = None, seed: int = 0) -> list[Any]:
    """Texts from wherever the user has them.

    Args:
        source: A list of texts or token tensors (returned as it is, checked); the path of a file
            with one text a line, or of a ``.jsonl`` file with a ``text`` field a line (empty lines
            of a file are skipped); the name of a dataset on the Hugging Face hub, or
            ``NAME:CONFIG`` (its ``train`` split, ``text`` column); or ``None`` for the built-in
            corpus.
        n: Use the first ``n`` only; by default all, and 1,000 of a dataset of the hub. A source
            that has fewer gives what it has, but the built-in corpus refuses.
        seed: Order of the built-in corpus.

    Returns:
        The texts.

    Raises:
        InputError: If there is no text, or one is empty or not a text; the message names it.
    """
    if n is not None and (isinstance(n, bool) or not isinstance(n, int) or n < 1):
        raise InputError(f"The number of texts must be a positive integer, got {n!r}.")
    if source is None:
        texts: list[Any] = builtin_corpus(seed)
        if n is not None and n > len(texts):
            raise InputError(
                f"The built-in corpus has {len(texts)} texts, {n} were asked for. Ask for fewer, "
                "or give texts of your own."
            )
    elif isinstance(source, (str, os.PathLike)):
        texts = _from_name(os.fspath(source), n or _HUB_DEFAULT)
    elif isinstance(source, Iterable):
        texts = list(source)
    else:
        raise InputError(
            f"Texts are a list, a file or a dataset name, not {type(source).__name__}."
        )
    if not texts:
        raise InputError("There is no text. Give at least one.")
    texts = texts[:n]
    for index, text in enumerate(texts):
        if isinstance(text, str):
            if not text.strip():
                raise InputError(f"Text {index} is empty. Leave it out.")
        elif not hasattr(text, "shape"):  # token tensors; the model's vocabulary judges those
            raise InputError(
                f"Text {index} is a {type(text).__name__} ({text!r}), not a string or a tensor of "
                "token ids."
            )
    return texts


def builtin_corpus(seed: int = 0) -> list[str]:
    """Paragraphs of prose from the docstrings of Python's standard library, shuffled by seed.

    Args:
        seed: Seed of the order.

    Returns:
        Distinct paragraphs of at least 24 words; some 2,000, depending on the Python version.
    """
    texts = list(_stdlib_paragraphs())
    random.Random(seed).shuffle(texts)
    return texts


@functools.cache
def _stdlib_paragraphs() -> tuple[str, ...]:
    found: dict[str, None] = {}
    for file in _stdlib_files():
        found.update(dict.fromkeys(_paragraphs(file)))
    return tuple(found)


def _stdlib_files() -> Iterator[Path]:
    for folder, inner, files in os.walk(sysconfig.get_path("stdlib")):
        inner[:] = sorted(set(inner) - _LEFT_OUT)  # `walk` visits in this order
        yield from (Path(folder, file) for file in sorted(files) if file.endswith(".py"))


def _paragraphs(file: Path) -> Iterator[str]:
    source = file.read_text(encoding="utf-8", errors="replace")
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in someone else's source
            tree = ast.parse(source)
    except SyntaxError:  # templates and deliberately broken files are no source of prose
        return
    for node in ast.walk(tree):
        docstring = ast.get_docstring(node) if isinstance(node, documented) else None
        for paragraph in (docstring or "").split("\n\n"):
            text = " ".join(paragraph.split())
            if _is_prose(text):
                yield text


def _is_prose(text: str) -> bool:
    if len(text.split()) < MIN_WORDS or any(mark in text for mark in _NOT_PROSE):
        return False
    return sum(c.isalpha() or c == " " for c in text) >= _PROSE * len(text)


def _from_name(name: str, n: int) -> list[str]:
    path = os.path.expanduser(name)
    if os.path.isfile(path):
        return _from_file(Path(path))
    if os.path.isdir(path):
        raise InputError(f"{name} is a directory. Give a file with one text a line, or a .jsonl.")
    if name.startswith((".", "/", "~")) or os.path.splitext(name)[1] in _FILES:
        raise InputError(f"There is no file {name}.")
    if not name.strip() or any(character.isspace() for character in name):
        raise InputError(
            f"{name!r} is neither a file nor the name of a dataset. If it is a text to analyse, "
            "give a list: [text]."
        )
    return _from_hub(name, n)


def _from_file(path: Path) -> list[str]:
    try:
        # Not splitlines(): it also breaks at U+2028 and others, which JSON strings may hold.
        with path.open(encoding="utf-8-sig") as file:
            lines = [line.rstrip("\n") for line in file]
    except (UnicodeDecodeError, OSError) as error:
        raise InputError(f"{path} cannot be read as UTF-8 text ({error}).") from error
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise InputError(f"{path} is empty. It needs one text a line.")
    if path.suffix != ".jsonl":
        return [line for _, line in numbered]
    return [_record_text(line, f"Line {number} of {path}") for number, line in numbered]


def _record_text(line: str, where: str) -> str:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(f"{where} is not JSON ({error}).") from error
    text = record.get("text") if isinstance(record, dict) else None
    if not isinstance(text, str) or not text.strip():
        raise InputError(f'{where} is not an object whose "text" is a string that is not empty.')
    return text


def _from_hub(name: str, n: int) -> list[str]:
    from datasets import load_dataset
    from huggingface_hub import dataset_info

    repository, _, config = name.partition(":")
    texts: list[str] = []
    try:
        # One request first: for a mistyped name `load_dataset` retries for half a minute.
        dataset_info(repository, timeout=10)
        for row in load_dataset(repository, config or None, split="train", streaming=True):
            if not isinstance(row.get("text"), str):
                raise InputError(
                    f'Dataset {name} has no column "text" of strings; it has {sorted(row)}. Write '
                    "its texts to a file, one a line."
                )
            if row["text"].strip():
                texts.append(row["text"])
            if len(texts) == n:
                break
    except InputError:
        raise
    except Exception as error:  # whatever the hub raises, the advice is the same
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(
            f"{name!r} is neither a file nor a dataset that can be read from the Hugging Face hub "
            f"({reason}). Without a network, give a file with one text a line."
        ) from error
    return texts
