"""Attention that computes only what a batch's mask allows: a plan once per batch, and an operator that follows it.

`operators` has the operators that a graph calls; `plan` the layout of a plan and its construction; `intervals` the
columns that rows of a mask attend to; `tiles` and `cost` the choice of tiles; `masks`, `cpu`, `dense`, `written` and
`flash` the implementation on the CPU; `cuda` the one on CUDA devices; `stats` the work that was saved.
"""
