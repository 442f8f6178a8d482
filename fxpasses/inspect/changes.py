"""The changes between two stages of a graph, by kind and independent of names, numbers and order.

A node of "before" is matched with a node of "after" (see `fxpasses.inspect.matching`), or it is *removed* or *moved to
the prologue*; a node of "after" without counterpart is *added*. A matched pair may be *rewired* (it takes other nodes
or constants), *moved* (to another body, or out of one) or have *changed metadata* (shape, stride, dtype, device,
symbols). Placeholders and outputs of bodies are matched but not reported, as the call shows the same.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from fxpasses.inspect.dataflow import Dataflow
from fxpasses.inspect.matching import match
from fxpasses.inspect.model import MAIN, Node, Stage, TensorValue, bodies_of, references
from fxpasses.inspect.prologue_moves import AS_CHECK, made_at, moved_to_prologue
from fxpasses.inspect.readable import Printer, input_name, type_text

_TOKEN = re.compile(r"\w+|[^\w\s]")
_SYMBOL = re.compile(r"[suz][a-z]*\d+")


class Kind(enum.Enum):
    """The kinds of change. The value is the text for a person."""

    REMOVED = "removed"
    PROLOGUE = "moved to the prologue"
    ADDED = "added"
    REWIRED = "rewired"
    MOVED = "moved"
    METADATA = "changed metadata"


MARKS = {
    Kind.REMOVED: "−", Kind.PROLOGUE: "↑", Kind.ADDED: "+", Kind.REWIRED: "~", Kind.MOVED: "→", Kind.METADATA: "Δ",
}  # fmt: skip


@dataclass(slots=True)
class Change:
    """One change of one node. before, after: (path of the region, name), None on a side without the node.

    node: the one before, if there is one. detail: a text that names operators instead of nodes, so that identical
    layers have the same text.
    """

    kind: Kind
    before: tuple[str, str] | None
    after: tuple[str, str] | None
    node: Node
    detail: str = ""


@dataclass
class Diff:
    """All changes, in graph order. matches: nodes of "before" to their counterparts.

    to_prologue: nodes of "before" to the prologue's nodes that compute the same; several may map to one.
    """

    changes: list[Change] = field(default_factory=list)
    matches: dict[tuple[str, str], tuple[str, str]] = field(default_factory=dict)
    to_prologue: dict[tuple[str, str], tuple[str, str] | None] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.changes)

    def of(self, kind: Kind) -> list[Change]:
        return [change for change in self.changes if change.kind is kind]


def diff(before: Stage, after: Stage, flows: tuple[Dataflow, Dataflow] | None = None) -> Diff:
    """The changes from one stage to another, of one graph or of two records' graphs. flows: of the stages, if known."""
    return _Diff(*(flows or (Dataflow(before), Dataflow(after))), after).run()


