"""Weights on disk, tensor by tensor: a folder of safetensors files."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Int
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tl_spectral.errors import InputError, ModelStateError

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


@dataclass(frozen=True)
class Checkpoint:
    """Which file of a folder holds which tensor.

    Attributes:
        folder: The folder.
        files: Tensor name → file name.
    """

    folder: Path
    files: Mapping[str, str]

    @classmethod
    def open(cls, folder: Path) -> Checkpoint:
        """Find the tensors of a folder, without reading one.

        Raises:
            InputError: If there are no safetensors weights, or a shard is missing or damaged.
        """
        index = folder / _INDEX
        if index.is_file():
            try:
                files = dict(json.loads(index.read_text())["weight_map"])
            except (json.JSONDecodeError, KeyError, TypeError, UnicodeDecodeError) as error:
                raise InputError(f"{index} cannot be read ({error}). Download it again.") from error
        elif (folder / _SINGLE).is_file():
            with _opened(folder / _SINGLE) as file:
                files = dict.fromkeys(file.keys(), _SINGLE)
        else:
            raise InputError(
                f"{folder} holds no {_INDEX} and no {_SINGLE}: block by block only safetensors can "
                "be read. Save the model again with save_pretrained(folder)."
            )
        for shard in sorted(set(files.values())):
            path = folder / shard
            if not path.is_file():
                lost = sorted(name for name, file in files.items() if file == shard)
                raise InputError(
                    f"{path} is missing; it holds {len(lost)} tensors, {lost[0]} the first. "
                    "Download it again."
                )
            with _opened(path) as file:
                absent = {name for name, f in files.items() if f == shard} - set(file.keys())
            if absent:
                raise InputError(
                    f"{path} lacks {sorted(absent)[0]}, which the index says it holds. "
                    "Download both again."
                )
        return cls(folder, files)

    def read(self, name: str, rows: Int[Tensor, " row"] | None = None) -> Tensor:
        """One tensor, or some of its rows.

        Raises:
            InputError: If the file is damaged.
            ModelStateError: If it holds NaN or infinity.
        """
        path = self.folder / self.files[name]
        with _opened(path) as file:
            if rows is None:
                tensor: Tensor = file.get_tensor(name)
            else:
                part = file.get_slice(name)
                tensor = torch.stack([part[int(row)] for row in rows])
        if not tensor.isfinite().all():
            raise ModelStateError(
                f"{name} in {path} holds NaN or infinite values. Download it again."
            )
        return tensor

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading it."""
        with _opened(self.folder / self.files[name]) as file:
            return tuple(file.get_slice(name).get_shape())

    def n_bytes(self) -> int:
        """Size of all files."""
        return sum((self.folder / file).stat().st_size for file in set(self.files.values()))

    def blocks(self, path: str) -> BlockNames:
        """Which tensors belong to which block.

        Args:
            path: Where the model class keeps its blocks, such as ``model.layers``; checkpoints may
                leave out the first parts of it.

        Raises:
            InputError: If no tensor belongs to a block.
        """
        parts = path.split(".")
        for first in range(len(parts)):
            tail = ".".join(parts[first:])
            pattern = re.compile(rf"^(.*\.)?{re.escape(tail)}\.(\d+)\.")
            if first == 0:
                pattern = re.compile(rf"^(){re.escape(tail)}\.(\d+)\.")
            found = {name: match for name in self.files if (match := pattern.match(name))}
            if found:
                return BlockNames(
                    {name: int(match[2]) for name, match in found.items()},
                    {name: match.start(2) for name, match in found.items()},
                )
        raise InputError(f"No tensor of {self.folder} belongs to a block (sought {path}.0.…).")


@dataclass(frozen=True)
class BlockNames:
    """Tensors that belong to blocks.

    Attributes:
        layer: Tensor name → layer.
        place: Tensor name → where in it the number of the layer begins.
    """

    layer: Mapping[str, int]
    place: Mapping[str, int]

    def of(self, layer: int) -> Iterator[tuple[str, str]]:
        """Names of one block's tensors, and what they would be called in the first block."""
        for name, number in self.layer.items():
            if number == layer:
                at = self.place[name]
                yield name, f"{name[:at]}0{name[at + len(str(layer)) :]}"


def _opened(path: Path) -> safe_open:
    try:
        return safe_open(path, "pt")
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path} is damaged ({error}). Download it again.") from error
