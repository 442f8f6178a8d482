"""Live variables at an instruction, by the textbook backward dataflow analysis.

`torch._dynamo.bytecode_analysis.livevars_analysis` overapproximates: it ignores writes after the first jump, so all
temporaries of a loop would be live at its head.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

_NO_FALLTHROUGH = frozenset({"RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE", "RETURN_GENERATOR"})
_ALWAYS_JUMPS = frozenset({"JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT", "JUMP_ABSOLUTE", "JUMP"})
_NOTHING = frozenset({"NOP", "EXTENDED_ARG", "CACHE", "NOT_TAKEN", "RESUME"})
_BETWEEN = _NOTHING | {"PRECALL", "PUSH_NULL"}  # the instructions of a call
_LET_PASS: tuple[Any, ...] = (torch.no_grad, torch.enable_grad)  # contexts that let every exception pass


def live_at(instructions: Sequence[Any], start: int, namespace: Mapping[str, Any] | None = None) -> frozenset[str]:
    """The names of locals and cells that are live before `instructions[start]`. Takes Dynamo's `Instruction`s.

    namespace: the globals, if known. They identify `with torch.no_grad():`, where an exception in the block never
    reaches the code after it, so that code may read names that the block writes.
    """
    places = {instruction: place for place, instruction in enumerate(instructions)}
    successors = [_successors(instructions, places, place) for place in range(len(instructions))]
    for place in _suppressions(instructions, places, namespace or {}):
        successors[place] = [place + 1]
    live: list[frozenset[str]] = [frozenset()] * len(instructions)
    changed = True
    while changed:
        changed = False
        for place in range(len(instructions) - 1, -1, -1):
            after = frozenset().union(*(live[s] for s in successors[place]))
            reads, writes = _reads_and_writes(instructions[place])
            now = (after - writes) | reads
            entry = getattr(instructions[place], "exn_tab_entry", None)
            if entry is not None:
                now |= live[places[entry.target]]  # the handler may run before the write
            if now != live[place]:
                live[place], changed = now, True
    return live[start]


def follow(instructions: Sequence[Any], place: int) -> int:
    """The first instruction from `place` on that has an effect: past unconditional jumps and no-ops."""
    places: dict[Any, int] = {}
    seen: set[int] = set()
    while place not in seen:
        seen.add(place)
        instruction = instructions[place]
        if instruction.opname in _ALWAYS_JUMPS:
            places = places or {other: position for position, other in enumerate(instructions)}
            place = places[instruction.target]
        elif instruction.opname in _NOTHING:
            place += 1
        else:
            break
    return place


def _successors(instructions: Sequence[Any], places: dict[Any, int], place: int) -> list[int]:
    instruction = instructions[place]
    found = []
    if instruction.target is not None:
        found.append(places[instruction.target])
    if instruction.opname not in _NO_FALLTHROUGH | _ALWAYS_JUMPS and place + 1 < len(instructions):
        found.append(place + 1)
    return found


def _suppressions(instructions: Sequence[Any], places: dict[Any, int], namespace: Mapping[str, Any]) -> Iterator[int]:
    """The jumps that are taken if `__exit__` suppresses an exception, in contexts that never suppress one."""
    for place, instruction in enumerate(instructions):
        if instruction.opname not in ("BEFORE_WITH", "SETUP_WITH") or _entered(instructions, place, namespace) is None:
            continue
        handler = instruction.target if instruction.opname == "SETUP_WITH" else _handler(instructions[place + 1])
        if handler is _handler(instruction):
            continue  # the handler of another block
        names = [following.opname for following in instructions[places[handler] :][:6]] if handler is not None else []
        if "WITH_EXCEPT_START" in names:
            for at in range(names.index("WITH_EXCEPT_START") + 1, len(names)):
                if names[at].startswith("POP_JUMP") and "IF_TRUE" in names[at]:
                    yield places[handler] + at
                if names[at] not in _NOTHING | {"TO_BOOL"}:
                    break


def _handler(instruction: Any) -> Any:
    entry = getattr(instruction, "exn_tab_entry", None)
    return entry.target if entry is not None else None


def _entered(instructions: Sequence[Any], place: int, namespace: Mapping[str, Any]) -> Any:
    """The callable that `with` at a place calls by a global name, without arguments; None if not in `_LET_PASS`."""
    before = [found for found in instructions[max(place - 12, 0) : place] if found.opname not in _BETWEEN]
    call, attribute = (before[-1], before[-2]) if len(before) > 1 else (None, None)
    if call is None or attribute is None or call.opname not in ("CALL", "CALL_FUNCTION", "CALL_METHOD") or call.arg:
        return None
    if attribute.opname in ("LOAD_ATTR", "LOAD_METHOD") and len(before) > 2:
        owner = namespace.get(before[-3].argval) if before[-3].opname == "LOAD_GLOBAL" else None
        found = getattr(torch, attribute.argval, None) if owner is torch else None
    else:
        found = namespace.get(attribute.argval) if attribute.opname == "LOAD_GLOBAL" else None
    return found if any(found is known for known in _LET_PASS) else None


def _reads_and_writes(instruction: Any) -> tuple[frozenset[str], frozenset[str]]:
    """The names that an instruction reads, and writes. Anything but a plain store counts as a read."""
    name, value = instruction.opname, instruction.argval
    if not any(part in name for part in ("FAST", "DEREF", "CLOSURE", "CELL")):
        return frozenset(), frozenset()
    names = frozenset([value] if isinstance(value, str) else [v for v in value if isinstance(v, str)])
    if name in ("STORE_FAST", "STORE_DEREF"):
        return frozenset(), names
    if name in ("MAKE_CELL", "COPY_FREE_VARS"):
        return frozenset(), frozenset()
    return names, frozenset()
