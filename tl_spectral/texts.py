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
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tl_spectral.errors import InputError

MIN_WORDS = 24
_PROSE = 0.93  # least share of letters and spaces: code, tables and option lists have less
_NOT_PROSE = (">>>", "::", "http", "\\", "`")
_LEFT_OUT = {"test", "tests", "idlelib", "lib2to3", "site-packages", "turtledemo", "__pycache__"}


def load_texts(source: Any = None, *, n: int | None = None, seed: int = 0) -> list[Any]:
    """Texts from wherever the user has them.

    Args:
        source: A list of texts or token tensors (returned as it is, checked); the path of a file
            with one text a line, or of a ``.jsonl`` file with a ``text`` field a line; the name of
            a dataset on the Hugging Face hub (its ``train`` split, ``text`` column); or ``None``
            for the built-in corpus.
        n: Use the first ``n`` only.
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
        texts = _from_name(os.fspath(source), n)
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
        if isinstance(text, str) and not text.strip():
            raise InputError(f"Text {index} is empty. Leave it out.")
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
    root = Path(sysconfig.get_path("stdlib"))
    found: dict[str, None] = {}
    for file in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix()):
        if _LEFT_OUT.isdisjoint(file.relative_to(root).parts):
            found.update(dict.fromkeys(_paragraphs(file)))
    return tuple(found)


def _paragraphs(file: Path) -> Iterator[str]:
    source = file.read_text(encoding="utf-8", errors="replace")
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    try:
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


def _from_name(name: str, n: int | None) -> list[str]:
    path = Path(name).expanduser()
    if path.is_file():
        return _from_file(path)
    if path.suffix or name.startswith((".", "/", "~")):
        raise InputError(f"There is no file {name}.")
    return _from_hub(name, n)


def _from_file(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text ({error}). Convert it.") from error
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise InputError(f"{path} is empty. It needs one text a line.")
    if path.suffix != ".jsonl":
        return [line for _, line in numbered]
    texts = []
    for number, line in numbered:
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise InputError(f"Line {number} of {path} is not JSON ({error}).") from error
        text = record.get("text") if isinstance(record, dict) else None
        if not isinstance(text, str):
            raise InputError(f'Line {number} of {path} is not an object with a string "text".')
        texts.append(text)
    return texts


def _from_hub(name: str, n: int | None) -> list[str]:
    from datasets import load_dataset

    try:
        rows = load_dataset(name, split="train", streaming=True)
        texts = []
        for row in rows:
            if not isinstance(row.get("text"), str):
                raise InputError(
                    f'Dataset {name} has no text column "text"; it has {sorted(row)}. Write its '
                    "texts to a file, one a line."
                )
            if row["text"].strip():
                texts.append(row["text"])
            if n is not None and len(texts) == n:
                break
    except InputError:
        raise
    except Exception as error:  # whatever the hub raises, the advice is the same
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InputError(
            f"{name!r} is neither a file nor a dataset that can be read from the hub ({reason})."
        ) from error
    return texts
