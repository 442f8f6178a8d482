"""Benchmarks of contenders side by side in one run. `python -m bench list | run CASE… | report`, see README.md."""
