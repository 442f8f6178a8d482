"""`outputs.append(expert(tokens))` if an expert has tokens: lists with one tensor for each such expert.

The trace appends for every expert. This makes no difference if the list is concatenated by one `torch.cat` (a tensor
without rows adds none) or tested for emptiness (some expert has tokens). So after the first such append, a list made in
the trace may only be used in these two ways and appended to. Any other use of its elements depends on how many experts
have tokens, and the trace is taken back. A pass must prove that an appended tensor has no rows if its expert has no
tokens.

Private names, checked on torch 2.11 and 2.13, besides the handlers' sites: the attribute `items` of a `ListVariable`,
through which Dynamo accesses the elements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._dynamo.variables.lists import ListVariable
from torch._dynamo.variables.tensor import TensorVariable

from fxpasses.dynamo.births import born
from fxpasses.dynamo.hints import BUILTIN, take
from fxpasses.dynamo.interceptions import CONDITIONAL_JUMP, NOT_HANDLED, Handlers, Proceed, method
from fxpasses.dynamo.substitutions import TORCH_FUNCTION
from fxpasses.dynamo.trace import Trace
from fxpasses.experts.branches import PART, mark
from fxpasses.experts.capture.speculation import Speculation

_JOINING = (torch.cat, torch.concat, torch.concatenate)
_JUMPS = ("POP_JUMP_IF_TRUE", "POP_JUMP_IF_FALSE", "POP_JUMP_FORWARD_IF_TRUE", "POP_JUMP_FORWARD_IF_FALSE")

handlers = Handlers(checked=("2.11.0", "2.13.0"))


class GrownList(ListVariable):
    """The class of such a list. Its elements are accessible only inside `opened`."""

    _nonvar_fields = {"refuse", "is_open", "is_asked", "is_joined", *ListVariable._nonvar_fields}
    refuse: Callable[[str], Exception]
    is_open: bool
    is_asked: bool
    is_joined: bool

    @property
    def items(self) -> list[Any]:
        if not self.is_open:
            raise self.refuse("the elements of a list that grows only for experts with tokens are read")
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

    def ask(self, speculation: Speculation) -> None:
        """Note that the list is tested for emptiness: it must not grow after that."""
        if speculation.open:
            raise self.refuse("a list that grows only for experts with tokens is tested for emptiness in a branch")
        self.is_asked = True


@handlers.at(
    method("torch._dynamo.variables.lists.ListVariable", "call_method"),
    without="`outputs.append(y)` for experts with tokens breaks the graph",
)
def append(trace: Trace, proceed: Proceed, self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
    """`outputs.append(y)`, in a branch that did not make the list."""
    branches = trace.state(Speculation).open
    if name != "append" or len(args) != 1 or kwargs or not isinstance(args[0], TensorVariable):
        return NOT_HANDLED
    if type(self) not in (ListVariable, GrownList) or not any(born(self) < branch.born for branch in branches):
        return NOT_HANDLED
    node = args[0].as_proxy().node
    if len(branches) > 1 or born(self) < 0 or node.graph is not branches[0].graph:
        return NOT_HANDLED
    with _grown(self, trace.state(Speculation)).opened(), trace.state(Speculation).allowing_changes():
        result = proceed(self, tx, name, args, kwargs)
    mark(node, branches[0].branch, PART)
    branches[0].branch.parts += 1
    return result


@handlers.at(method(TORCH_FUNCTION, "call_function"), order=2, without="`torch.cat(outputs)` breaks the graph")
def join(trace: Trace, proceed: Proceed, self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    if self.value not in _JOINING or not args or type(args[0]) is not GrownList:
        return NOT_HANDLED
    grown = args[0]
    if grown.is_joined:
        raise grown.refuse("a list that grows only for experts with tokens is concatenated twice")
    grown.is_joined = True
    if trace.state(Speculation).open:
        raise grown.refuse("a list that grows only for experts with tokens is concatenated in a branch")
    with grown.opened():
        return proceed(self, tx, args, kwargs)


@handlers.at(method(BUILTIN, "call_function"), order=2, without="`if len(outputs):` breaks the graph")
def length(trace: Trace, proceed: Proceed, self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    if self.fn is not len or len(args) != 1 or type(args[0]) is not GrownList or not _asks_whether_empty(tx):
        return NOT_HANDLED
    args[0].ask(trace.state(Speculation))
    with args[0].opened():
        return proceed(self, tx, args, kwargs)


@handlers.at(CONDITIONAL_JUMP, order=1, without="`if outputs:` breaks the graph")
def jump(trace: Trace, proceed: Proceed, tx: Any, inst: Any) -> Any:
    """Take `if outputs:` as true."""
    if type(tx.stack[-1]) is not GrownList or not inst.opname.startswith("POP_JUMP"):
        return NOT_HANDLED
    tx.stack[-1].ask(trace.state(Speculation))
    return take(tx, inst, True)


def _grown(variable: Any, speculation: Speculation) -> GrownList:
    """Turn a list of the trace into a `GrownList`."""
    if type(variable) is not GrownList:
        variable.__class__ = GrownList
        variable.refuse = speculation.refusal
        variable.is_open = variable.is_asked = variable.is_joined = False
    if variable.is_asked or variable.is_joined:
        raise variable.refuse("a list grows after it was concatenated or tested for emptiness")
    return variable


def _asks_whether_empty(tx: Any) -> bool:
    """Whether the program only compares the length on top of the stack with zero."""
    following = [i for i in tx.instructions[tx.instruction_pointer : tx.instruction_pointer + 4]]
    following = [i for i in following if i.opname not in ("TO_BOOL", "NOP", "CACHE")]
    if len(following) > 2 and following[0].opname == "LOAD_CONST" and following[1].opname == "COMPARE_OP":
        is_zero = type(following[0].argval) is int and following[0].argval == 0
        if not is_zero or str(following[1].argval) not in (">", "!=", "=="):
            return False
        following = following[2:]
    return bool(following) and following[0].opname in _JUMPS
