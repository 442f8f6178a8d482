"""The tensors that forward keeps for backward, read from AOTAutograd's two graphs while a record is open.

Private name, checked on torch 2.11 and 2.13: `torch._functorch._aot_autograd.graph_compile._log_fw_bw_graphs`, which
PyTorch calls with the two graphs whenever it partitions a graph. If it is missing, or a graph comes from a cache and is
not partitioned, nothing is known.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import threading
from typing import Any

import torch
from torch.fx import GraphModule

from fxpasses.graph.aliases import storages
from fxpasses.graph.flops import flops_of
from fxpasses.graph.provenance import module_of, where
from fxpasses.graph.symbols import bytes_of
from fxpasses.inspect.capturability import capturability
from fxpasses.inspect.model import Partition, Saved
from fxpasses.inspect.snapshot import leaves_of

MODULE, NAME = "torch._functorch._aot_autograd.graph_compile", "_log_fw_bw_graphs"
_listening = threading.local()  # a compilation stays in one thread


class Listener:
    """Collects the last partition in this thread between `start` and `stop`."""

    def __init__(self) -> None:
        self.found: Partition | None = None

    def start(self) -> None:
        _install()
        self.found = None
        _listening.to = self

    def stop(self) -> None:
        _listening.to = None

    def receive(self, forward: Any, backward: Any) -> None:
        if isinstance(forward, GraphModule) and isinstance(backward, GraphModule):
            self.found = partition(forward, backward)


def partition(forward: GraphModule, backward: GraphModule) -> Partition:
    """The two graphs' FLOPs by node, and the tensors that backward takes from forward, each storage once."""
    positions = {node.name: number for number, node in enumerate(forward.graph.nodes)}
    nodes = {node.name: node for node in forward.graph.nodes}
    uses = {node: number for number, node in enumerate(backward.graph.nodes)}
    memory: dict[int, Saved] = {}
    inputs = {key for node in forward.graph.find_nodes(op="placeholder") for key in storages(node)}
    for node in backward.graph.find_nodes(op="placeholder"):
        made, value = nodes.get(node.name), node.meta.get("val")
        if made is None or not isinstance(value, torch.Tensor) or not node.users:
            continue
        storage = next(iter(storages(made)), None)
        needed = [uses[user] for user in node.users]
        is_input = made.op == "placeholder" or storage in inputs
        saved = Saved(
            node.name, bytes_of(value), is_input, positions[made.name], min(needed), max(needed),
            where(made), module_of(made)[0],
        )  # fmt: skip
        other = memory.setdefault(storage if storage is not None else -len(memory) - 1, saved)
        other.bytes = max(other.bytes or 0, saved.bytes or 0) if other.bytes is not None else saved.bytes
        other.needed_at, other.freed_at = min(other.needed_at, min(needed)), max(other.freed_at, max(needed))
    recorded = capturability(forward), capturability(backward)
    return Partition(_flops(forward), _flops(backward), list(memory.values()), *recorded)


def _flops(gm: GraphModule) -> list[int]:
    return [flops_of(node, leaves_of(node)) or 0 for node in gm.graph.nodes]


def _install() -> None:
    """Patch PyTorch, once per process, and only if it records."""
    module: Any = importlib.import_module(MODULE)
    original = getattr(module, NAME, None)
    if original is None or hasattr(original, "_fxpasses_listens"):
        return

    @functools.wraps(original)
    def listening(*args: Any, **kwargs: Any) -> Any:
        listener = getattr(_listening, "to", None)
        if listener is not None and len(args) >= 2:
            with contextlib.suppress(Exception):  # observing must not stop a compilation
                listener.receive(args[0], args[1])
        return original(*args, **kwargs)

    listening._fxpasses_listens = True  # type: ignore[attr-defined]
    setattr(module, NAME, listening)
