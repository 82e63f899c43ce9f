"""CPU-seconds and peak memory of one piece of work, in a process of its own.

A case is a module-level function that prepares its inputs and returns the work: a function without
arguments, whose result (a short text, such as an error against a reference, or None) is the row's
note. Preparation is not measured.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

Work = Callable[[], "str | None"]
_APART = True


@contextmanager
def in_this_process() -> Iterator[None]:
    """Measure without new processes: for a look at whether everything runs."""
    global _APART
    _APART = False
    try:
        yield
    finally:
        _APART = True


@dataclass(frozen=True)
class Row:
    """One line of a table: a method on a case.

    Attributes:
        table: Which comparison, for instance ``"communities"``.
        case: Which input; the rows of one table and case are compared with each other.
        method: Which method, the library named.
        ours: Whether it is this library's: ratios are relative to the first such row of a case.
        cpu_seconds: CPU time of the whole process, all threads.
        wall_seconds: Time on the clock; tells of other load on the machine, little else.
        peak_mb: Most memory held at once beyond what the prepared process held, in MiB; None
            where the system does not tell.
        bar: What the ratio (or the figure itself) is meant to be, in words; empty if nothing.
        note: What the work has to say, such as its error.
    """

    table: str
    case: str
    method: str
    ours: bool
    cpu_seconds: float
    wall_seconds: float
    peak_mb: float | None
    bar: str = ""
    note: str = ""


def measured(
    prepare: Callable[..., Work],
    *,
    table: str,
    case: str,
    method: str,
    ours: bool = False,
    bar: str = "",
    repeat: int = 1,
    **inputs: Any,
) -> Row:
    """Measure the work that ``prepare(**inputs)`` returns, in a process of its own.

    Memory then is that of this case alone. Inside :func:`in_this_process` it is done here and once.

    Args:
        prepare: The case, a function of a module.
        table: As in :class:`Row`, like the next four.
        case: See there.
        method: See there.
        ours: See there.
        bar: See there.
        repeat: How often; the least CPU time counts, the first run's memory.
        **inputs: Arguments of ``prepare``, JSON values.
    """
    if _APART:
        where = f"{prepare.__module__}:{prepare.__name__}"
        command = [sys.executable, "-m", "benchmarks.measure", where, json.dumps(inputs)]
        root = Path(__file__).resolve().parent.parent
        done = subprocess.run(
            [*command, str(repeat)], cwd=root, stdout=subprocess.PIPE, text=True, check=True
        )
        figures = json.loads(done.stdout.splitlines()[-1])
    else:
        figures = _figures(prepare(**inputs), 1)
    return Row(table=table, case=case, method=method, ours=ours, bar=bar, **figures)


def _figures(work: Work, repeat: int) -> dict[str, Any]:
    before = _reset_peak()
    cpu, wall, peak, note = [], [], None, None
    for run in range(repeat):
        clock, process = time.perf_counter(), time.process_time()
        note = work()
        cpu.append(time.process_time() - process)
        wall.append(time.perf_counter() - clock)
        if run == 0 and before is not None:
            peak = round(max(0.0, _status("VmHWM") - before), 1)
    return {
        "cpu_seconds": round(min(cpu), 5),
        "wall_seconds": round(min(wall), 5),
        "peak_mb": peak,
        "note": note or "",
    }


def _reset_peak() -> float | None:
    """Forget the peak so far and return what is held now, in MiB; None if Linux is not below."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
        return _status("VmRSS")
    except OSError:
        return None


def _status(name: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) / 1024
    raise OSError(f"/proc/self/status has no {name}")


if __name__ == "__main__":
    # The worker: threads are set by the environment that the parent passes on.
    os.environ.setdefault("TQDM_DISABLE", "1")
    module, function = sys.argv[1].split(":")
    task = getattr(import_module(module), function)(**json.loads(sys.argv[2]))
    print(json.dumps(_figures(task, int(sys.argv[3]))))
