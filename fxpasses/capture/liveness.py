"""Live variables at an instruction, by the textbook's backward dataflow analysis.

`torch._dynamo.bytecode_analysis.livevars_analysis` overapproximates: it ignores writes after the first jump, so that
all temporaries of a loop would be live at its head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_NO_FALLTHROUGH = frozenset({"RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE", "RETURN_GENERATOR"})
_ALWAYS_JUMPS = frozenset({"JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT", "JUMP_ABSOLUTE", "JUMP"})
_NOTHING = frozenset({"NOP", "EXTENDED_ARG", "CACHE", "NOT_TAKEN", "RESUME"})


def live_at(instructions: Sequence[Any], start: int) -> frozenset[str]:
    """The names of locals and cells that are live before `instructions[start]`. Takes Dynamo's `Instruction`s."""
    places = {instruction: place for place, instruction in enumerate(instructions)}
    successors = [_successors(instructions, places, place) for place in range(len(instructions))]
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


def _reads_and_writes(instruction: Any) -> tuple[frozenset[str], frozenset[str]]:
    """Anything but a plain store counts as a read."""
    name, value = instruction.opname, instruction.argval
    if not any(part in name for part in ("FAST", "DEREF", "CLOSURE", "CELL")):
        return frozenset(), frozenset()
    names = frozenset([value] if isinstance(value, str) else [v for v in value if isinstance(v, str)])
    if name in ("STORE_FAST", "STORE_DEREF"):
        return frozenset(), names
    if name in ("MAKE_CELL", "COPY_FREE_VARS"):
        return frozenset(), frozenset()
    return names, frozenset()
