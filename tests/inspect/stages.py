"""Stages made by hand, for tests of what works on the data model alone."""

from __future__ import annotations

import random
from typing import Any

from fxpasses.inspect.model import CAPTURED, MAIN, Node, Region, Source, Stage, TensorValue, bodies_of, inputs_of


def ref(name: str) -> dict[str, str]:
    return {"node": name}


def tensor(*shape: int | str, dtype: str = "float32", storage: int | None = None, requires_grad: bool = False) -> Any:
    known = all(isinstance(size, int) for size in shape)
    count = 4
    for size in shape:
        count *= size if isinstance(size, int) else 1
    return TensorValue(list(shape), [], dtype, "cpu", count if known else None, storage, requires_grad)


def call(name: str, target: str, *args: Any, line: int = 0, module: str = "", **fields: Any) -> Node:
    source = Source("model.py", line) if line else None
    return Node(name, "call_function", target, list(args), module=module, source=source, **fields)


def given(name: str, **fields: Any) -> Node:
    return Node(name, "placeholder", name, source_name=f"L['{name}']", **fields)


def result(*names: str) -> Node:
    return Node("output", "output", "output", [[ref(name) for name in names]])


def stage(*nodes: Node, bodies: dict[str, tuple[str, list[Node]]] | None = None, name: str = CAPTURED) -> Stage:
    """A stage of the main graph's nodes; `bodies` is path to (the call, the nodes)."""
    regions = [Region(MAIN, list(nodes))]
    regions += [Region(path, inner, by) for path, (by, inner) in (bodies or {}).items()]
    return Stage(name, regions)


def renamed_and_reordered(original: Stage, seed: int) -> Stage:
    """The same graph: every node and body under another name, every region in another topological order.

    Inputs keep their order, which is the calling convention of a graph.
    """
    chance = random.Random(seed)
    paths = {MAIN: MAIN}
    for region in original.regions or []:
        paths.setdefault(region.path, f"{paths[region.parent]}/body_{chance.randrange(10**9)}" if region.call else MAIN)
    names: dict[tuple[str, str], str] = {}
    for region in original.regions or []:
        numbers = chance.sample(range(10 * len(region.nodes)), len(region.nodes))
        for node, number in zip(region.nodes, numbers, strict=True):
            names[region.path, node.name] = f"v{number}"

    def renamed(value: Any, path: str) -> Any:
        if isinstance(value, list):
            return [renamed(item, path) for item in value]
        if isinstance(value, dict) and "node" in value:
            return {"node": names[path, value["node"]]}
        if isinstance(value, dict) and "body" in value:
            return {"body": paths[value["body"]]}
        return value

    regions = []
    for region in original.regions or []:
        nodes = [
            Node(
                names[region.path, n.name], n.op, n.target,
                renamed(n.args, region.path), renamed(n.kwargs, region.path),
                n.values, n.scalar, n.binds, n.module, n.module_class, n.source, n.source_name,
            )
            for n in _shuffled(region.nodes, chance)
        ]  # fmt: skip
        call_name = names[region.parent, region.call] if region.call else ""
        regions.append(Region(paths[region.path], nodes, call_name))
    chance.shuffle(regions)
    regions.sort(key=lambda region: region.path != MAIN)
    return Stage(original.name, regions)


def _shuffled(nodes: list[Node], chance: random.Random) -> list[Node]:
    fixed = [node for node in nodes if node.op == "placeholder"]
    done = {node.name for node in fixed}
    rest = [node for node in nodes if node.op not in ("placeholder", "output")]
    ordered = list(fixed)
    while rest:
        ready = [node for node in rest if done.issuperset(inputs_of(node))]
        node = chance.choice(ready)
        rest.remove(node)
        done.add(node.name)
        ordered.append(node)
    return ordered + [node for node in nodes if node.op == "output"]


def random_stage(chance: random.Random, size: int = 12, bodies: int = 2) -> Stage:
    """A graph with twins (equal nodes), shared values, unused nodes and bodies; some nodes have provenance."""
    regions: list[Region] = []
    main = Region(MAIN, [given(f"x{i}") for i in range(chance.randint(1, 3))])
    regions.append(main)
    _grow(main.nodes, chance, size)
    for number in range(chance.randint(0, bodies)):
        operands = [chance.choice(main.nodes).name for _ in range(chance.randint(1, 3))]
        body = Region(f"{MAIN}/body_{number}", [], f"run_{number}")
        body.nodes = [Node(f"p{i}", "placeholder", f"p{i}") for i in range(len(operands))]
        _grow(body.nodes, chance, size // 2)
        body.nodes.append(result(chance.choice(body.nodes).name))
        main.nodes.append(call(body.call, "checkpoint", {"body": body.path}, *map(ref, operands)))
        main.nodes.append(call(f"get_{number}", "getitem", ref(body.call), 0))
        regions.append(body)
    _grow(main.nodes, chance, size // 2)
    main.nodes.append(result(*(chance.choice(main.nodes).name for _ in range(2))))
    return Stage(CAPTURED, regions)


def _grow(nodes: list[Node], chance: random.Random, count: int) -> None:
    usable = [node.name for node in nodes if not bodies_of(node)]
    for _ in range(count):
        name = f"n{len(nodes)}"
        target = chance.choice(["relu", "neg", "add", "add", "full"])
        arity = {"add": 2, "full": 0}.get(target, 1)
        args: list[Any] = [ref(chance.choice(usable)) for _ in range(arity)]
        if target == "full":
            args = [chance.randint(0, 1)]
        place: dict[str, Any] = {"line": chance.randint(1, 3)} if chance.random() < 0.5 else {}
        nodes.append(call(name, target, *args, **place))
        usable.append(name)
