"""The table of the Jacobian on a CUDA device: ``python -m benchmarks.gpu [out.json]``.

The same methods and lengths as :mod:`benchmarks.jacobian`, in float32 with TF32 off, timed by CUDA
events; a few minutes at most. Without a CUDA device it says so and does nothing.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks import jacobian
from benchmarks.measure import Work

_BUDGET = 200.0  # seconds after which no further row is begun
_METHODS: tuple[tuple[str, Any], ...] = (
    ("tl_spectral", jacobian.ours),
    ("matrix products alone (floor)", jacobian.floor_of_block),
    ("autograd.grad(is_grads_batched=True), whole block", jacobian.grads_batched),
    ("torch.func.jacrev, whole block", jacobian.jacrev),
    ("torch.autograd.functional.jacobian, whole block", jacobian.functional),
)


def rows(*, small: bool) -> list[dict[str, Any]]:
    """Seconds on the device, least of three after a first run, and peak memory beside the weights.

    Args:
        small: One width and two lengths.

    Returns:
        The rows; none without a device.
    """
    if not torch.cuda.is_available():
        return []
    torch.backends.cuda.matmul.allow_tf32 = False
    started = time.perf_counter()
    shape, lengths = ("tiny", (8, 16)) if small else ("smollm2-135m", (8, 16, 64, 128))
    cases = [(shape, T) for T in lengths]
    if not small:
        cases += [("llama-3-8b", 16), ("llama-3-8b", 128)]
    table = []
    for shape, T in cases:
        for method, prepare in _METHODS[: 2 if shape == "llama-3-8b" else None]:
            if time.perf_counter() - started > _BUDGET:
                print(f"out of time before {method} on {shape}, T = {T}", file=sys.stderr)
                continue
            figures = _timed(prepare(shape, T, device="cuda"))
            table.append({"case": f"{shape} block, T = {T}", "method": method, **figures})
            torch.cuda.empty_cache()
    return table


def _timed(work: Work) -> dict[str, Any]:
    note = work()
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(3):
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        work()
        after.record()
        torch.cuda.synchronize()
        seconds.append(before.elapsed_time(after) / 1000)
    peak = (torch.cuda.max_memory_allocated() - held) / 2**20
    return {"seconds": round(min(seconds), 6), "peak_mb": round(peak, 1), "note": note or ""}


def main() -> int:
    """Print the table, and write it with the environment to a file if one is named."""
    if not torch.cuda.is_available():
        print("There is no CUDA device here; `python -m benchmarks` measures on the CPU.")
        return 0
    table = rows(small=False)
    for row in table:
        print(f"{row['case']:28s} {row['method']:50s} {row['seconds'] * 1e3:10.2f} ms "
              f"{row['peak_mb']:9.1f} MiB  {row['note']}")  # fmt: skip
    if len(sys.argv) > 1:
        environment = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
        Path(sys.argv[1]).write_text(json.dumps({**environment, "rows": table}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
