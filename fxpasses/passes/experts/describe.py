"""Loops and queries in the words of their programs, for the report."""

from __future__ import annotations

from torch.fx import Node

from fxpasses.graph.calls import operator_of

_QUERIES = {"where": "torch.where(mask)", "nonzero": "mask.nonzero()", "getitem": "x[mask]", "split": "split by counts",
            "item": "slices by counts"}  # fmt: skip
_MERGES = {"setadd": "out[…] += y", "assign": "out[…] = y", "cat": "torch.cat"}


def spelling(question: Node, kind: str, times: int) -> str:
    """`torch.where(mask) … index_add_ ×8`."""
    return f"{query_in_words(question)} … {_MERGES.get(kind, kind)} ×{times}"


def query_in_words(question: Node) -> str:
    return _QUERIES.get(operator_of(question), operator_of(question) or "a mask")


def described(experts: int, slots: int | None) -> str:
    """`E = 8, top-2`."""
    return f"E = {experts}, top-{slots}" if slots is not None else f"E = {experts}"
