"""What is known once per batch is computed once per batch (passes `hoist_metadata`, `hoist_writes`, `coalesce_reads`).

`analysis` says which nodes of a graph are metadata; `draft` is a prologue while it is written, `program` the finished
one, as data; `runtime` runs it, once per batch.
"""
