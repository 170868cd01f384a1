"""Benchmarks: what an update costs, beside what the link or a peer allows in the same run."""
