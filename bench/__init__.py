"""Measurements of geist-pool: run from the repository's root, `python -m bench.restore`, `python -m bench.decision`."""
