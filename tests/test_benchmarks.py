"""The benchmarks run and say what they should; nothing here is timed."""

from __future__ import annotations

import json
import math
import platform
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from benchmarks import __main__ as bench
from benchmarks import graphs
from benchmarks.measure import Row, in_this_process, measured


@pytest.mark.parametrize("name", bench.MODULES)
def test_small_tables_are_well_formed(name: str) -> None:
    pytest.importorskip("igraph")
    pytest.importorskip("bct")
    with in_this_process():
        rows = import_module(f"benchmarks.{name}").rows(small=True)
    cases = {(row.table, row.case) for row in rows}
    assert {(row.table, row.case) for row in rows if row.ours} == cases
    assert all(row.method and math.isfinite(row.cpu_seconds) for row in rows)
    assert all(row.cpu_seconds >= 0 and (row.peak_mb is None or row.peak_mb >= 0) for row in rows)
    assert len({(row.table, row.case, row.method) for row in rows}) == len(rows)
    assert len(bench.ratios(rows)) == len(rows)


def test_the_same_answer_from_every_method() -> None:
    with in_this_process():
        rows = import_module("benchmarks.graphs").rows(small=True)
    by_case: dict[str, set[str]] = {}
    for row in rows:
        by_case.setdefault(row.case.split(",")[0], set()).add(row.note)
    assert len(by_case["unit graph"]) == 1
    small = [row.note for row in rows if row.case == "participation, 64 units"]
    assert len(set(small)) == 1
    assert small[0] != "mean 0.000000"
    assert all(note.startswith("Q = 0.8") for note in by_case["Louvain"])


def test_a_process_of_its_own() -> None:
    row = measured(
        graphs.unit_graph, table="t", case="c", method="m", ours=True, bar="none", repeat=2,
        n=1500, samples=100,
    )  # fmt: skip
    assert (row.table, row.case, row.method, row.ours, row.bar) == ("t", "c", "m", True, "none")
    assert row.note.endswith(" edges")
    assert row.cpu_seconds > 0
    if platform.system() == "Linux":
        assert row.peak_mb is not None
        assert 17 < row.peak_mb < 200  # the correlations alone are 17 MiB


def table() -> list[Row]:
    return [
        Row("graphs", "a", "ours", True, 2.0, 2.5, 10.0, "≤ 1", "Q | R"),
        Row("graphs", "a", "theirs", False, 8.0, 8.0, None),
        Row("graphs", "b", "ours", True, 1.0, 1.0, 10.0),
    ]


def test_ratios_are_those_of_a_case() -> None:
    assert bench.ratios(table()) == [1.0, 4.0, 1.0]
    assert [line[0] for line in bench.cells(table())] == ["a", "", "b"]


def test_the_docs_take_their_numbers_from_the_record() -> None:
    record: dict[str, Any] = {
        "environment": {"CPU": "x"}, "rows": [vars(row) for row in table()],
    }  # fmt: skip
    text = "before\n<!-- benchmarks: begin -->old<!-- benchmarks: end -->\nafter"
    once = bench.with_table(text, record)
    assert bench.with_table(once, record) == once
    assert "old" not in once
    assert "| a | **ours** | 2 | 1 | 10 | Q \\| R | ≤ 1 |" in once
    assert once.startswith("before\n")
    assert once.endswith("\nafter")


def test_the_committed_table_is_that_of_the_committed_record() -> None:
    if not bench.RESULTS.exists():
        pytest.skip("no record yet: make bench")
    record = json.loads(bench.RESULTS.read_text())
    text = bench.DOCS.read_text()
    assert bench.with_table(text, record) == text
    assert not any(str(Path.home()) in str(value) for value in record["environment"].values())
    assert platform.node() not in json.dumps(record)
