"""``python -m benchmarks``: every comparison, a table, ``results/cpu.json`` and the docs' table.

Names of tables' modules (``python -m benchmarks graphs ov``) run these alone and write nothing;
``--small`` is a quick look at whether all run. Threads are those of OMP_NUM_THREADS; ``make bench``
takes one.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.measure import Row, in_this_process

MODULES = ("jacobian", "ov", "graphs", "operators", "pipeline")
ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "cpu.json"
DOCS = ROOT / "docs" / "performance.md"
_PACKAGES = (
    "tl-spectral", "torch", "transformer-lens", "transformers", "numpy", "scipy", "networkx",
    "python-louvain", "igraph", "bctpy",
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Run, print, and for a whole run write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("modules", nargs="*", metavar="MODULE", help=f"of {', '.join(MODULES)}")
    parser.add_argument("--small", action="store_true", help="tiny inputs, in this process")
    parser.add_argument("--docs", action="store_true", help="only copy the JSON into the docs")
    options = parser.parse_args(arguments)
    if unknown := set(options.modules) - set(MODULES):
        parser.error(f"no module {', '.join(sorted(unknown))}; there are {', '.join(MODULES)}")
    if not options.docs:
        rows: list[Row] = []
        for name in options.modules or MODULES:
            module = import_module(f"benchmarks.{name}")
            if options.small:
                with in_this_process():
                    found = module.rows(small=True)
            else:
                found = module.rows(small=False)
            Console().print(shown(found))
            rows += found
        if options.small or options.modules:
            return
        record = {"environment": environment(), "rows": [asdict(row) for row in rows]}
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    record = json.loads(RESULTS.read_text())
    DOCS.write_text(with_table(DOCS.read_text(), record))


def ratios(rows: Sequence[Row]) -> list[float]:
    """CPU time of each row over that of the first of ours in its table and case."""
    first: dict[tuple[str, str], float] = {}
    for row in rows:
        if row.ours:
            first.setdefault((row.table, row.case), row.cpu_seconds)
    return [row.cpu_seconds / max(first[row.table, row.case], 1e-9) for row in rows]


def cells(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """The rows as text: case (once), method, CPU-seconds, ratio, memory, note, bar."""
    out, before = [], ""
    for row, ratio in zip(rows, ratios(rows), strict=True):
        out.append(
            (
                row.case if row.case != before else "",
                row.method,
                f"{row.cpu_seconds:.3g}",
                f"{ratio:.3g}",
                "" if row.peak_mb is None else f"{row.peak_mb:.0f}",
                row.note,
                row.bar,
            )
        )
        before = row.case
    return out


HEADER = ("case", "method", "CPU-s", "ratio", "peak MiB", "note", "bar")


def shown(rows: Sequence[Row]) -> Table:
    """A table for the terminal: every case is a section, so that narrow ones can show it."""
    table = Table(box=box.SIMPLE)
    for name in HEADER[1:]:
        table.add_column(name, justify="right" if name in HEADER[2:5] else "left")
    for row, line in zip(rows, cells(rows), strict=True):
        if line[0]:
            table.add_section()
            table.add_row(f"{row.table}: {line[0]}", style="italic")
        table.add_row(*line[1:], style="bold" if row.ours else None)
    return table


def with_table(text: str, record: dict[str, Any]) -> str:
    """The docs with the block between its two markers replaced by the record."""
    begin, end = "<!-- benchmarks: begin -->", "<!-- benchmarks: end -->"
    rows = [Row(**row) for row in record["rows"]]
    lines = ["", " · ".join(f"{name} {value}" for name, value in record["environment"].items())]
    for table in dict.fromkeys(row.table for row in rows):
        part = [row for row in rows if row.table == table]
        lines += ["", f"### {table}", "", f"| {' | '.join(HEADER)} |"]
        lines.append("|---|---|--:|--:|--:|---|---|")
        for row, line in zip(part, cells(part), strict=True):
            line = (line[0], f"**{line[1]}**" if row.ours else line[1], *line[2:])
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |")
    before, rest = text.split(begin)
    return before + begin + "\n".join([*lines, "", ""]) + end + rest.split(end)[1]


def environment() -> dict[str, Any]:
    """What the figures depend on; neither host names nor paths."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        cpu = names[0].split(":")[1].strip() if names else cpu
    found: dict[str, Any] = {
        "CPU": cpu,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }
    found |= {"system": platform.system(), "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


if __name__ == "__main__":
    main()
