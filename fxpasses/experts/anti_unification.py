"""Anti-unification: the template that the E branches of a loop are instances of.

`Unifier.unify` takes one value of each branch. A node that all branches use is shared; numbers that differ become
`Constants`; nodes that apply the same operator become a `Template`, whose arguments are unified in turn. Anything else
is a `Mismatch`.

    branch 0: y_0 = silu(x[tok_0] @ w[0])        template silu(template matmul(template getitem(x, template tok),
    branch 1: y_1 = silu(x[tok_1] @ w[1])                                      template getitem(w, constants (0, 1))))
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
    """The branches are not one program; the text says where they differ."""


@dataclass(frozen=True)
class Constants:
    """One number for each branch, not all equal."""

    values: tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class Template:
    """One node of each branch, with unified arguments: shared nodes, `Constants`, templates and plain values.

    A template without arguments stands for inputs of the graph.
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


# Pure operators: equal operands give equal results, unless their memory is written in between (`Unifier.repeats`).
REPEATED = frozenset(
    {"any", "bool", "contiguous", "flatten", "float", "getitem", "int", "long", "one_hot", "permute", "reshape",
     "squeeze", "sum", "t", "to", "transpose", "unsqueeze", "view"}
)  # fmt: skip


class Unifier:
    """Anti-unifies values, each tuple of nodes once. slices: gives slices with different bounds a meaning, if known.

    of_one: if there is only one branch, and so nothing to compare, whether a node is the branch's own.
    repeats: whether nodes with equal arguments have one value, because nothing is written in between.
    """

    def __init__(
        self,
        slices: Callable[[Sequence[slice]], Constants | None] = lambda slices: None,
        of_one: Callable[[Node], bool] = lambda node: False,
        repeats: Callable[[Sequence[Node]], bool] = lambda nodes: True,
    ) -> None:
        self._slices, self._of_one, self._repeats = slices, of_one, repeats
        self._templates: dict[tuple[Node, ...], Any] = {}

    def unify(self, values: Sequence[Any]) -> Any:
        """The common form of the values, one for each branch; raises `Mismatch`."""
        first = values[0]
        if all(value is first for value in values) and not self._is_own(values):
            return first
        if all(isinstance(value, Node) for value in values):
            return self._template(tuple(values))
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

    def _template(self, nodes: tuple[Node, ...]) -> Any:
        if nodes not in self._templates:
            first = nodes[0]
            if any((node.op, node.target) != (first.op, first.target) for node in nodes):
                if not all(node.op in ("placeholder", "get_attr") for node in nodes):
                    other = next(n for n in nodes if (n.op, n.target) != (first.op, first.target))
                    raise Mismatch(f"`{first.name}` in one branch is `{other.name}` in another", other)
                self._templates[nodes] = Template(nodes, (), {})
            else:
                args = self.unify([node.args for node in nodes])
                template = Template(nodes, args, self.unify([node.kwargs for node in nodes]))
                self._templates[nodes] = first if _is_repetition(template) and self._repeats(nodes) else template
        return self._templates[nodes]

    def _is_own(self, values: Sequence[Any]) -> bool:
        """Whether there is only one branch, and its value is, or may contain, a node of its own."""
        return len(values) == 1 and (not isinstance(values[0], Node) or self._of_one(values[0]))


def _is_repetition(template: Template) -> bool:
    """Whether each branch repeats one computation, as `idx.flatten()` in every iteration of the loop."""
    if len(template.nodes) == 1:
        return False
    differs = any(isinstance(leaf, (Template, Constants)) for leaf in leaves((template.args, template.kwargs)))
    return template.name in REPEATED and not differs


def _other(values: Sequence[Any]) -> Any:
    return next((value for value in values if value is not values[0] and value != values[0]), values[-1])


def members(templates: Sequence[Any]) -> list[Template]:
    """All templates that the given templates consist of, operands first."""
    found: dict[int, Template] = {}

    def visit(value: Any) -> None:
        if isinstance(value, Template) and id(value) not in found:
            for leaf in leaves((value.args, value.kwargs)):
                visit(leaf)
            found[id(value)] = value

    for leaf in leaves(tuple(templates)):
        visit(leaf)
    return list(found.values())
