"""Benchmarks: each module measures peers side by side in one run, as `python -m bench.NAME`."""
