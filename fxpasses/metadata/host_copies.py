"""Copies of a tensor to the host, whose numbers are read without another wait for the device."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from fxpasses.graph.calls import argument, operator_of
from fxpasses.graph.reachability import reached

_CHAIN = ("getitem", "reshape", "view", "detach")


def is_copy_to_host(node: Any) -> bool:
    """Whether a node is `x.cpu()`, `x.to("cpu")` or `x.to(device="cpu", ...)`."""
    if not isinstance(node, Node) or not isinstance(node.args[0] if node.args else None, Node):
        return False
    if operator_of(node) == "cpu":
        return True
    asked = argument(node, "device")
    return operator_of(node) == "to" and isinstance(asked, (str, torch.device)) and torch.device(asked).type == "cpu"


def copy_read_by(item: Node) -> Node | None:
    """The copy to the host of which `.item()` reads an element, or None."""
    node: Any = item.args[0] if item.args else None
    while isinstance(node, Node) and operator_of(node) in _CHAIN:
        node = node.args[0]
    return node if is_copy_to_host(node) else None


def is_read_by_items(copy: Node) -> bool:
    """Whether numbers are read from a copy to the host."""
    found = reached(copy.users, lambda node: node.users if operator_of(node) in _CHAIN else ())
    return any(operator_of(node) == "item" for node in found)
