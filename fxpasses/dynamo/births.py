"""When Dynamo's variables were created, and the methods through which a traced program changes objects.

A change of an object is invisible to what is older than it: a list that a branch, a loop's body or a layer has made may
grow there. Features that watch for changes compare the time at which the changed object was made with their own.

Private names, checked on torch 2.11, 2.13 and 2.15: those of the sites; `SideEffects.id_to_variable`, and the
attributes of variables in `_INSIDE`.
"""

from __future__ import annotations

import itertools
from typing import Any

from fxpasses.dynamo.interceptions import Place, Site, method, resolve, with_subclasses

_EFFECTS = "torch._dynamo.side_effects.SideEffects"
_MARKS = "torch._dynamo.variables.base.ValueMutationNew", "torch._dynamo.variables.base.AttributeMutationNew"
_ITERATORS = (
    "torch._dynamo.variables.iter.IteratorVariable",
    "torch._dynamo.variables.functions.LocalGeneratorObjectVariable",
)
# The methods that take elements from an iterator, in various versions of torch.
_TAKING = ("next_variable", "tp_iternext_impl", "unpack_var_sequence", "force_unpack_var_sequence",
           "force_apply_to_var_sequence", "gen_send_ex2", "call_method")  # fmt: skip
_clock = itertools.count()


def _taking(kind: str) -> Site:
    def places() -> list[Place]:
        iterators = with_subclasses(resolve(kind))
        return [(found, name) for found in iterators for name in _TAKING if name in vars(found)] or [(kind, "next")]

    return Site(f"{kind}.next and the like", places)


# Called for a change of an object, their first argument; stores to cells are stores to attributes.
CHANGES = tuple(method(_EFFECTS, name) for name in ("mutation", "store_attr", "store_global"))
# Called for a read of an attribute, a cell or a global that the program has stored.
READS_STORED = method(_EFFECTS, "load_attr")
# Methods of iterators, which advance.
TAKES = tuple(map(_taking, _ITERATORS))
# Make iterators, and Dynamo's marks on new objects.
BIRTHS = tuple(method(kind, "__init__") for kind in (*_MARKS, *_ITERATORS))


def stamp(variable: Any, time: int | None = None) -> None:
    """Record the time at which one of Dynamo's variables was created, by default now. Clones copy the attribute."""
    variable.fxpasses_born = next(_clock) if time is None else time


def now() -> int:
    """A time after that of all variables so far."""
    return next(_clock)


def born(variable: Any) -> int:
    """The time at which one of Dynamo's variables was created, -1 if unknown or before the trace."""
    mark = getattr(variable, "mutation_type", None)
    return getattr(variable, "fxpasses_born", getattr(mark, "fxpasses_born", -1))


class Owners:
    """The program's objects that Dynamo's variables stand for, while a frame is traced.

    A variable of an object of a class that extends `dict`, `list` or the like has another one inside for its items,
    which is made when the object is first read, and which changes with it.
    """

    def __init__(self) -> None:
        self._seen = 0
        self._found: dict[int, tuple[int, Any]] = {}  # by the identity of a variable

    def of(self, effects: Any, variable: Any) -> tuple[int | None, Any]:
        """The identity of a variable's object, None if it is not known, and the variable of the object."""
        known = effects.id_to_variable
        if len(known) < self._seen:
            self._seen, self._found = 0, {}
        for identity, owner in itertools.islice(known.items(), self._seen, None):
            inside = [found for name in _INSIDE if (found := vars(owner).get(name)) is not None]
            self._found.update({id(each): (identity, owner) for each in (owner, *inside)})
        self._seen = len(known)
        return self._found.get(id(variable), (None, variable))


_INSIDE = ("_base_vt", "_dict_vt", "_list_vt", "_set_vt", "_tuple_vt")  # the names of inner variables
