"""Identical changes reported once: "layers 0–27: the same changes ×28"."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

from fxpasses.inspect.changes import Change, Diff, Kind
from fxpasses.inspect.model import MAIN, Stage

_SYMBOL = re.compile(r"\bu\d+\b")
_INDEX = re.compile(r"(?:^|(?<=\.))\d+(?=\.|$)")


@dataclass
class _Group:
    """Changes that differ in their layer alone. module: the path, with the layer's number as `*`."""

    first: Change
    module: str
    layers: set[int] = field(default_factory=set)
    changes: list[Change] = field(default_factory=list)


@dataclass(frozen=True)
class Line:
    """The changes of one kind, module and source line, which a report shows in one row."""

    kind: Kind
    source: str
    code: str
    module: str
    what: str
    changes: tuple[Change, ...]


@dataclass(frozen=True)
class Section:
    """The changes in the same layers, grouped by module. layers: their numbers, empty outside layers."""

    layers: list[int]
    lines: list[Line]

    @property
    def title(self) -> str:
        if not self.layers:
            return "outside layers"
        same = f": the same changes ×{len(self.layers)}" if len(self.layers) > 1 else ""
        return f"layer{'s' * (len(self.layers) > 1)} {ranges(self.layers)}{same}"


def collapse(found: Diff, before: Stage, after: Stage) -> list[Section]:
    """The changes in sections of identical layers, in graph order, without those at the borders of bodies."""
    layers = [layers_of(before), layers_of(after)]
    groups: dict[tuple[object, ...], _Group] = {}
    for change in found.changes:
        if is_border(change):
            continue
        side, place = (0, change.before) if change.before is not None else (1, change.after)
        assert place is not None
        node = change.node
        layer = layer_of(node.module, place[0], layers[side])
        module = _INDEX.sub("*", node.module, count=1)
        key = (change.kind, node.op, node.target, str(node.source), module, _without_numbers(change.detail))
        group = groups.setdefault(key, _Group(change, module))
        group.changes.append(change)
        if layer is not None:
            group.layers.add(layer)
    sections: dict[tuple[int, ...], list[_Group]] = {}
    for group in groups.values():
        sections.setdefault(tuple(sorted(group.layers)), []).append(group)
    return [Section(list(layers), _lines(groups, len(layers), found)) for layers, groups in sections.items()]


def _lines(groups: list[_Group], layers: int, found: Diff) -> list[Line]:
    """A row for each module, kind and source line, and for each detail that a reader has to know."""
    merged: dict[tuple[object, ...], list[_Group]] = {}
    for group in groups:
        first = group.first
        merged.setdefault((group.module, first.kind, str(first.node.source), _own_detail(first)), []).append(group)
    lines = []
    for (module, *_), alike in merged.items():
        first = alike[0].first
        changes = tuple(change for group in alike for change in group.changes)
        counts = Counter(change.node.short_target for change in changes)
        what = ", ".join(_times(target, count, max(layers, 1)) for target, count in counts.items())
        if first.kind is Kind.PROLOGUE:
            results = sum(_results(group, found) for group in alike)
            if results < len(changes):
                what += f" → {results} once a batch" if results else " → asserted once a batch"
        elif detail := _own_detail(first):
            what += f": {detail}"
        source = first.node.source
        place, code = (str(source), source.code) if source is not None else ("", "")
        lines.append(Line(first.kind, place, code, str(module), what, changes))
    modules = list(dict.fromkeys(line.module for line in lines))
    return sorted(lines, key=lambda line: (modules.index(line.module), _ORDER.index(line.kind)))


def _results(group: _Group, found: Diff) -> int:
    """The number of the prologue's nodes that the changes of a group became."""
    return len({found.to_prologue[change.before] for change in group.changes if change.before} - {None})


# Within a module, improvements come first, and changed sizes, which follow from the rest, last.
_ORDER = (Kind.PROLOGUE, Kind.ADDED, Kind.REMOVED, Kind.REWIRED, Kind.MOVED, Kind.METADATA)


def _own_detail(change: Change) -> str:
    """The detail where it says more than the operators' names; an added operator's detail is only its type."""
    if change.kind is Kind.PROLOGUE or (change.kind is Kind.ADDED and not change.detail.endswith("from the prologue")):
        return ""
    return change.detail


def _times(target: str, count: int, layers: int) -> str:
    """`add ×2` for two in each layer; the number of layers is in the title."""
    each = count / layers
    if each == 1:
        return target
    return f"{target} ×{int(each)}" if each.is_integer() else f"{target} ×{count} in all"


def _without_numbers(detail: str) -> str:
    """Numbers symbols in order of occurrence: each layer has its own `u20`, `u42`, …"""
    names: dict[str, str] = {}
    return _SYMBOL.sub(lambda match: names.setdefault(match[0], f"#{len(names)}"), detail)


def is_border(change: Change) -> bool:
    """Whether the change is of a body's placeholder or output, which the change of the call covers."""
    region, _ = change.before or change.after or (MAIN, "")
    return region != MAIN and change.node.op in ("placeholder", "output")


def layer_of(module: str, region: str, layers: dict[str, int]) -> int | None:
    """The number of a node's layer: its module's, or else its body's."""
    found = _INDEX.search(module)
    return int(found[0]) if found else layers.get(region)


def layers_of(stage: Stage) -> dict[str, int]:
    """Maps bodies to the layer number that most of their modules name, or else to their position among bodies."""
    found: dict[str, int] = {}
    position = 0
    for region in stage.regions or ():
        if not region.call:
            continue
        indices = Counter(match[0] for node in region.nodes if (match := _INDEX.search(node.module)))
        if region.parent in found:
            found[region.path] = found[region.parent]
        else:
            found[region.path] = int(indices.most_common(1)[0][0]) if indices else position
            position += 1
    return found


def ranges(numbers: list[int]) -> str:
    """`0–3, 7` for 0, 1, 2, 3, 7."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][-1] == number - 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return ", ".join("–".join(map(str, part)) for part in parts)
