"""Values that depend only on the batch are computed once per batch (passes `hoist_metadata`, `hoist_writes`,
`coalesce_reads`).

`analysis` determines which nodes of a graph are metadata; `draft` is a prologue while it is written, and `program` the
finished one, as data; `runtime` runs it, once per batch.
"""
