"""Timed comparisons with the libraries that do the same work; ``python -m benchmarks`` runs all."""
