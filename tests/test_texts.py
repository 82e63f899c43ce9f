"""Texts: from lists, files, the hub and the standard library, or a message that names the fault."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from tl_spectral.errors import InputError
from tl_spectral.texts import MIN_WORDS, builtin_corpus, load_texts


def test_built_in_corpus_is_enough_and_the_same_twice():
    corpus = builtin_corpus()
    assert len(corpus) >= 1500
    assert len(set(corpus)) == len(corpus)
    assert corpus == builtin_corpus()
    assert load_texts() == corpus


def test_seed_changes_the_order_only():
    assert builtin_corpus(0) != builtin_corpus(1)
    assert sorted(builtin_corpus(0)) == sorted(builtin_corpus(1))
    assert load_texts(n=7, seed=1) == builtin_corpus(1)[:7]


def test_built_in_corpus_is_prose():
    for text in builtin_corpus():
        assert len(text.split()) >= MIN_WORDS
        assert ">>>" not in text
        assert "\n" not in text


def test_built_in_corpus_is_not_taken_from_installed_packages():
    assert not any("TransformerLens" in text or "PyTorch" in text for text in builtin_corpus())


def test_asking_for_more_than_the_built_in_corpus_has():
    with pytest.raises(InputError, match=r"has \d+ texts, 1000000 were asked for"):
        load_texts(n=1_000_000)


def test_list_is_returned_as_it_is_and_cut():
    texts = ["one", "two", "three"]
    assert load_texts(texts) == texts
    assert load_texts(texts, n=2) == ["one", "two"]
    assert load_texts((text for text in texts), n=2) == ["one", "two"]


def test_token_tensors_pass():
    tokens = [torch.tensor([1, 2, 3]), torch.tensor([4, 5])]
    assert load_texts(tokens) == tokens


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ([], "no text"),
        (["fine", "  \n"], "Text 1 is empty"),
        (["fine", "fine", None], "Text 2 is a NoneType"),
        ([b"bytes"], "Text 0 is a bytes"),
        (7, "not int"),
    ],
)
def test_faulty_texts_are_named(texts: Any, message: str):
    with pytest.raises(InputError, match=message):
        load_texts(texts)


@pytest.mark.parametrize("n", [0, -1, True])
def test_faulty_numbers_of_texts(n: Any):
    with pytest.raises(InputError, match="positive integer"):
        load_texts(["a"], n=n)


def test_text_file_has_one_text_a_line(tmp_path: Path):
    file = tmp_path / "texts.txt"
    file.write_bytes("\ufefffirst\r\n\r\n second \u2028 still second\n".encode())
    assert load_texts(file) == ["first", " second \u2028 still second"]
    assert load_texts(str(file), n=1) == ["first"]


def test_jsonl_file_has_a_text_field_a_line(tmp_path: Path):
    file = tmp_path / "texts.jsonl"
    texts = ["first", "two\nlines", "a \u2028 separator"]
    file.write_text("\n".join(json.dumps({"text": t}, ensure_ascii=False) for t in texts))
    assert load_texts(file) == texts


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{broken", "Line 2 of .* is not JSON"),
        ('{"content": "x"}', 'Line 2 of .* "text"'),
        ('{"text": 3}', 'Line 2 of .* "text"'),
        ('{"text": " "}', 'Line 2 of .* "text"'),
        ('["x"]', 'Line 2 of .* "text"'),
    ],
)
def test_faulty_jsonl_line_is_named(tmp_path: Path, line: str, message: str):
    file = tmp_path / "texts.jsonl"
    file.write_text('{"text": "fine"}\n' + line)
    with pytest.raises(InputError, match=message):
        load_texts(file)


def test_files_that_cannot_be_read(tmp_path: Path):
    blank = tmp_path / "blank.txt"
    blank.write_text("\n \n")
    latin = tmp_path / "latin.txt"
    latin.write_bytes("naïve".encode("latin-1"))
    with pytest.raises(InputError, match="is empty"):
        load_texts(blank)
    with pytest.raises(InputError, match="UTF-8"):
        load_texts(latin)
    with pytest.raises(InputError, match="is a directory"):
        load_texts(tmp_path)
    with pytest.raises(InputError, match="no file"):
        load_texts(tmp_path / "missing")
    with pytest.raises(InputError, match="no file"):
        load_texts("missing.jsonl")


@pytest.mark.parametrize("text", ["", "The Eiffel Tower stands in the city of", "long text " * 900])
def test_a_bare_text_is_told_from_a_name(text: str):
    with pytest.raises(InputError, match=r"give a list"):
        load_texts(text)


class _Hub:
    """A stand-in for the hub: what was asked of it, and endless rows."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, row: dict[str, Any] | None) -> None:
        self.asked: list[tuple[Any, ...]] = []
        datasets = types.ModuleType("datasets")
        datasets.load_dataset = self.load_dataset  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "datasets", datasets)
        monkeypatch.setattr("huggingface_hub.dataset_info", self.dataset_info)
        self.row = row

    def dataset_info(self, name: str, **_: Any) -> None:
        if self.row is None:
            raise ConnectionError("no route\nto host")

    def load_dataset(self, *name: Any, split: str, streaming: bool) -> Any:
        assert streaming
        self.asked.append((*name, split))
        while True:
            yield {"text": ""}
            yield self.row


def test_dataset_of_the_hub_is_streamed(monkeypatch: pytest.MonkeyPatch):
    hub = _Hub(monkeypatch, {"text": "a text"})
    assert load_texts("owner/name", n=3) == ["a text"] * 3
    assert len(load_texts("owner/name:config")) == 1000
    assert hub.asked == [("owner/name", None, "train"), ("owner/name", "config", "train")]


def test_dataset_without_texts(monkeypatch: pytest.MonkeyPatch):
    _Hub(monkeypatch, {"image": 0})
    with pytest.raises(InputError, match=r"no column .*it has \['image'\]"):
        load_texts("owner/name")


def test_hub_out_of_reach(monkeypatch: pytest.MonkeyPatch):
    _Hub(monkeypatch, None)
    with pytest.raises(InputError, match=r"'owner/name' is neither .*\(no route\).*give a file"):
        load_texts("owner/name")
