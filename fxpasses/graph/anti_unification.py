"""Programs that are the same up to what differs: E branches of a loop, walked in step.

`unify` takes one node of each branch and says what they have in common. Where all branches look at the same node, it is
shared; where they differ in a number, it is a constant of each branch; where they apply the same operator, it is a
family of nodes, whose arguments are unified in turn. Anything else is a `Mismatch`.

    branch 0: y_0 = silu(x[tok_0] @ w[0])        family silu(family matmul(family getitem(x, family tok),
    branch 1: y_1 = silu(x[tok_1] @ w[1])                                  family getitem(w, constants (0, 1))))
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from fxpasses.graph.calls import OperatorCall, operator_of
from fxpasses.graph.effects import leaves
from fxpasses.graph.refusals import NotProved


class Mismatch(NotProved):
    """The branches are not the same program; the text says where they part."""


@dataclass(frozen=True)
class Constants:
    """A number for each branch, not all equal."""

    values: tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class Template:
    """One node of each branch, with the arguments unified: nodes that are shared, `Constants`, families, plain values.

    A family without arguments is one of inputs of the graph.
    """

    nodes: tuple[Node, ...]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def is_input(self) -> bool:
        return not self.args and not self.kwargs

    @property
    def call(self) -> OperatorCall:
        return OperatorCall(self.nodes[0].target, self.args, self.kwargs)

    @property
    def name(self) -> str:
        """The canonical name of the operator; "" for inputs."""
        return operator_of(self.nodes[0])

    @property
    def example(self) -> Any:
        """The value of the first branch's node on fake tensors."""
        return self.nodes[0].meta.get("example_value")


# Pure: with the same operands they give the same value, as long as nothing is written in between.
REPEATED = frozenset(
    {"any", "bool", "contiguous", "flatten", "float", "getitem", "int", "long", "one_hot", "permute", "reshape",
     "squeeze", "sum", "t", "to", "transpose", "unsqueeze", "view"}
)  # fmt: skip


class Unifier:
    """Unifies nodes, each tuple of them once. slices: what slices with different bounds are, if it knows."""

    def __init__(self, slices: Callable[[Sequence[slice]], Constants | None] = lambda slices: None) -> None:
        self._slices = slices
        self._families: dict[tuple[Node, ...], Any] = {}

    def unify(self, values: Sequence[Any]) -> Any:
        """What the values, one of each branch, have in common; raises `Mismatch`."""
        first = values[0]
        if all(value is first for value in values):
            return first
        if all(isinstance(value, Node) for value in values):
            return self._family(tuple(values))
        if any(isinstance(value, Node) for value in values) or any(type(v) is not type(first) for v in values):
            raise Mismatch(f"one branch has {first!r} where another has {_other(values)!r}")
        if isinstance(first, (tuple, list)):
            if any(len(value) != len(first) for value in values):
                raise Mismatch("the branches take different numbers of arguments")
            return type(first)([self.unify(parts) for parts in zip(*values, strict=True)])
        if isinstance(first, dict):
            if any(value.keys() != first.keys() for value in values):
                raise Mismatch("the branches take different arguments")
            return {name: self.unify([value[name] for value in values]) for name in first}
        if isinstance(first, slice):
            if not all(value == first for value in values) and (found := self._slices(values)) is not None:
                return found
            return slice(*(self.unify([getattr(v, part) for v in values]) for part in ("start", "stop", "step")))
        if all(value == first for value in values):
            return first
        return Constants(tuple(values))

    def _family(self, nodes: tuple[Node, ...]) -> Any:
        if nodes not in self._families:
            first = nodes[0]
            if any((node.op, node.target) != (first.op, first.target) for node in nodes):
                if not all(node.op in ("placeholder", "get_attr") for node in nodes):
                    other = next(n for n in nodes if (n.op, n.target) != (first.op, first.target))
                    raise Mismatch(f"`{first.name}` in one branch is `{other.name}` in another", other)
                self._families[nodes] = Template(nodes, (), {})
            else:
                args = self.unify([node.args for node in nodes])
                family = Template(nodes, args, self.unify([node.kwargs for node in nodes]))
                self._families[nodes] = nodes[0] if self._is_repetition(family) else family
        return self._families[nodes]

    def _is_repetition(self, family: Template) -> bool:
        """Whether each branch computes the same anew: `idx.flatten()` in every round of the loop."""
        return family.name in REPEATED and not any(
            isinstance(leaf, (Template, Constants)) for leaf in leaves((family.args, family.kwargs))
        )


def _other(values: Sequence[Any]) -> Any:
    return next((value for value in values if value is not values[0] and value != values[0]), values[-1])


def members(families: Sequence[Any]) -> list[Template]:
    """All families that the given ones are made of, operands first."""
    found: dict[int, Template] = {}

    def visit(value: Any) -> None:
        if isinstance(value, Template) and id(value) not in found:
            for leaf in leaves((value.args, value.kwargs)):
                visit(leaf)
            found[id(value)] = value

    for family in families:
        for leaf in leaves(family):
            visit(leaf)
    return list(found.values())
