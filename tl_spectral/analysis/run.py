"""Check a request, do what is not finished, make the tables."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxtyping import Int
from torch import Tensor

from tl_spectral.analysis.options import RunOptions
from tl_spectral.analysis.result import AnalysisResult, load
from tl_spectral.analysis.store import Manifest, RunDirectory
from tl_spectral.analysis.tables import assemble
from tl_spectral.analysis.work import Progress, Work
from tl_spectral.errors import InputError, TLSpectralWarning
from tl_spectral.jacobian.blocks import Context
from tl_spectral.model import ModelView, load_model, reinitialised
from tl_spectral.texts import load_texts
from tl_spectral.threads import one_blas_thread


def analyze(
    model: Any,
    texts: Any = None,
    *,
    out: str | os.PathLike[str],
    layers: Sequence[int] | None = None,
    samples: int | None = None,
    jacobian_samples: int = 32,
    spectrum_samples: int = 4,
    tokens_per_text: int | None = 16,
    pos: int = -1,
    context: Context | str = "full",
    control: str | None = None,
    seed: int = 0,
    jobs: int | None = None,
    progress: Progress | None = None,
    **settings: Any,
) -> AnalysisResult:
    """The whole analysis of a model, resumable.

    Everything is checked before any work. Each task's result is written as it finishes, whole or
    not at all; a run killed at any moment goes on when the same call is repeated, and ends with the
    same tables, byte for byte.

    Args:
        model: A ``TransformerBridge``, or a name for :func:`tl_spectral.load_model`.
        texts: Texts, a file, a Hub dataset name, or ``None`` for the built-in corpus
            (see :func:`tl_spectral.texts.load_texts`).
        out: Run directory. One that holds another run is refused.
        layers: Which layers; all by default. The funnel needs consecutive ones.
        samples: Texts used for graphs and natural units; by default all that are given, 1,000 of
            the built-in corpus.
        jacobian_samples: Texts whose Jacobians are averaged.
        spectrum_samples: Texts whose Jacobians are decomposed one by one (chains too).
        tokens_per_text: Each text is cut to its first tokens; ``None`` keeps whole texts.
        pos: Position in each (cut) text.
        context: ``"full"`` or ``"isolated"``.
        control: ``"random-init"`` analyses a re-initialised twin beside the model.
        seed: Seed of everything random.
        jobs: Parallel workers; by default one per core.
        progress: Called as ``progress(done, total, what)``.
        **settings: ``top_k``, ``resolution``, ``louvain_runs``, ``permutations``, ``chunk``,
            ``power_texts`` (see :class:`RunOptions`).

    Returns:
        The finished run.

    Raises:
        InputError: For texts, layers or options that cannot be analysed.
        ProvenanceError: If the directory holds a run of another model or other options.
        CorruptResultError: If a finished task's file was truncated or edited.
    """
    if isinstance(model, (str, os.PathLike)):
        model = load_model(model)
    view = ModelView(model)
    rows, options = _prepare(
        view,
        texts,
        layers=layers,
        samples=samples,
        jacobian_samples=jacobian_samples,
        spectrum_samples=spectrum_samples,
        tokens_per_text=tokens_per_text,
        pos=pos,
        context=context,
        control=control,
        seed=seed,
        **settings,
    )
    directory = RunDirectory(Path(out))
    provenance = view.provenance(rows, seed=seed, options=options.to_json())
    directory.claim(Manifest(provenance, options))
    work = Work(directory, options, rows, jobs or os.cpu_count() or 1, progress)
    with one_blas_thread():
        for variant in options.variants:
            subject = model if variant == "trained" else reinitialised(model, seed)
            work.variant(variant, ModelView(subject))
    directory.write_tables(assemble(directory, options))
    work.finish()
    return load(out)


def _prepare(
    view: ModelView,
    texts: Any,
    *,
    layers: Sequence[int] | None,
    samples: int | None,
    jacobian_samples: int,
    spectrum_samples: int,
    tokens_per_text: int | None,
    pos: int,
    **others: Any,
) -> tuple[list[Int[Tensor, " pos"]], RunOptions]:
    """Check everything that can be checked without a forward pass over the texts."""
    loaded = load_texts(texts, n=samples if samples or texts is not None else 1000)
    if tokens_per_text is not None and tokens_per_text < 2:
        raise InputError(
            f"tokens_per_text must be at least 2, or None for whole texts; got {tokens_per_text}."
        )
    rows = view.tokens(loaded, first=tokens_per_text)
    if samples is not None and len(rows) < samples:
        warnings.warn(
            f"{samples} texts were asked for, there are {len(rows)}.",
            TLSpectralWarning,
            stacklevel=3,
        )
    for index, row in enumerate(rows):
        view.position(pos, len(row), f"pos (in text {index})")
    options = RunOptions(
        layers=tuple(sorted(view.layers(layers))),
        samples=len(rows),
        jacobian_samples=min(jacobian_samples, len(rows)),
        spectrum_samples=min(spectrum_samples, jacobian_samples, len(rows)),
        tokens_per_text=tokens_per_text,
        pos=pos,
        **others,
    )
    if options.samples < view.d_model:
        warnings.warn(
            f"{options.samples} texts for {view.d_model} units: correlations are noisy and their "
            "matrix is rank-deficient. Use more texts than d_model.",
            TLSpectralWarning,
            stacklevel=3,
        )
    return rows, options
