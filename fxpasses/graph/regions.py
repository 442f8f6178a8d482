"""Regions: a graph, and the bodies of the checkpoints in it, each a graph with placeholders for its operands.

Checked on torch 2.11, 2.13 and 2.15: `torch.utils.checkpoint` reaches a backend as
`torch.ops.higher_order.tag_activation_checkpoint(body, *operands, **options)`, where the body is a submodule whose
placeholders are in operand order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fxpasses.graph.modes import Regions, autocast_regions

CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint


@dataclass(eq=False)
class Region:
    """One graph: the main graph (`parent` and `call` are None) or the body of a checkpoint call in `parent`.

    bodies: the regions directly inside, by their call. operands: the operand in `parent` of each placeholder of a body.
    autocast: the autocast regions around the graph.
    """

    gm: GraphModule
    parent: Region | None = None
    call: Node | None = None
    bodies: dict[Node, Region] = field(default_factory=dict)
    operands: dict[Node, Any] = field(default_factory=dict)
    autocast: Regions = ()

    def __post_init__(self) -> None:
        if self.call is not None:
            self.operands = dict(zip(self.placeholders(), self.call.args[1:], strict=True))
        calls = self.gm.graph.find_nodes(op="call_function", target=CHECKPOINT)
        around = autocast_regions(self.gm.graph, self.autocast) if calls else {}
        for call in calls:
            body = getattr(self.gm, call.args[0].target)
            self.bodies[call] = Region(body, self, call, autocast=around[call])

    def placeholders(self) -> list[Node]:
        return self.gm.graph.find_nodes(op="placeholder")

    def add_placeholder(self, name: str, example: Any) -> Node:
        """A new input, the last one. name: a suggestion.

        The placeholder's target is its name: if they differed, FX would begin the code with `name = target`, which
        would overwrite an input that is called `name` in the signature.
        """
        before = self.placeholders()
        with self.gm.graph.inserting_after(before[-1]):
            node = self.gm.graph.placeholder(name)
            while any(node.name == other.target for other in before):
                self.gm.graph.erase_node(node)
                node = self.gm.graph.placeholder(f"{node.name}_given")
        node.target = node.name
        node.meta = {"example_value": example}
        return node

    def erase(self, node: Node) -> None:
        """Erase a node that nobody uses. If it is a body's placeholder, its operand is removed from the call."""
        if self.call is not None and node.op == "placeholder":
            position = self.placeholders().index(node)
            self.call.args = (*self.call.args[: 1 + position], *self.call.args[2 + position :])
            del self.operands[node]
        self.gm.graph.erase_node(node)

    def walk(self) -> Iterator[Region]:
        """This region and all regions inside it, innermost first."""
        for body in self.bodies.values():
            yield from body.walk()
        yield self
