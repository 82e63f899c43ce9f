"""One self-contained HTML page from a run."""

from tl_spectral.report.build import write_report

__all__ = ["write_report"]
