"""Frozen results that carry their provenance and survive a round trip to disk.

A result is one ``.safetensors`` file: its tensors are the payload and everything else is one JSON
document in the header, so nothing is pickled and one atomic rename writes it whole. A SHA-256 over
both is kept in that document; a truncated or edited file is refused on load.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as safetensors_bytes
from torch import Tensor

from tl_spectral.errors import CorruptResultError, InputError, ProvenanceError

_HEADER = "tl_spectral"  # one metadata key: the header of several keys has no fixed order
_COMPLEX = "complex:"
ResultT = TypeVar("ResultT", bound="Result")


def library_versions() -> dict[str, str]:
    """Versions of everything that can change a number, for the provenance record."""
    return dict(_installed())


@cache
def _installed() -> Mapping[str, str]:  # reading seven packages' metadata takes 15 ms
    names = ("tl-spectral", "torch", "transformer-lens", "transformers", "numpy", "scipy")
    versions = {"python": platform.python_version()}
    for name in names:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return versions


@dataclass(frozen=True)
class Provenance:
    """Where a number comes from.

    Attributes:
        model: Name of the model, or ``"tensors"`` when the input was plain tensors.
        weights: Weight basis: ``"raw"`` (as released), ``"compat"`` (TransformerLens'
            compatibility mode: norms folded, writing weights centred) or ``"none"``.
        fingerprint: Hash of the weights; two models of the same name can differ.
        dtype: dtype in which the model ran.
        seed: Seed of every random choice, if any was made.
        texts: SHA-256 of the token ids, if texts were used.
        options: The options that define the number (context, scope, position, …).
        versions: Versions of the libraries at work.
    """

    model: str = "tensors"
    weights: str = "none"
    fingerprint: str = ""
    dtype: str = ""
    seed: int | None = None
    texts: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=library_versions)

    def require_same_model(self, other: Provenance, what: str) -> None:
        """Raise unless both come from the same weights; plain tensors go with anything.

        Args:
            other: The provenance to compare with.
            what: What is being combined, for the message.

        Raises:
            ProvenanceError: If the model, its weight basis or its weights differ.
        """
        if "tensors" in (self.model, other.model):
            return
        for name in ("model", "weights", "fingerprint"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                raise ProvenanceError(
                    f"{what} come from different models: {name} is {mine!r} for one and "
                    f"{theirs!r} for the other. Compute both from the same model in the same "
                    "weight basis."
                )


@dataclass(frozen=True, eq=False)
class Result:
    """Base of all results: immutable, with provenance, saved as safetensors + JSON.

    Fields may be tensors, JSON-like values (numbers, strings, tuples, dicts) or ``None``.
    """

    provenance: Provenance = field(default_factory=Provenance, kw_only=True)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the result to one file, atomically.

        Args:
            path: Where to; the suffix ``.safetensors`` is added when missing.

        Returns:
            The path written.

        Raises:
            InputError: If a field holds something that would not come back as it was.
        """
        tensors: dict[str, Tensor] = {}
        values: dict[str, Any] = {}
        for spec in fields(self):
            value = getattr(self, spec.name)
            if isinstance(value, Tensor):
                name, plain = _encode(spec.name, value)
                tensors[name] = plain
            elif isinstance(value, Provenance):
                values[spec.name] = {
                    f.name: _plain(getattr(value, f.name), f.name) for f in fields(value)
                }
            elif isinstance(value, complex):
                values[spec.name] = {_COMPLEX: [value.real, value.imag]}
            else:
                values[spec.name] = _plain(value, spec.name)
        document = {"type": type(self).__name__, "values": values}
        document["sha256"] = _digest(tensors, document)
        header = {_HEADER: json.dumps(document, sort_keys=True, ensure_ascii=False)}
        target = _with_suffix(path)
        write_atomically(target, safetensors_bytes(tensors, metadata=header))
        return target

    @classmethod
    def load(cls: type[ResultT], path: str | os.PathLike[str]) -> ResultT:
        """Read a result that :meth:`save` wrote.

        Args:
            path: The file, with or without its suffix.

        Returns:
            The result, equal to the one saved.

        Raises:
            InputError: If there is no such file.
            CorruptResultError: If the file is truncated, edited, or holds another kind of result.
        """
        tensors, document = _read(_with_suffix(path))
        if document.get("type") != cls.__name__:
            raise CorruptResultError(
                f"{path} holds a {document.get('type')}, not a {cls.__name__}. "
                f"Load it with that class."
            )
        values = dict(document["values"])
        names = {name.removeprefix(_COMPLEX) for name in tensors} | set(values)
        if names != {spec.name for spec in fields(cls)}:
            raise CorruptResultError(
                f"{path} was written by another version of tl_spectral: its {cls.__name__} has the "
                f"fields {sorted(names)}. Compute it again with this one."
            )
        values["provenance"] = Provenance(
            **{name: _as_tuple(value) for name, value in values["provenance"].items()}
        )
        for name, value in values.items():
            if isinstance(value, dict) and set(value) == {_COMPLEX}:
                values[name] = complex(*value[_COMPLEX])
            else:
                values[name] = _as_tuple(value)
        for name, tensor in tensors.items():
            if name.startswith(_COMPLEX):
                values[name.removeprefix(_COMPLEX)] = torch.view_as_complex(tensor)
            else:
                values[name] = tensor
        return cls(**values)


