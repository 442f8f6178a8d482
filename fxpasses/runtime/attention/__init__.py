"""Attention that computes what a batch's mask allows: a plan once per batch, and an operator that follows it.

`operators` holds what a graph calls; `plan` the layout of a plan and how one is made; `intervals` what rows of a mask
see; `tiles` and `cost` the choice of tiles; `masks`, `cpu`, `dense` and `flash` what runs on the CPU; `cuda` what runs
on CUDA devices; `stats` what was saved.
"""
