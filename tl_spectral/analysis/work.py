"""The tasks of a run, each done once: what is finished stays, what is missing is computed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_spectral.analysis.dynamics import (
    alignment_rows,
    consensus_rows,
    layer_matrices,
    oversmoothing_rows,
)
from tl_spectral.analysis.options import RunOptions
from tl_spectral.analysis.store import RunDirectory
from tl_spectral.analysis.tasks import (
    LayerChunk,
    LayerGraph,
    Rows,
    chain_rows,
    layer_graph,
    records,
    skip_matched_chain,
    spectrum_rows,
)
from tl_spectral.capture import ResidualStates, capture
from tl_spectral.coupling import CouplingResult, amplification
from tl_spectral.errors import UnsupportedModelError
from tl_spectral.jacobian import sample_jacobians
from tl_spectral.model import ModelView
from tl_spectral.ov import ov_circuits
from tl_spectral.results import Provenance
from tl_spectral.threads import in_threads, one_blas_thread, torch_threads_for

MODES = 3  # of each layer matrix, under either rule

Progress = Callable[[int, int, str], None]
"""Called with the tasks done, the tasks in all, and what is being done."""


class Work:
    """The tasks of a run, in the order in which they feed each other."""

    def __init__(
        self,
        directory: RunDirectory,
        options: RunOptions,
        rows: list[Int[Tensor, " pos"]],
        jobs: int,
        progress: Progress | None,
    ) -> None:
        self.directory = directory
        self.options = options
        self.rows = rows
        self.jobs = jobs
        self.progress = progress
        self.chunks = [
            list(range(first, min(first + options.chunk, options.jacobian_samples)))
            for first in range(0, options.jacobian_samples, options.chunk)
        ]
        layers = options.layers
        self.consecutive = list(layers) == list(range(layers[0], layers[-1] + 1))
        self.done = 0
        # states, OV, chain of means, three of dynamics; per layer a task per chunk, the mean's
        # spectrum and the graph
        self.total = len(options.variants) * (6 + len(layers) * (len(self.chunks) + 2))

    def step(self, what: str, tasks: int = 1) -> None:
        """Count tasks as done and say what is going on."""
        self.done += tasks
        if self.progress is not None:
            self.progress(self.done, self.total, what)

    def finish(self) -> None:
        """Say that everything is done."""
        self.step("done", self.total - self.done)

    def variant(self, variant: str, view: ModelView) -> None:
        """Do everything for one model."""
        provenance = view.provenance(
            self.rows, seed=self.options.seed, options={"variant": variant}
        )
        states = self._states(variant, view)
        self._jacobians(variant, view, states, provenance)
        means = {layer: self._mean(variant, layer) for layer in self.options.layers}
        self._means(variant, states, means, provenance)
        self._ov(variant, view, provenance)
        self._dynamics(variant, view, provenance)
        self._graphs(variant, states, provenance)

    def _states(self, variant: str, view: ModelView) -> ResidualStates:
        if not self.directory.has(variant, "states"):
            label = f"{variant}: residual states of {len(self.rows)} texts"
            self.step(label, 0)
            states = capture(
                view.source,
                self.rows,
                pos=self.options.pos,
                layers=self.options.layers,
                sites=("resid_pre", "resid_post"),
            )
            self.directory.save(states, variant, "states")
        self.step(f"{variant}: residual states")
        return self.directory.load(ResidualStates, variant, "states")

    def _jacobians(
        self, variant: str, view: ModelView, states: ResidualStates, provenance: Provenance
    ) -> None:
        for number, members in enumerate(self.chunks):
            names = {layer: f"jacobian_{layer:03d}_{number:04d}" for layer in self.options.layers}
            chain_name = f"chain_{number:04d}"
            decomposed = [m for m in members if m < self.options.spectrum_samples]
            wants_chain = bool(decomposed) and self.consecutive
            pending = {
                layer for layer, name in names.items() if not self.directory.has(variant, name)
            }
            if not pending and (not wants_chain or self.directory.has(variant, chain_name)):
                self.step(f"{variant}: Jacobians", len(names))
                continue
            blocks = sample_jacobians(
                view.source,
                [self.rows[m] for m in members],
                layers=self.options.layers,
                pos=self.options.pos,
                context=self.options.context,
            )
            kept: dict[int, Tensor] = {}
            for layer, matrices in blocks:
                if wants_chain:
                    kept[layer] = matrices[: len(decomposed)].clone()
                if layer in pending:
                    chunk = self._layer_chunk(layer, matrices, decomposed, states, provenance)
                    self.directory.save(chunk, variant, names[layer])
                self.step(f"{variant}: Jacobians and spectra, layer {layer}")
            if wants_chain and not self.directory.has(variant, chain_name):
                rows = self._chains(decomposed, kept, states)
                self.directory.save(
                    Rows(rows=tuple(rows), provenance=provenance), variant, chain_name
                )

    def _layer_chunk(
        self,
        layer: int,
        matrices: Float[Tensor, "sample d_model d_model"],
        decomposed: list[int],
        states: ResidualStates,
        provenance: Provenance,
    ) -> LayerChunk:
        scale = states.scale(layer)
        identity = torch.eye(matrices.shape[-1], dtype=matrices.dtype)
        key = {"layer": layer, "estimate": "per_sample"}
        results = in_threads(
            (
                (spectrum_rows, matrices[i], scale, {**key, "sample": sample})
                for i, sample in enumerate(decomposed)
            ),
            self.jobs,
        )
        return LayerChunk(
            jacobian_sum=matrices.double().sum(dim=0),
            update_norms=torch.stack([(matrix - identity).double().norm() for matrix in matrices]),
            log_gains=torch.stack(
                [
                    torch.stack([amplification(matrix, operator=name) for name in ("J", "R")])
                    for matrix in matrices
                ]
            ),
            rows=tuple(row for rows, _ in results for row in rows),
            eigenvalues=results[0][1] if results and decomposed[0] == 0 else None,
            provenance=provenance,
        )

    def _chains(
        self, samples: list[int], blocks: dict[int, Tensor], states: ResidualStates
    ) -> list[dict[str, Any]]:
        layers = self.options.layers
        scales = _scales(states, layers)
        calls = []
        for i, sample in enumerate(samples):
            matrices = [blocks[layer][i] for layer in layers]
            for units, lengths in (("raw", None), ("natural", scales)):
                key = {"estimate": "per_sample", "units": units, "sample": sample}
                calls.append((chain_rows, matrices, lengths, layers, key))
        return [row for rows in in_threads(calls, self.jobs) for row in rows]

    def _mean(self, variant: str, layer: int) -> Float[Tensor, "d_model d_model"]:
        sums = [chunk.jacobian_sum for chunk in self._layer(variant, layer)]
        return torch.stack(sums).sum(dim=0) / self.options.jacobian_samples

    def _layer(self, variant: str, layer: int) -> list[LayerChunk]:
        """All finished Jacobian chunks of a layer."""
        return [
            self.directory.load(LayerChunk, variant, f"jacobian_{layer:03d}_{number:04d}")
            for number in range(len(self.chunks))
        ]

    def _means(
        self,
        variant: str,
        states: ResidualStates,
        means: dict[int, Tensor],
        provenance: Provenance,
    ) -> None:
        """Spectra of the mean Jacobians, their chain, and the chain of matched random blocks."""
        layers = self.options.layers
        pending = [
            layer for layer in layers if not self.directory.has(variant, f"mean_{layer:03d}")
        ]
        calls = (
            (
                spectrum_rows,
                means[layer],
                states.scale(layer),
                {"layer": layer, "estimate": "mean_jacobian", "sample": -1},
            )
            for layer in pending
        )
        self.step(f"{variant}: spectra of mean Jacobians", len(layers) - len(pending))
        for layer, (rows, _) in zip(pending, self._stream(calls), strict=True):
            self.directory.save(
                Rows(rows=tuple(rows), provenance=provenance), variant, f"mean_{layer:03d}"
            )
            self.step(f"{variant}: spectra of mean Jacobians, layer {layer}")
        if self.consecutive and not self.directory.has(variant, "chain_mean"):
            scales = _scales(states, layers)
            matrices = [means[layer] for layer in layers]
            key = {"estimate": "mean_jacobian", "sample": -1}
            rows = chain_rows(matrices, None, layers, {**key, "units": "raw"})
            rows += chain_rows(matrices, scales, layers, {**key, "units": "natural"})
            norms = torch.stack(
                [
                    torch.cat([chunk.update_norms for chunk in self._layer(variant, layer)]).mean()
                    for layer in layers
                ]
            )
            key = {"estimate": "skip_matched_random", "units": "raw", "sample": -1}
            rows += [
                {**key, **row}
                for row in skip_matched_chain(norms, len(matrices[0]), layers, self.options.seed)
            ]
            self.directory.save(
                Rows(rows=tuple(rows), provenance=provenance), variant, "chain_mean"
            )
        self.step(f"{variant}: chain of mean Jacobians")

    def _ov(self, variant: str, view: ModelView, provenance: Provenance) -> None:
        if not self.directory.has(variant, "ov"):
            rows: list[dict[str, Any]] = []
            try:
                circuits = ov_circuits(view.source, self.options.layers)
            except UnsupportedModelError as error:
                rows.append({"reason": str(error)})
            else:
                self.directory.save(layer_matrices(circuits), variant, "layer_matrices")
                rows += records(circuits.to_dataframe()) + records(circuits.modes_dataframe(MODES))
            self.directory.save(Rows(rows=tuple(rows), provenance=provenance), variant, "ov")
        self.step(f"{variant}: OV circuits")

    def _dynamics(self, variant: str, view: ModelView, provenance: Provenance) -> None:
        """Alignment with the dominant modes, likeness of tokens, and the paper's own dynamics."""
        texts = self.rows[: self.options.power_texts]
        tasks: tuple[tuple[str, str, Callable[[], list[dict[str, Any]]]], ...] = (
            ("power", "alignment", lambda: alignment_rows(view, texts, self.options)),
            (
                "oversmoothing",
                "likeness of tokens",
                lambda: oversmoothing_rows(view, texts, self.options),
            ),
            ("consensus", "dynamics", lambda: consensus_rows(view, texts, self.options)),
        )
        for name, what, rows_of in tasks:
            if not self.directory.has(variant, name):
                self.step(f"{variant}: power method, {what}", 0)
                try:
                    rows = rows_of()
                except UnsupportedModelError as error:
                    rows = [{"reason": str(error)}]
                self.directory.save(Rows(rows=tuple(rows), provenance=provenance), variant, name)
            self.step(f"{variant}: power method, {what}")

    def _graphs(
        self,
        variant: str,
        states: ResidualStates,
        provenance: Provenance,
    ) -> None:
        layers = self.options.layers
        pending = [
            layer for layer in layers if not self.directory.has(variant, f"coupling_{layer:03d}")
        ]
        self.step(f"{variant}: graphs and coupling", len(layers) - len(pending))
        calls = (
            (
                layer_graph,
                _only(states, layer),
                torch.cat([chunk.log_gains for chunk in self._layer(variant, layer)]).mean(dim=0),
                layer,
                self.options,
                provenance,
            )
            for layer in pending
        )
        for layer, result in zip(pending, self._stream(calls), strict=True):
            graph, coupled = result
            assert isinstance(graph, LayerGraph)
            assert isinstance(coupled, CouplingResult)
            self.directory.save(graph, variant, f"graph_{layer:03d}")
            self.directory.save(coupled, variant, f"coupling_{layer:03d}")
            self.step(f"{variant}: graph, communities and coupling, layer {layer}")

    def _stream(self, calls: Any) -> Iterator[Any]:
        """Run calls in processes (Louvain is pure Python), results in order as they are ready."""
        from joblib import Parallel, delayed

        runner = Parallel(n_jobs=self.jobs, return_as="generator", pre_dispatch=self.jobs + 1)
        results: Iterator[Any] = runner(
            delayed(_with_one_thread)(function, *arguments) for function, *arguments in calls
        )
        return results


def _with_one_thread(function: Callable[..., Any], *arguments: Any) -> Any:
    with one_blas_thread(), torch_threads_for(os.cpu_count() or 1):
        return function(*arguments)


def _scales(states: ResidualStates, layers: tuple[int, ...]) -> list[Tensor]:
    inputs = [states.scale(layer) for layer in layers]
    return [*inputs, states.scale(layers[-1], hook="resid_post")]


def _only(states: ResidualStates, layer: int) -> ResidualStates:
    """The states of one layer: what a worker needs, and no more."""
    row = states.index(layer)
    gain = states.norm_gain
    return ResidualStates(
        resid_pre=states.resid_pre[row : row + 1].clone(),
        resid_post=states.resid_post[row : row + 1].clone(),
        resid_mid=None,
        norm_gain=None if gain is None else gain[row : row + 1].clone(),
        layers=(layer,),
        pos=states.pos,
        provenance=states.provenance,
    )
