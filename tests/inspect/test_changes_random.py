"""Properties of the diff on random graphs."""

from __future__ import annotations

import copy
import random

from hypothesis import example, settings
from hypothesis import given as holds_for
from hypothesis import strategies as st

from fxpasses.inspect.changes import Kind, diff
from fxpasses.inspect.collapse import collapse
from fxpasses.inspect.dataflow import Dataflow
from fxpasses.inspect.model import Region, Stage, inputs_of
from tests.inspect.stages import call, given, random_stage, ref, renamed_and_reordered, result, stage

SEEDS = st.integers(0, 2**32)


@settings(max_examples=300)
@holds_for(SEEDS)
def test_a_renamed_and_reordered_copy_shows_no_change(seed):
    original = random_stage(random.Random(seed))
    assert diff(original, renamed_and_reordered(original, seed + 1)).changes == []


def edited(original: Stage, chance: random.Random) -> Stage:
    """Some nodes replaced, bypassed or added."""
    changed = copy.deepcopy(original)
    for region in changed.regions or []:
        for position, node in reversed(list(enumerate(region.nodes))):
            if node.op != "call_function" or chance.random() > 0.2 or node.target in ("checkpoint", "getitem"):
                continue
            inputs = inputs_of(node)
            if chance.random() < 0.4:
                node.target = "tanh"
            elif inputs:
                _replace(region, node.name, inputs[0])
                region.nodes.pop(position)
            else:
                region.nodes.insert(position + 1, call(f"new_{position}", "sin", ref(node.name)))
    return changed


def _replace(region: Region, old: str, new: str) -> None:
    def replaced(value):
        if isinstance(value, list):
            return [replaced(item) for item in value]
        return {"node": new} if value == {"node": old} else value

    for node in region.nodes:
        node.args = replaced(node.args)


@settings(max_examples=300)
@holds_for(SEEDS)
@example(233522)  # a twin whose partner became something else
def test_before_without_removed_and_with_added_is_after(seed):
    """Exactly: every node is matched, removed or added, and a matched one that is not told of takes the same values."""
    chance = random.Random(seed)
    before = random_stage(chance)
    after = renamed_and_reordered(edited(before, chance), seed)
    found = diff(before, after)
    gone = {change.before for kind in (Kind.REMOVED, Kind.PROLOGUE) for change in found.of(kind)}
    come = {change.after for change in found.of(Kind.ADDED)}
    nodes = [{(r.path, n.name): n for r in s.regions or [] for n in r.nodes} for s in (before, after)]
    assert gone | set(found.matches) == set(nodes[0]) and not gone & set(found.matches)
    assert come | set(found.matches.values()) == set(nodes[1]) and not come & set(found.matches.values())
    assert len(set(found.matches.values())) == len(found.matches)
    rewired = {change.before for change in found.of(Kind.REWIRED)}
    for key, other in found.matches.items():
        if key not in rewired and nodes[0][key].op != "placeholder":
            assert (nodes[0][key].op, nodes[0][key].target) == (nodes[1][other].op, nodes[1][other].target)
    earlier, graph = Dataflow(before), Dataflow(after)
    values = {graph.key(number): graph.value[number] for number in range(len(graph))}
    for key, other in found.matches.items():
        old, new = nodes[0][key], nodes[1][other]
        if key in rewired or old.op != "call_function":
            continue
        origins = [earlier.key(earlier.origin(earlier.number[key[0], name])) for name in inputs_of(old)]
        expected = [found.matches.get(origin) for origin in origins]
        actual = [(other[0], name) for name in inputs_of(new)]
        assert [values[e] if e else None for e in expected] == [values[a] for a in actual]


@holds_for(SEEDS)
def test_what_was_edited_is_told(seed):
    chance = random.Random(seed)
    before = random_stage(chance)
    after = edited(before, chance)
    counts = [sum(len(r.nodes) for r in s.regions or []) for s in (before, after)]
    tanh = sum(node.target == "tanh" for region in after.regions or [] for node in region.nodes)
    assert bool(diff(before, after)) or (counts[0] == counts[1] and not tanh)


def large(layers: int, removed: str = "") -> Stage:
    nodes = [given("x")]
    for layer in range(layers):
        for line, (name, target) in enumerate((("a", "relu"), ("m", "item"), ("b", "add"), ("c", "linear")), start=1):
            if name == removed:
                continue
            taken = [ref(nodes[-1].name)] if name != "m" else [ref("x")]
            nodes.append(call(f"{name}{layer}", target, *taken, line=line, module=f"layers.{layer}"))
    return stage(*nodes, result(nodes[-1].name))


def test_twenty_thousand_nodes():
    """It takes some 2 s on one core, and what is quadratic never ends."""
    before, after = large(5000), large(5000, removed="a")
    found = diff(before, after)
    sections = collapse(found, before, after)
    assert len(found.of(Kind.REMOVED)) == 5000
    assert sections[0].title == "layers 0–4999: the same changes ×5000"


def test_twins_are_no_quadratic_trap():
    nodes = [given("x"), *(call(f"n{i}", "full", 0) for i in range(20_000)), result("x")]
    assert not diff(stage(*nodes), stage(nodes[0], *nodes[-2:0:-1], nodes[-1]))
