"""`outputs.append(expert(tokens))` where an expert has tokens: a list that has grown by as many tensors as experts do.

The trace appends for every expert. That is no difference where the list is joined by one `torch.cat` (no rows more or
less), and where it is asked whether it is empty: some expert has tokens. So from the first such append on, a list made
in the trace may do these two things, and be appended to; whoever looks at its elements otherwise learns how many
experts have tokens, and the trace is taken back. A pass has to prove of each appended tensor that it has no rows
without tokens.

Private names, checked on torch 2.11 and 2.13: `ListVariable.call_method`, and its attribute `items`, which is all
that Dynamo looks at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._dynamo.variables.lists import ListVariable

_JOINING = (torch.cat, torch.concat, torch.concatenate)
_JUMPS = ("POP_JUMP_IF_TRUE", "POP_JUMP_IF_FALSE", "POP_JUMP_FORWARD_IF_TRUE", "POP_JUMP_FORWARD_IF_FALSE")


class GrownList(ListVariable):
    """Stands in for the class of such a list. Its elements can be seen inside of `opened` alone."""

    _nonvar_fields = {"refuse", "is_open", "is_asked", "is_joined", *ListVariable._nonvar_fields}
    refuse: Callable[[str], Exception]
    is_open: bool
    is_asked: bool
    is_joined: bool

    @property
    def items(self) -> list[Any]:
        if not self.is_open:
            raise self.refuse("a list that grows where experts have tokens is looked at")
        return self.__dict__["items"]

    @items.setter
    def items(self, items: list[Any]) -> None:
        self.__dict__["items"] = items

    @contextmanager
    def opened(self) -> Iterator[None]:
        self.is_open = True
        try:
            yield
        finally:
            self.is_open = False


def grow(variable: Any, refuse: Callable[[str], Exception]) -> GrownList:
    """Turn a list of the trace into one that has grown. refuse: makes what to raise."""
    if type(variable) is not GrownList:
        variable.__class__ = GrownList
        variable.refuse = refuse
        variable.is_open = variable.is_asked = variable.is_joined = False
    if variable.is_asked or variable.is_joined:
        raise refuse("a list grows after somebody looked at it")
    return variable


def may_grow(variable: Any) -> bool:
    return type(variable) in (ListVariable, GrownList)


def joined(function: Any, args: Any) -> GrownList | None:
    """The list of `torch.cat(outputs)`, where it has grown."""
    if function not in _JOINING or not args or type(args[0]) is not GrownList:
        return None
    found: GrownList = args[0]
    if found.is_joined:
        raise found.refuse("a list that grows where experts have tokens is joined twice")
    found.is_joined = True
    return found


def asks_whether_empty(tx: Any) -> bool:
    """Whether a length on top of the stack will be asked for nothing but whether it is zero."""
    following = [i for i in tx.instructions[tx.instruction_pointer : tx.instruction_pointer + 4]]
    following = [i for i in following if i.opname not in ("TO_BOOL", "NOP", "CACHE")]
    if len(following) > 2 and following[0].opname == "LOAD_CONST" and following[1].opname == "COMPARE_OP":
        is_zero = type(following[0].argval) is int and following[0].argval == 0
        if not is_zero or str(following[1].argval) not in (">", "!=", "=="):
            return False
        following = following[2:]
    return bool(following) and following[0].opname in _JUMPS
