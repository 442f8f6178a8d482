"""Value numbering with memory versions.

Two nodes compute the same value if they apply the same operator to the same operands *in the same state of memory*.
A table gives each distinct value a number. A tensor's memory has a version, which is the number of the last write to
it; a write is numbered by its operands and by the previous version. So two masks that are built in place by the same
steps end at the same version, although in different memory, and different masks do not.

    a = torch.full((4, 4), 0)     number 1            memory A at version 1
    b = torch.full((4, 4), 0)     number 1            memory B at version 1
    a[2:] = 1                     number 2 (a write)  memory A at version 2
    b[2:] = 1                     number 2            memory B at version 2
    a.sum(); b.sum()              number 3, from (1 at version 2)

After Alpern, Wegman and Zadeck, "Detecting equality of variables in programs" (1988), with memory made explicit.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_aggregate

from fxpasses.graph import effects
from fxpasses.graph.calls import operator_of
from fxpasses.graph.effects import leaves
from fxpasses.graph.refusals import Refused
from fxpasses.graph.symbols import constant, integer_behind, symbol
from fxpasses.graph.traits import FACTORIES
from fxpasses.report import Reason


@dataclass(eq=False)
class Allocation:
    """One allocation. alloc: the number of its initial value. version: the number of the last write, or `alloc`."""

    alloc: int
    version: int
    node: Node


@dataclass(frozen=True)
class Scalar:
    number: int


@dataclass(frozen=True, eq=False)
class Tensor:
    """number: that of the view through which the tensor addresses its memory; `memory.alloc` for all of it."""

    number: int
    memory: Allocation


@dataclass(frozen=True, eq=False)
class Many:
    """A tuple, list or size."""

    number: int
    items: tuple[Any, ...]


Value = Scalar | Tensor | Many | None


def number_of(value: Value) -> int | None:
    return None if value is None else value.number


@dataclass(frozen=True)
class Ref:
    """An operand: the number of a value, and the version of the memory that holds it (None for scalars)."""

    number: int
    version: int | None = None


@dataclass(eq=False)
class Entry:
    """A row of the table.

    kind: "root" (an input), "op" (a node), "item" (one result of an op that returns several), "write", "look" (a tensor
    with the size in `args` and the dtype and device of `fake`, whose values nobody reads).
    args, kwargs: the node's, with `Ref` in place of nodes. base: for views, the number of the allocation. previous: for
    writes, the previous version; target: the number of the view written through. fake: the value on fake tensors. read:
    whether the host waits for the device (for a scalar, or for the size of a result). work: whether computing it takes
    more than factories, views and arithmetic on scalars. module: computes it from `args`, in place of the node.
    """

    number: int
    kind: str
    node: Node
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    operands: tuple[Ref, ...] = ()
    autocast: tuple[Any, ...] = ()
    fake: Any = None
    base: int | None = None
    previous: int | None = None
    target: int | None = None
    path: int | None = None
    read: bool = False
    work: bool = False
    occurrences: int = 0
    module: torch.nn.Module | None = None


class ValueTable:
    """Numbers for the values of closure nodes; entries only refer to entries with smaller numbers."""

    def __init__(self, fake_mode: Any) -> None:
        self.fake_mode = fake_mode
        self.entries: list[Entry] = []
        self._by_key: dict[Hashable, tuple[Entry | None, effects.Effects | None]] = {}
        self._views: dict[Hashable, Entry] = {}
        self._refused: dict[Hashable, Refused] = {}
        self.same: list[tuple[Any, Any]] = []

    def root(self, node: Node, fake: Any) -> Value:
        """Number an input of the main graph."""
        entry = self._add(Entry(len(self.entries), "root", node, fake=fake))
        if isinstance(fake, torch.Tensor):
            return Tensor(entry.number, Allocation(entry.number, entry.number, node))
        return Scalar(entry.number)

    def look(self, node: Node, example: torch.Tensor, sizes: Sequence[int | Scalar]) -> Tensor:
        """Number the size, dtype and device of a tensor, without its values."""
        refs = tuple(Ref(size.number) if isinstance(size, Scalar) else size for size in sizes)
        key = ("look", refs, example.dtype, example.device)
        if key not in self._views:
            with self.fake_mode, torch.no_grad():
                fake = torch.empty((), dtype=example.dtype, device=example.device).expand(example.shape)
            operands = tuple(ref for ref in refs if isinstance(ref, Ref))
            self._views[key] = self._add(Entry(0, "look", node, args=refs, operands=operands, fake=fake))
        number = self._views[key].number
        return Tensor(number, Allocation(number, number, node))

    def apply(self, node: Node, value_of: Callable[[Node], Value], autocast: tuple[Any, ...]) -> Value:
        """Number the result of `node`, whose operands all have numbers; raises `Refused`.

        Updates the versions of the memory that the node writes.
        """
        picked = self._pick(node, value_of)
        if picked is not _NO_PICK:
            return picked
        tensors: list[Tensor] = []
        args, kwargs = torch.fx.map_arg((node.args, dict(node.kwargs)), lambda n: _operand(value_of(n), tensors))
        # Two operands of equal value may be in one allocation or in two, which matters for views and writes.
        memories = list(dict.fromkeys(tensor.memory for tensor in tensors))
        places = tuple(memories.index(tensor.memory) for tensor in tensors)
        key = (node.op, node.target, _hashable((args, kwargs)), autocast, places)
        if key in self._refused:
            raise self._refused[key]
        if key not in self._by_key:
            try:
                self._by_key[key] = self._number(node, args, kwargs, tensors, autocast, key)
            except Refused as refused:
                self._refused[key] = refused
                raise
        entry, effect = self._by_key[key]
        if entry is None:  # the node returns its argument
            assert effect is not None
            return _returned(effect.output, [tensors[i or 0] for i in effect.aliases])
        entry.occurrences += 1
        self._note_same(entry, node)
        return self._result(entry, effect, node, tensors)

    def computed_by(self, module: torch.nn.Module, args: tuple[Any, ...], fake: torch.Tensor, node: Node) -> Ref:
        """Number the new tensor `fake`, which a module computes from `args` in place of `node`."""
        refs = tuple(arg for arg in args if isinstance(arg, Ref))
        entry = Entry(0, "op", node, args=args, operands=refs, fake=fake, work=True, occurrences=1, module=module)
        number = self._add(entry).number
        return Ref(number, number)

    def source_of(self, found: Any) -> tuple[int, int | None] | None:
        """The number of the value for which an unbacked symbol was created, and the dimension if it is a size."""
        for entry in self.entries:
            if not entry.read or entry.kind != "op":
                continue
            if symbol(entry.fake) == found:
                return entry.number, None
            if isinstance(entry.fake, torch.Tensor):
                for dimension, size in enumerate(entry.fake.shape):
                    if symbol(size) == found:
                        return entry.number, dimension
        return None

    def occurrences(self, entry: Entry) -> int:
        """The number of nodes that compute the value."""
        return self.entries[entry.operands[0].number].occurrences if entry.kind == "item" else entry.occurrences

    def _pick(self, node: Node, value_of: Callable[[Node], Value]) -> Any:
        """The value of `pair[1]`, which already has a number."""
        if operator_of(node) != "getitem" or len(node.args) != 2:
            return _NO_PICK
        source, index = node.args
        if not isinstance(source, Node) or not isinstance(index, int):
            return _NO_PICK
        value = value_of(source)
        return value.items[index] if isinstance(value, Many) else _NO_PICK

    def _number(
        self,
        node: Node,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: list[Tensor],
        autocast: tuple[Any, ...],
        key: Hashable,
    ) -> tuple[Entry | None, effects.Effects | None]:
        refs = tuple(leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, Ref))
        example = node.meta.get("example_value")
        read = bool(node.meta.get("unbacked_bindings"))
        entry = Entry(
            len(self.entries), "op", node, args=args, kwargs=kwargs, operands=refs, autocast=autocast, read=read
        )
        parts = [self.entries[ref.version if ref.version is not None else ref.number] for ref in refs]
        entry.work = any(part.work for part in parts)
        if read and not isinstance(example, torch.Tensor) and isinstance(example, _NUMBERS):
            effects.check_target(node)
            if isinstance(example, torch.SymBool) and constant(example) is None and integer_behind(example) is None:
                raise Refused(Reason.UNSUPPORTED_VALUE, f"a flag that is known as {example}")
            entry.fake = example
            entry.work = True
            return self._add(entry), None

        fakes = self._fakes(args, kwargs, tensors)
        effect = effects.as_in_program(node, *fakes) or effects.observe(node, *fakes, self.fake_mode, autocast)
        looks = any(self.entries[ref.number].kind == "look" for ref in refs)
        if effect.aliases == (None,) and effects.is_plain(example) and not looks:
            effect = replace(effect, output=example)
        if read:  # keep Dynamo's symbols for its sizes, with their ranges
            if isinstance(example, torch.Tensor) and looks:
                with self.fake_mode:
                    example = example.detach()  # its values are made up
            effect = effects.Effects(example, effect.aliases, effect.same, effect.writes)
        entry.fake = effect.output
        outputs = _tensor_leaves(effect.output)
        _check_kind(effect.output)
        if effect.writes:
            return self._number_write(entry, effect, tensors)
        if outputs and all(effect.same):
            return None, effect
        if any(effect.same):
            raise Refused(Reason.UNKNOWN_OPERATOR, "returns one of its arguments among other results")
        if any(output.requires_grad for output in outputs):
            raise Refused(Reason.UNSUPPORTED_VALUE, "requires a gradient")
        if not outputs or all(a is None for a in effect.aliases):
            entry.work = entry.work or read or (bool(outputs) and not self._is_factory(entry))
            entry = self._add(entry)
            self._add_items(entry, effect.output, views=False)
            return entry, effect
        if (
            any(a is None for a in effect.aliases)
            or len({tensors[a].memory for a in effect.aliases if a is not None}) > 1
        ):
            raise Refused(Reason.UNKNOWN_OPERATOR, "returns views of several tensors")
        return self._number_view(entry, effect, tensors, key)

    def _fakes(self, args: Any, kwargs: Any, tensors: list[Tensor]) -> tuple[Any, Any]:
        """The operands on fake tensors. Tensors of equal value in different memory have different fake tensors."""
        remaining = iter(tensors)
        owners: dict[int, Allocation] = {}

        def fake(leaf: Any) -> Any:
            if not isinstance(leaf, Ref):
                return leaf
            found = self.entries[leaf.number].fake
            if leaf.version is None or not isinstance(found, torch.Tensor):
                return found
            tensor = next(remaining)
            if owners.setdefault(tensor.memory.alloc, tensor.memory) is tensor.memory:
                return found
            with self.fake_mode:
                return torch.empty_strided(found.shape, found.stride(), dtype=found.dtype, device=found.device)

        mapped = map_aggregate((args, kwargs), fake)
        return mapped[0], mapped[1]

    def _is_factory(self, entry: Entry) -> bool:
        """Whether a result is made from numbers alone; `torch.full(size, tensor)` reads memory.

        A compiler fuses its kernel into its users; hoisting it would only hide its contents from the compiler.
        """
        tensors = (self.entries[ref.number] for ref in entry.operands if ref.version is not None)
        return operator_of(entry.node) in FACTORIES and all(operand.kind == "look" for operand in tensors)

    def _number_view(
        self, entry: Entry, effect: effects.Effects, tensors: list[Tensor], key: Any
    ) -> tuple[Entry, effects.Effects]:
        """Number a view: an address, which does not depend on the contents of the memory."""
        viewed = tensors[effect.aliases[0] or 0]
        unversioned = Ref(viewed.number)
        versioned = Ref(viewed.number, viewed.memory.version)

        def address(ref: Any) -> Any:
            return unversioned if ref == versioned else ref

        entry.args, entry.kwargs = map_aggregate((entry.args, entry.kwargs), address)
        view_key = (key[0], key[1], _hashable((entry.args, entry.kwargs)), key[3])
        if view_key in self._views:
            return self._views[view_key], effect
        entry.operands = tuple(address(ref) for ref in entry.operands)
        entry.base = viewed.memory.alloc
        entry.work = entry.read = False
        self._views[view_key] = self._add(entry)
        self._add_items(entry, effect.output, views=True)
        return entry, effect

    def _number_write(
        self, entry: Entry, effect: effects.Effects, tensors: list[Tensor]
    ) -> tuple[Entry, effects.Effects]:
        written = {tensors[i].memory for i in effect.writes}
        if len(written) > 1:
            raise Refused(Reason.UNKNOWN_OPERATOR, "writes several tensors at once")
        (memory,) = written
        if self.entries[memory.alloc].kind == "root":
            raise Refused(Reason.INPUT_WRITTEN, f"writes `{self.entries[memory.alloc].node.name}`")
        if any(a is None for a in effect.aliases) or any(
            tensors[a].memory is not memory for a in effect.aliases if a is not None
        ):
            raise Refused(Reason.UNKNOWN_OPERATOR, "writes memory and returns another tensor")
        if not all(effect.same):
            raise Refused(Reason.UNKNOWN_OPERATOR, "writes memory and returns a view of it")
        entry.kind = "write"
        entry.previous = memory.version
        entry.base = memory.alloc
        entry.target = tensors[effect.writes[0]].number
        entry.work = True
        return self._add(entry), effect

    def _result(self, entry: Entry, effect: effects.Effects | None, node: Node, tensors: list[Tensor]) -> Value:
        if effect is None:
            return Scalar(entry.number)
        aliased = [None if alias is None else tensors[alias] for alias in effect.aliases]
        if entry.kind == "write":
            tensors[effect.writes[0]].memory.version = entry.number
            return _returned(effect.output, aliased)

        remaining = iter(aliased)

        def value(number: int, fake: Any) -> Value:
            if not isinstance(fake, torch.Tensor):
                return Scalar(number)
            source = next(remaining)
            return Tensor(number, source.memory if source is not None else Allocation(number, number, node))

        if isinstance(effect.output, (tuple, list)):
            items = enumerate(effect.output, start=entry.number + 1)
            return Many(entry.number, tuple(value(number, fake) for number, fake in items))
        return value(entry.number, effect.output)

    def _add_items(self, entry: Entry, output: Any, views: bool) -> None:
        """Add rows for the items of a tuple, which follow the tuple's own row."""
        if not isinstance(output, (tuple, list)):
            return
        for position, fake in enumerate(output):
            item = Entry(0, "item", entry.node, operands=(Ref(entry.number),), fake=fake, path=position)
            item.base = entry.base if views and isinstance(fake, torch.Tensor) else None
            item.work = entry.work
            self._add(item)

    def _note_same(self, entry: Entry, node: Node) -> None:
        """Record that two occurrences of a value, which may have different symbols, are equal."""
        example = node.meta.get("example_value")
        if entry.node is not node and example is not None and entry.fake is not None:
            self.same.append((entry.fake, example))

    def _add(self, entry: Entry) -> Entry:
        entry.number = len(self.entries)
        self.entries.append(entry)
        return entry


