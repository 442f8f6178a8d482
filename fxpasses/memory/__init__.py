"""Training steps that fit into a number of bytes (`fastpack.memory`).

`limits` asks the device; `footprint` predicts what a partition needs; `step` adds up the pieces of a step; `recompute`
partitions with more or less recomputation.
"""
