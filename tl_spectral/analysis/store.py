"""A run directory: one file a task, written whole or not at all; tables at the end.

::

    run.json                      what the run is: model, options, versions, texts
    tasks/VARIANT/NAME.safetensors   finished tasks
    tables/NAME.csv               final tables
    complete.json                 SHA-256 of every table, written last
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd

from tl_spectral.analysis.options import RunOptions
from tl_spectral.errors import CorruptResultError, InputError, ProvenanceError
from tl_spectral.results import Provenance, Result, write_atomically

ResultT = TypeVar("ResultT", bound=Result)
FORMAT = 1
# Seven digits: more than any of these numbers is certain to, fewer than rounding noise reaches.
_DIGITS = "%.7g"


@dataclass(frozen=True)
class Manifest:
    """Identity of a run; a directory holds one run only."""

    provenance: Provenance
    options: RunOptions

    def to_json(self) -> dict[str, Any]:
        """As a JSON document."""
        # The options are said once, outside the provenance.
        source = asdict(replace(self.provenance, options={}, seed=None))
        return {"format": FORMAT, "provenance": source, "options": self.options.to_json()}


class RunDirectory:
    """Files of one run.

    Args:
        path: The directory; it need not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def claim(self, manifest: Manifest) -> None:
        """Begin or resume a run here.

        Raises:
            ProvenanceError: If the directory belongs to another model, or other options.
            InputError: If it holds something that is not a run.
        """
        file = self.path / "run.json"
        if file.exists():
            differences = _differences(self._document(), manifest.to_json())
            if differences and any(self.path.glob("tasks/*/*.safetensors")):
                raise ProvenanceError(
                    f"{self.path} holds another run; it differs in {'; '.join(differences)}. "
                    "Choose another directory, or repeat the command that made this one."
                )
            if not differences:
                return
        elif self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
            raise InputError(f"{self.path} exists and is no run directory. Choose another.")
        write_atomically(file, _dump(manifest.to_json()))

    def manifest(self) -> Manifest:
        """Read what the run is.

        Raises:
            InputError: If there is no run here.
            CorruptResultError: If ``run.json`` cannot be read.
        """
        document = self._document()
        try:
            options = RunOptions.from_json(document["options"])
            source = Provenance(**document["provenance"])
            source = replace(source, seed=options.seed, options=options.to_json())
            return Manifest(source, options)
        except (KeyError, TypeError) as error:
            raise CorruptResultError(f"{self.path / 'run.json'} is damaged ({error}).") from error

    def task(self, variant: str, name: str) -> Path:
        """Where a task's result is kept."""
        return self.path / "tasks" / variant / f"{name}.safetensors"

    def save(self, result: Result, variant: str, name: str) -> None:
        """Keep a task's result, with its place written into it."""
        source = result.provenance
        options = {**source.options, "variant": variant, "task": name}
        placed = replace(result, provenance=replace(source, options=options))
        placed.save(self.task(variant, name))

    def load(self, kind: type[ResultT], variant: str, name: str) -> ResultT:
        """Read a task's result.

        Raises:
            InputError: If the task is not finished.
            CorruptResultError: If the file is damaged, or is that of another task.
        """
        path = self.task(variant, name)
        if not path.exists():
            raise InputError(
                f"{path} is gone. Repeat the command that made the run; only what is missing is "
                "computed again."
            )
        result = kind.load(path)
        found = tuple(result.provenance.options.get(key) for key in ("variant", "task"))
        if found != (variant, name):
            raise CorruptResultError(
                f"{path} holds the result of another task ({found}). Delete it and repeat the "
                "command that made the run; only this part is computed again."
            )
        return result

    def has(self, variant: str, name: str) -> bool:
        """Whether a task is finished."""
        return self.task(variant, name).exists()

    def write_tables(self, tables: dict[str, pd.DataFrame]) -> None:
        """Write the final tables and the record of their contents."""
        digests = {}
        for name, table in tables.items():
            data = table.to_csv(index=False, float_format=_DIGITS, lineterminator="\n").encode()
            write_atomically(self.path / "tables" / f"{name}.csv", data)
            digests[name] = hashlib.sha256(data).hexdigest()
        write_atomically(self.path / "complete.json", _dump(digests))

    def read_tables(self) -> dict[str, pd.DataFrame]:
        """Read the final tables.

        Raises:
            InputError: If the run is not finished.
            CorruptResultError: If a table was changed after it was written.
        """
        file = self.path / "complete.json"
        if not file.exists():
            raise InputError(
                f"The run in {self.path} is not finished. Repeat the command that began it; "
                "finished parts are not computed again."
            )
        tables = {}
        for name, digest in _parse(file).items():
            table = self.path / "tables" / f"{name}.csv"
            if not table.exists() or hashlib.sha256(table.read_bytes()).hexdigest() != digest:
                raise CorruptResultError(
                    f"{table} is missing or was changed after it was written. Delete "
                    f"{file} and repeat the command; only the tables are made again."
                )
            tables[name] = pd.read_csv(table, keep_default_na=True)
        return tables

    def _document(self) -> dict[str, Any]:
        file = self.path / "run.json"
        if not file.exists():
            raise InputError(f"There is no run in {self.path} (no run.json).")
        document = _parse(file)
        if document.get("format") != FORMAT:
            raise CorruptResultError(
                f"{file} has format {document.get('format')!r}, this version reads {FORMAT}."
            )
        return document


def _parse(file: Path) -> dict[str, Any]:
    try:
        document = json.loads(file.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError, OSError) as error:
        raise CorruptResultError(
            f"{file} cannot be read ({error}). Restore it, or delete the whole run directory."
        ) from error
    if not isinstance(document, dict):
        raise CorruptResultError(f"{file} is no JSON object.")
    return document


def _dump(document: dict[str, Any]) -> bytes:
    return (json.dumps(document, indent=1, sort_keys=True) + "\n").encode()


def _differences(old: dict[str, Any], new: dict[str, Any], path: str = "") -> list[str]:
    found = []
    for key in sorted(old.keys() | new.keys()):
        left, right = old.get(key), new.get(key)
        if isinstance(left, dict) and isinstance(right, dict):
            found += _differences(left, right, f"{path}{key}.")
        elif left != right:
            found.append(f"{path}{key} ({_short(left)} there, {_short(right)} now)")
    return found


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "…"
