"""The lists of a program that cuts its batch into parts, as Dynamo's variables.

    sizes = lengths.tolist()             Sizes
    grids = grid.tolist()                Rows, some numbers for each part
    parts = x.split(sizes)               Parts
    results = [f(p) for p in parts]      Results, one for each part

How many there are is a size of the batch, so Dynamo's own lists, which have their elements, would make a graph for each
number. These have none. `Sizes` and `Parts` read them when Dynamo first asks for an element, and are Dynamo's own from
then on. `Results` cannot: the frame is traced again, with the loop unrolled.

Private names, checked on torch 2.11, 2.13 and 2.15, besides the handlers' sites: the attribute `items` of Dynamo's
lists, through which it accesses the elements, and `_nonvar_fields`, the attributes that are no variables.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch._dynamo.variables.base import AsPythonConstantNotImplementedError, ValueMutationNew, VariableTracker
from torch._dynamo.variables.lists import ListVariable, TupleVariable

from fxpasses.dynamo.attempt import Place
from fxpasses.graph.symbols import expression


@dataclass(frozen=True, eq=False)
class Lengths:
    """The sizes of the parts of a batch.

    tensor: Dynamo's variable, of integers [n]. key: equal for two tensors of the same values. place: where the program
    makes a list of them. is_own: whether a loop has made the tensor, so that the program does not write to it.
    """

    tensor: Any
    key: Any
    place: Place
    is_own: bool = False

    @property
    def count(self) -> Any:
        """How many parts there are, as an expression."""
        return expression(self.tensor.as_proxy().node.meta["example_value"].shape[0])


class _OfBatch:
    """A list whose length is a size of the batch."""

    def as_python_constant(self) -> Any:  # Dynamo asks this of all lists in a closure
        raise AsPythonConstantNotImplementedError(cast(VariableTracker, self), "its elements depend on the batch")

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class _Unread(_OfBatch):
    """A list that reads its elements when Dynamo asks for them."""

    _fields = frozenset({"lengths", "tensor", "dim", "gradients", "taken", "columns", "read", "plain"})
    read: Callable[[], list[Any]]
    plain: type
    lengths: Lengths

    @property
    def items(self) -> list[Any]:
        self.items = self.read()
        return self.items

    @items.setter
    def items(self, items: list[Any]) -> None:
        fields, self.__class__ = self._fields, self.plain
        for name in fields & self.__dict__.keys():
            del self.__dict__[name]
        self.items = items

    def clone(self, **kwargs: Any) -> Any:
        assert self.items is not None  # reads them
        return self.clone(**kwargs)


class Sizes(_Unread, ListVariable):
    """`lengths.tolist()`."""

    _nonvar_fields = {*_Unread._fields, *ListVariable._nonvar_fields}


class Rows(_Unread, ListVariable):
    """`grid.tolist()` of integers [n, columns]."""

    _nonvar_fields = {*_Unread._fields, *ListVariable._nonvar_fields}
    columns: int


@dataclass(frozen=True, eq=False)
class Elements:
    """A tensor [n, ...] over which a program loops. tensor: Dynamo's variable."""

    lengths: Lengths
    tensor: Any


@dataclass(frozen=True, eq=False)
class Indices:
    """The numbers of the parts, from `enumerate`. tensor: Dynamo's variable, int64 [n]. start: the first one."""

    lengths: Lengths
    tensor: Any
    start: int


class Parts(_Unread, TupleVariable):
    """`tensor.split(lengths.tolist(), dim)`. tensor: Dynamo's variable. gradients: whether they were enabled.

    taken: variables of the parts that the program has read by constant numbers.
    """

    _nonvar_fields = {*_Unread._fields, *TupleVariable._nonvar_fields}
    tensor: Any
    dim: int
    gradients: bool
    taken: dict[int, Any]


class Watched(ListVariable):
    """A list that was empty when a loop began, to which its body may append. is_read: whether anything has read it."""

    _nonvar_fields = {"is_read", *ListVariable._nonvar_fields}
    is_read: bool

    @property
    def items(self) -> list[Any]:
        self.is_read = True
        found: list[Any] = self.__dict__["items"]
        return found

    @items.setter
    def items(self, items: list[Any]) -> None:
        self.is_read = True
        self.__dict__["items"] = items


class Results(_OfBatch, ListVariable):
    """A list to which a loop over parts appends one value for each.

    item: what that is, for all parts (`items.py`); None while the body is traced. refuse: raises, and has the frame
    traced again with the loop unrolled.
    """

    _nonvar_fields = {"lengths", "item", "refuse", *ListVariable._nonvar_fields}
    lengths: Lengths
    item: Any
    refuse: Callable[[str], Any]

    @property
    def items(self) -> list[Any]:
        return self.refuse("an element of what a loop over parts has made is read")

    @items.setter
    def items(self, items: list[Any]) -> None:
        self.refuse("a list that a loop over parts has made is changed")


def new_list(items: list[Any]) -> ListVariable:
    """A list of Dynamo's own."""
    return ListVariable(items, mutation_type=ValueMutationNew())


KINDS = (Sizes, Rows, Parts, Elements, Indices, Results)


def sizes(lengths: Lengths, read: Callable[[], list[Any]]) -> Sizes:
    """read: the elements, as Dynamo makes them."""
    return _unread(ListVariable([], mutation_type=ValueMutationNew()), Sizes, lengths=lengths, read=read)


def rows(lengths: Lengths, read: Callable[[], list[Any]], columns: int) -> Rows:
    plain = ListVariable([], mutation_type=ValueMutationNew())
    return _unread(plain, Rows, lengths=lengths, read=read, columns=columns)


def parts(lengths: Lengths, read: Callable[[], list[Any]], tensor: Any, dim: int) -> Parts:
    fields = {"tensor": tensor, "dim": dim, "gradients": torch.is_grad_enabled(), "taken": {}}
    return _unread(TupleVariable([]), Parts, lengths=lengths, read=read, **fields)


def _unread(variable: Any, kind: type, **fields: Any) -> Any:
    del variable.__dict__["items"]
    variable.plain, variable.__class__ = type(variable), kind
    variable.__dict__.update(fields)
    return variable


def watch(variable: Any) -> None:
    """Turn one of Dynamo's empty lists into `Watched`."""
    variable.is_read, variable.__class__ = False, Watched


def unwatch(variable: Any) -> None:
    """Make a list Dynamo's own again, unless it has become `Results`."""
    if type(variable) is Watched:
        del variable.is_read
        variable.__class__ = ListVariable  # type: ignore[assignment]


def expect_results(variable: Any, lengths: Lengths, refuse: Callable[[str], Any]) -> None:
    """Turn a watched list into `Results`."""
    del variable.__dict__["items"], variable.is_read
    variable.__class__ = Results
    variable.lengths, variable.item, variable.refuse = lengths, None, refuse