def _with_suffix(path: str | os.PathLike[str]) -> Path:
    target = Path(path)
    if target.suffix == ".safetensors":
        return target
    return target.with_name(target.name + ".safetensors")


def write_atomically(target: Path, data: bytes) -> None:
    """Write a file so that a reader, or a killed process, never leaves half of it behind."""
    target.parent.mkdir(parents=True, exist_ok=True)
    # Not tempfile: its files are readable by their owner alone, and stay so after the rename.
    temporary = target.parent / f".{target.name}.{uuid.uuid4().hex}"
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _encode(name: str, tensor: Tensor) -> tuple[str, Tensor]:
    # A copy: safetensors refuses tensors that share memory. `contiguous` keeps odd strides of one
    # element.
    plain = tensor.detach().resolve_neg().cpu().clone(memory_format=torch.contiguous_format)
    if plain.is_complex():  # safetensors has no complex128
        return _COMPLEX + name, torch.view_as_real(plain.resolve_conj())
    return name, plain


def _digest(tensors: Mapping[str, Tensor], document: Mapping[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(document, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name}{tensor.dtype}{tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    if not path.is_file():
        raise InputError(f"There is no results file at {path}.")
    advice = "Delete it and repeat the command that wrote it; only this part is computed again."
    try:
        with safe_open(path, framework="pt") as file:
            header = (file.metadata() or {}).get(_HEADER)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        document = json.loads(header) if header else None
    except (SafetensorError, json.JSONDecodeError, OSError) as error:
        raise CorruptResultError(f"{path} cannot be read ({error}). {advice}") from error
    if not isinstance(document, dict):
        raise CorruptResultError(f"{path} was not written by tl_spectral. {advice}")
    recorded = document.pop("sha256", None)
    if recorded != _digest(tensors, document):
        raise CorruptResultError(f"{path} was changed after it was written. {advice}")
    return tensors, document


def _plain(value: Any, where: str) -> Any:
    """The value, if JSON gives it back unchanged (sequences come back as tuples)."""
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, (tuple, list)):
        return [_plain(item, where) for item in value]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: _plain(item, f"{where}[{key!r}]") for key, item in value.items()}
    raise InputError(
        f"{where} is a {type(value).__name__} ({value!r}), which a results file cannot hold: use "
        "tensors, Python numbers, strings, tuples, or dicts with string keys."
    )


def _as_tuple(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _as_tuple(item) for key, item in value.items()}
    return tuple(_as_tuple(item) for item in value) if isinstance(value, list) else value
