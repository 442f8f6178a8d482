"""Descriptions of loops and queries for the report, as the program spells them."""

from __future__ import annotations

from torch.fx import Node

from fxpasses.graph.calls import operator_of

_QUERIES = {"where": "torch.where(mask)", "nonzero": "mask.nonzero()", "getitem": "x[mask]", "split": "split by counts",
            "item": "slices by counts"}  # fmt: skip
_MERGES = {"setadd": "out[…] += y", "assign": "out[…] = y", "cat": "torch.cat"}


def describe_loop(query: Node, kind: str, times: int) -> str:
    """`torch.where(mask) … index_add_ ×8`."""
    return f"{describe_query(query)} … {_MERGES.get(kind, kind)} ×{times}"


def describe_query(query: Node) -> str:
    return _QUERIES.get(operator_of(query), operator_of(query) or "a mask")


def describe_routing(experts: int, slots: int | None) -> str:
    """`E = 8, top-2`."""
    return f"E = {experts}, top-{slots}" if slots is not None else f"E = {experts}"
