"""Activations that wait for backward in host memory or on disk (pass `offload_activations`).

`candidates` come from the graphs; `choose` and `schedule` know only plain data; `insert` rewrites; `runtime` moves.
"""
