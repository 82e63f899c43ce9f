"""Sharing the cores between workers, and with everything else that runs on the machine.

A dense eigenvalue problem of a few hundred rows gains little from a second BLAS thread, and loses a
factor of 30 where another process holds that core: OpenBLAS' threads wait for each other by
spinning. So small decompositions run on one thread, and cores are used by running several at once.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from threadpoolctl import ThreadpoolController

SMALL = 1024
"""Rows below which a decomposition is kept on one BLAS thread."""


@cache
def _controller() -> ThreadpoolController:
    import scipy.linalg  # noqa: F401 - its BLAS must be loaded to be found

    return ThreadpoolController()


@contextmanager
def one_blas_thread(rows: int = 0) -> Iterator[None]:
    """One BLAS thread inside, for matrices of fewer than :data:`SMALL` rows (0: always)."""
    if rows >= SMALL:
        yield
        return
    with _controller().limit(limits=1, user_api="blas"):
        yield


def in_threads(calls: Iterable[tuple[Any, ...]], jobs: int | None = None) -> list[Any]:
    """Run ``(function, *arguments)`` side by side in threads: LAPACK leaves the interpreter alone.

    Args:
        calls: What to run.
        jobs: How many at once; by default one per core.

    Returns:
        The results, in the order of the calls.
    """
    from joblib import Parallel, delayed

    workers = jobs or os.cpu_count() or 1
    with one_blas_thread(), torch_threads_for(workers):
        return list(
            Parallel(n_jobs=workers, prefer="threads")(
                delayed(function)(*arguments) for function, *arguments in calls
            )
        )


@contextmanager
def torch_threads_for(workers: int) -> Iterator[None]:
    """Share torch's threads between so many workers instead of giving all of them to each."""
    before = torch.get_num_threads()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))
    try:
        yield
    finally:
        torch.set_num_threads(before)