class _Diff:
    def __init__(self, before: Dataflow, after: Dataflow, stage: Stage) -> None:
        self.before = before
        self.after = after
        self.stage = stage
        self.to = match(before, after)
        self.back = [-1] * len(after)
        for number, other in enumerate(self.to):
            if other >= 0:
                self.back[other] = number
        self.regions = _matched_regions(before, after, self.to)
        self.symbols: dict[str, str] = {}
        self.found = Diff()

    def run(self) -> Diff:
        prologue = moved_to_prologue(self.before, self.after, self.to, self.stage.checks)
        computed = set(prologue.values())
        places = {made_at(self.before.nodes[number]) for number in prologue}
        for number, other in enumerate(self.to):
            if other >= 0:
                self.found.matches[self.before.key(number)] = self.after.key(other)
                self._compare(number, other)
            else:
                self._gone(number, prologue)
        for other, number in enumerate(self.back):
            if number < 0 and other not in computed and not self._is_reported(other, places):
                self._add(Kind.ADDED, None, other, self._what(other))
        return self.found

    def _gone(self, number: int, prologue: dict[int, int]) -> None:
        kind = Kind.PROLOGUE if number in prologue else Kind.REMOVED
        if kind is Kind.PROLOGUE:
            at = prologue[number]
            self.found.to_prologue[self.before.key(number)] = self.after.key(at) if at >= 0 else None
        self._add(kind, number, None, "as an assertion" if prologue.get(number) == AS_CHECK else "")

    def _what(self, other: int) -> str:
        node = self.after.nodes[other]
        prologue = node.op == "placeholder" and not node.source_name and not self.after.is_border(other)
        made = "from the prologue" if prologue and any(self.after.in_prologue) else ""
        types = [type_text(value) for value in node.values] or ([f"integer {node.scalar}"] if node.scalar else [])
        return " ".join(part for part in (", ".join(types), made) if part)

    def _compare(self, number: int, other: int) -> None:
        if not self.before.is_border(number) and not self.after.is_border(other):
            rewired = self._rewired(number, other)
            if rewired:
                self._add(Kind.REWIRED, number, other, rewired)
            region, now = self.before.region[number], self.after.region[other]
            if self.regions.get(region) != now:
                self._add(Kind.MOVED, number, other, f"from {_place(region)} to {_place(now)}")
        metadata = self._metadata(self.before.nodes[number], self.after.nodes[other])
        if metadata:
            self._add(Kind.METADATA, number, other, metadata)

    def _add(self, kind: Kind, number: int | None, other: int | None, detail: str) -> None:
        node = self.before.nodes[number] if number is not None else self.after.nodes[other or 0]
        before = self.before.key(number) if number is not None else None
        after = self.after.key(other) if other is not None else None
        self.found.changes.append(Change(kind, before, after, node, detail))

    def _is_reported(self, other: int, places: set[Any]) -> bool:
        """Whether a new node belongs to a move to the prologue that is reported already."""
        node = self.after.nodes[other]
        return self.after.in_prologue[other] and (node.op in ("placeholder", "output") or made_at(node) in places)

    # Rewired

    def _rewired(self, number: int, other: int) -> str:
        old, new = self.before.nodes[number], self.after.nodes[other]
        if old.op == "placeholder":
            return ""
        parts = []
        if (old.op, old.target) != (new.op, new.target):
            parts.append(f"{old.target} → {new.target}")
        if len(old.args) != len(new.args):  # operands of a call were added or removed
            parts += self._operands(number, other)
        else:
            arguments = [
                text
                for position, (one, two) in enumerate(zip(old.args, new.args, strict=True))
                for text in self._argument(number, other, one, two, str(position))
            ]
            # One operand added and another removed shifts the operands in between, but does not change them.
            parts += self._operands(number, other) if bodies_of(old) and len(arguments) > 2 else arguments
        for name in dict.fromkeys([*old.kwargs, *new.kwargs]):
            parts += self._argument(number, other, old.kwargs.get(name), new.kwargs.get(name), name)
        return ", ".join(parts)

    def _argument(self, number: int, other: int, old: Any, new: Any, name: str) -> Iterator[str]:
        if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
            for position, (one, two) in enumerate(zip(old, new, strict=True)):
                yield from self._argument(number, other, one, two, f"{name}.{position}")
        elif not self._same(number, other, old, new):
            was, now = self._text(self.before, number, old), self._text(self.after, other, new)
            yield f"argument {name}: {was} → {now}"

    def _same(self, number: int, other: int, old: Any, new: Any) -> bool:
        if type(old) is not type(new):
            return False
        if isinstance(old, list):
            return len(old) == len(new) and all(self._same(number, other, a, b) for a, b in zip(old, new, strict=True))
        if not isinstance(old, dict):
            return bool(old == new)
        if old.keys() != new.keys():
            return False
        if "node" in old:
            return self._is_pair(
                self.before.number[self.before.region[number], old["node"]],
                self.after.number[self.after.region[other], new["node"]],
            )
        if "body" in old:
            return True  # bodies are compared inside
        if "constant" in old:
            return self._same_expression(old["constant"], new["constant"])
        return self._same(number, other, next(iter(old.values())), next(iter(new.values())))

    def _is_pair(self, number: int, other: int) -> bool:
        number, other = self.before.origin(number), self.after.origin(other)
        if self.to[number] == other:
            return True
        # Nodes with equal values and equal uses are interchangeable.
        return (
            self.to[number] >= 0
            and self.back[other] >= 0
            and self.before.value[number] == self.after.value[other] == self.after.value[self.to[number]]
            and self.before.use[number] == self.after.use[other]
        )

    def _operands(self, number: int, other: int) -> Iterator[str]:
        """`−mask −item +packed_0` for a call whose number of operands changed."""
        old = self.before.numbers(number, references(self.before.nodes[number].args))
        new = self.after.numbers(other, references(self.after.nodes[other].args))
        kept = {self.to[n] for n in old}
        removed = dict.fromkeys(self._label(self.before, n) for n in old if self.to[n] not in new)
        added = dict.fromkeys(self._label(self.after, n) for n in new if n not in kept)
        labels = [f"−{label}" for label in removed] + [f"+{label}" for label in added]
        yield "operands: " + (" ".join(labels) or "others, or in another order")

    def _text(self, graph: Dataflow, number: int, value: Any) -> str:
        printer = Printer(lambda name: self._label(graph, graph.number[graph.region[number], name]))
        return printer.index(value) if isinstance(value, dict) else printer.argument(value)

    def _label(self, graph: Dataflow, number: int) -> str:
        """A label of a node that identical layers share: an input's name, or else the operator."""
        node = graph.nodes[graph.origin(number)]
        if node.op == "placeholder":
            return re.sub(r"\b\d+\b", "*", input_name(node))
        return node.short_target

    # Metadata

    def _metadata(self, old: Node, new: Node) -> str:
        for one, two in zip(old.binds, new.binds, strict=False):
            self.symbols.setdefault(one, two)
        parts = []
        if len(old.values) != len(new.values) and old.values and new.values:
            parts.append(f"{len(old.values)} tensors → {len(new.values)}")
        elif old.values and new.values:
            for first, second in zip(old.values, new.values, strict=True):
                parts += self._tensor(first, second)
        if old.scalar and new.scalar and not self._same_expression(old.scalar, new.scalar):
            parts.append(f"value {old.scalar} → {new.scalar}")
        return ", ".join(dict.fromkeys(parts))

    def _tensor(self, old: TensorValue, new: TensorValue) -> Iterator[str]:
        for name in ("shape", "stride"):
            one, two = getattr(old, name), getattr(new, name)
            if len(one) != len(two) or not all(map(self._same_expression, map(str, one), map(str, two))):
                yield f"{name} [{', '.join(map(str, one))}] → [{', '.join(map(str, two))}]"
        for name in ("dtype", "device", "requires_grad"):
            if getattr(old, name) != getattr(new, name):
                yield f"{name} {getattr(old, name)} → {getattr(new, name)}"

    def _same_expression(self, old: str, new: str) -> bool:
        """Whether two expressions are equal up to the names of symbols, which are matched on the way."""
        if old == new and not _SYMBOL.search(old):
            return True
        if _SYMBOL.fullmatch(old) and _SYMBOL.fullmatch(new):
            return self.symbols.setdefault(old, new) == new
        tokens = [self.symbols.get(token, token) for token in _TOKEN.findall(old)]
        return sorted(tokens) == sorted(_TOKEN.findall(new))  # sorted: SymPy orders a sum by its names


def _matched_regions(before: Dataflow, after: Dataflow, to: list[int]) -> dict[str, str]:
    """Maps the bodies of "before" to those of "after": the bodies of a matched call, in order."""
    found = {path: path for path in before.regions if not before.regions[path].call and path in after.regions}
    later = _by_call(after)
    for call, paths in _by_call(before).items():
        other = to[before.number[call]] if call in before.number else -1
        if other >= 0:
            found.update(zip(paths, later.get(after.key(other), []), strict=False))
    return found


def _by_call(graph: Dataflow) -> dict[tuple[str, str], list[str]]:
    found: dict[tuple[str, str], list[str]] = {}
    for path, region in graph.regions.items():
        if region.call:
            found.setdefault((region.parent, region.call), []).append(path)
    return found


def _place(region: str) -> str:
    return "the main graph" if region == MAIN else f"the body {region.rsplit('/', 1)[-1]}"
