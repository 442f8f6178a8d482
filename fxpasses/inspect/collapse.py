"""Identical changes reported once: "layers 0–27: the same changes ×28"."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

from fxpasses.inspect.changes import Change, Diff, Kind
from fxpasses.inspect.model import MAIN, Stage, short_name

_SYMBOL = re.compile(r"\bu\d+\b")
_INDEX = re.compile(r"(?:^|(?<=\.))\d+(?=\.|$)")


@dataclass
class Group:
    """Changes that differ in their layer alone. module: the path, with the layer's number as `*`.

    results: for `Kind.PROLOGUE`, the number of the prologue's nodes that they became.
    """

    kind: Kind
    target: str
    source: str
    module: str
    detail: str
    layers: list[int]
    changes: list[Change] = field(default_factory=list)
    code: str = ""
    results: int = 0


@dataclass
class Section:
    """Groups in the same layers. layers: their numbers, empty outside layers."""

    layers: list[int]
    groups: list[Group] = field(default_factory=list)

    @property
    def title(self) -> str:
        if not self.layers:
            return "outside layers"
        same = f": the same changes ×{len(self.layers)}" if len(self.layers) > 1 else ""
        return f"layer{'s' * (len(self.layers) > 1)} {ranges(self.layers)}{same}"


def collapse(found: Diff, before: Stage, after: Stage) -> list[Section]:
    """The changes in sections of identical layers, in graph order, without those at the borders of bodies."""
    layers = [layers_of(before), layers_of(after)]
    groups: dict[tuple[object, ...], Group] = {}
    for change in found.changes:
        if is_border(change):
            continue
        side, place = (0, change.before) if change.before is not None else (1, change.after)
        assert place is not None
        layer = layer_of(change.module, place[0], layers[side])
        module = _INDEX.sub("*", change.module, count=1)
        key = (change.kind, change.op, change.target, change.source, module, _without_numbers(change.detail))
        if key not in groups:
            groups[key] = Group(
                change.kind, short_name(change.target), change.source, module, change.detail, [], code=change.code
            )
        group = groups[key]
        group.changes.append(change)
        if layer is not None and layer not in group.layers:
            group.layers.append(layer)
    sections: dict[tuple[int, ...], Section] = {}
    for group in groups.values():
        group.layers.sort()
        if group.kind is Kind.PROLOGUE:
            went = {found.to_prologue[change.before] for change in group.changes if change.before}
            group.results = len(went - {None})
        sections.setdefault(tuple(group.layers), Section(group.layers)).groups.append(group)
    return list(sections.values())


@dataclass(frozen=True)
class Line:
    """The groups of one kind, module and source line, which a report shows in one row."""

    kind: Kind
    source: str
    code: str
    module: str
    what: str
    changes: tuple[Change, ...]


def lines_of(section: Section) -> list[Line]:
    """The rows of a section, grouped by module."""
    merged: dict[tuple[object, ...], list[Group]] = {}
    for group in section.groups:
        own = group.detail if _tells_apart(group) else ""
        merged.setdefault((group.module, group.kind, group.source, own), []).append(group)
    layers = max(len(section.layers), 1)
    lines = []
    for groups in merged.values():
        first = groups[0]
        counts: Counter[str] = Counter()
        for group in groups:
            counts[group.target] += len(group.changes)
        what = ", ".join(_times(target, count, layers) for target, count in counts.items())
        results = sum(group.results for group in groups)
        if first.kind is Kind.PROLOGUE:
            if results < counts.total():
                what += f" → {results} once a batch" if results else " → asserted once a batch"
        elif first.detail and _tells_apart(first):
            what += f": {first.detail}"
        changes = tuple(change for group in groups for change in group.changes)
        lines.append(Line(first.kind, first.source, first.code, first.module, what, changes))
    modules = list(dict.fromkeys(line.module for line in lines))
    return sorted(lines, key=lambda line: (modules.index(line.module), _ORDER.index(line.kind)))


# Within a module, improvements come first, and changed sizes, which follow from the rest, last.
_ORDER = (Kind.PROLOGUE, Kind.ADDED, Kind.REMOVED, Kind.REWIRED, Kind.MOVED, Kind.METADATA)


def _tells_apart(group: Group) -> bool:
    """Whether the detail says more than the operators' names; an added operator's detail is only its type."""
    if group.kind is Kind.ADDED:
        return group.detail.endswith("from the prologue")
    return group.kind is not Kind.PROLOGUE


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
    return region != MAIN and change.op in ("placeholder", "output")


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