_NO_PICK = object()
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


_NUMBERS = (bool, int, float, *_SYMBOLIC)


def _check_kind(output: Any) -> None:
    items = output if isinstance(output, (tuple, list)) else (output,)
    for item in items:
        if item is not None and not isinstance(item, (torch.Tensor, *_NUMBERS)):
            raise Refused(Reason.UNSUPPORTED_VALUE, f"returns a {type(item).__name__}")


def _tensor_leaves(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in leaves(value) if isinstance(leaf, torch.Tensor)]


def _operand(value: Value, tensors: list[Tensor]) -> Any:
    """The reference for an operand; its tensors are appended in the order in which `pytree` visits them."""
    if value is None:
        return None
    if isinstance(value, Scalar):
        return Ref(value.number)
    if isinstance(value, Tensor):
        tensors.append(value)
        return Ref(value.number, value.memory.version)
    leaves = [item for item in value.items if isinstance(item, Tensor)]
    if len(leaves) == 0:
        return Ref(value.number)
    raise Refused(Reason.UNSUPPORTED_VALUE, "takes a tuple of tensors as one argument")


def _returned(output: Any, aliased: list[Tensor | None]) -> Value:
    """The value of a node that returns one of its arguments, or None."""
    if output is None:
        return None
    if not isinstance(output, torch.Tensor):
        raise Refused(Reason.UNSUPPORTED_VALUE, "returns its arguments in a tuple")
    return aliased[0]


def _hashable(value: Any) -> Hashable:
    """A key for arguments that distinguishes 1, 1.0 and True, which are equal in Python."""
    if isinstance(value, Ref):
        return value
    if isinstance(value, float):
        return ("float", value.hex())
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, *(_hashable(item) for item in value))
    if isinstance(value, dict):
        return ("dict", *((name, _hashable(item)) for name, item in sorted(value.items())))
    if isinstance(value, slice):
        return ("slice", _hashable(value.start), _hashable(value.stop), _hashable(value.step))
    if value is None or isinstance(value, (bool, int, str, complex)) or value is Ellipsis:
        return (type(value).__name__, value)
    if isinstance(value, (torch.dtype, torch.device, torch.layout, torch.memory_format)):
        return value
    raise Refused(Reason.UNSUPPORTED_VALUE, f"has an argument of type {type(value).__name__}")
