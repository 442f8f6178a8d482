"""What a forward and a backward graph need in memory, predicted from when the tensors of their nodes live.

    a = x @ w          16 bytes, lives until b is made        a  |--|
    b = relu(a)        16 bytes, saved for backward           b     |------------->
    y = b @ v          16 bytes, returned                     y        |---------->

A compiler that fuses does not make a tensor that is computed element by element and only read by operators that it
fuses with; such a tensor's operands live on until its readers have run. And a result of a fused operator takes the
place of an operand of the same size that only this operator reads. Operators that read one tensor become one kernel if
nothing that some need comes of what others make: all of their results are there at once.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import torch
import torch.utils._pytree as pytree
from torch.fx import Graph, Node

from fxpasses.graph.aliases import AliasSets, storages_of
from fxpasses.graph.calls import operator_of
from fxpasses.graph.symbols import bytes_of, in_batch
from fxpasses.memory.limits import rounded
from fxpasses.memory.workspace import PRODUCTS, masks_of, reserved_of, workspace_of
from fxpasses.memory.wrapper_code import WrapperCode
from fxpasses.offload.saved import Partition

# Reductions, and other operators that read their operands in the loop that makes their result.
_FUSED = frozenset(
    {"_to_copy", "amax", "amin", "any", "argmax", "argmin", "cat", "constant_pad_nd", "convert_element_type", "copy_",
     "gather", "max", "mean", "min", "prod", "slice_scatter", "select_scatter", "sum", "var", "var_mean"}
)  # fmt: skip
_COMPUTED = frozenset({"_to_copy", "arange", "convert_element_type", "full", "full_like", "iota", "new_full",
                       "new_zeros", "ones_like", "scalar_tensor", "zeros", "zeros_like"})  # fmt: skip


NONE: Mapping[int, int] = MappingProxyType({})
Shared = tuple[frozenset[int], frozenset[int], int]
Positions = tuple[Mapping[str, int | None], Sequence[int | None]]


@dataclass(frozen=True)
class Footprint:
    """Bytes that a piece of a step needs besides its operands.

    kept: of what forward leaves for backward, but for operands and results. forward: the peak while forward runs, its
    results included. results: of each result; 0 for views of others. views: results that are views of operands, by
    position. saved_operands, saved_results: positions of those that backward needs. gradients: of the operands that get
    one, by position. saved: bytes of all that backward needs of what autograd computes. unknown: the number of tensors
    whose size only the batch determines, which count nothing. masks: of those that attention keeps for the batch.
    reserved: of plans among the operands, what takes no memory, by position. early: of moved tensors that are read
    before backward runs. backward: see `backward_beside`. as_compiled: the footprint with what the code of forward and
    of backward allocates, where it is known; None if values move.
    """

    kept: int = 0
    forward: int = 0
    results: tuple[int, ...] = ()
    views: Mapping[int, int] = field(default_factory=dict)
    saved_operands: frozenset[int] = frozenset()
    saved_results: frozenset[int] = frozenset()
    gradients: Mapping[int, int] = field(default_factory=dict)
    saved: int = 0
    unknown: int = 0
    masks: int = 0
    reserved: Mapping[int, int] = field(default_factory=dict)
    early: int = 0
    backward: Callable[[Shared], int] = lambda shared: 0
    as_compiled: Callable[[WrapperCode | None, WrapperCode | None], Footprint] | None = None

    def backward_beside(self, operands: frozenset[int], results: frozenset[int], onward: int = 0) -> int:
        """The peak while backward runs: what was kept, the gradients that it gets, and all that it makes, besides these
        operands and results, which others need as well and count. onward: bytes of what moved of another call, which
        are read before it runs."""
        return self.backward((operands & self.saved_operands, results & self.saved_results, onward))


def footprint_of(
    partition: Partition,
    fused: bool,
    moved: Collection[str] = (),
    positions: Positions | None = None,
    ahead: int = 0,
    onward: bool = False,
) -> Footprint:
    """The footprint of a partitioned graph at the sizes of the batch that it is compiled for.

    fused: whether a compiler will fuse operators; else each node makes its tensors. moved: saved tensors that wait for
    backward elsewhere, by name. positions: for each input of forward, which operand it is, and for each output, which
    result; None for neither. By default they are in order. ahead: how many copies go on while the graphs compute.
    onward: whether that many tensors are read before backward begins, and for another call at its end.
    """
    forward = _Lives(partition.forward.graph, fused, moved)
    backward = _Lives(partition.backward.graph, fused)
    inputs = forward.graph.find_nodes(op="placeholder")
    operands, order = positions or ({node.name: at for at, node in enumerate(inputs)}, range(partition.outputs))
    places = {node: operands.get(node.name) for node in inputs}
    at = {number: place for node, place in places.items() if place is not None for number in forward.memory.of(node)}
    given = forward.on(inputs)
    leaving = forward.leave(forward.on([node for node in partition.saved() if node.name in moved]), given, ahead)
    results: dict[int, int] = {}  # by memory: the first result there
    views: dict[int, int] = {}
    sizes: dict[int, int] = {}
    for place, node in zip(order, partition.returned, strict=False):
        if place is not None and isinstance(node, Node):
            own = forward.memory.of(node)
            for number in own & at.keys():
                views[place] = at[number]
            sizes[place] = sum(forward.bytes[number] for number in own - given if number not in results)
            results |= {number: place for number in own - given if number not in results}
    named = {node.name: node for node in partition.saved()}
    staying = [node for node in named.values() if node.name not in moved]
    saved = forward.on(staying)
    arguments = backward.graph.find_nodes(op="placeholder")
    names = named.keys() | {node.name for node in inputs}
    held = backward.on([node for node in arguments if node.name not in names])  # gradients, which the caller has
    back = [node for node in arguments if node.name in moved]
    last = set(leaving[max(0, len(leaving) - ahead) :]) if onward else set()
    early = backward.on([node for node in back if last.intersection(forward.memory.of(named[node.name]))])
    returning, onward_from = backward.read(backward.on(back), ahead, early)

    memory = {node.name: backward.memory.of(node) for node in arguments}  # a compiler may change the graph later

    def beside(shared: Shared, code: WrapperCode | None = None) -> int:
        others = {n for n in given if at.get(n) is None or at[n] in shared[0]}
        others |= {number for number, place in results.items() if place in shared[1]}
        theirs = {n for name, own in memory.items() if forward_named.get(name, none) & others for n in own}
        theirs -= returning.keys()
        if code is not None:
            return backward.peak_of(code, theirs, held)
        callers = given | results.keys()
        kept = {n for name, own in memory.items() if forward_named.get(name, none) & callers for n in own}
        return backward.peak(theirs, returning, held, kept, (shared[2], onward_from))

    def as_compiled(of_forward: WrapperCode | None, of_backward: WrapperCode | None) -> Footprint:
        peak = found.forward if of_forward is None else forward.peak_of(of_forward, given)
        return replace(found, forward=peak, backward=functools.lru_cache(functools.partial(beside, code=of_backward)))

    none: frozenset[int] = frozenset()
    forward_named = {node.name: forward.memory.of(node) for node in staying}
    outcomes = list(backward.graph.output_node().args[0])  # type: ignore[arg-type]
    found = Footprint(
        kept=sum(forward.bytes[number] for number in saved - given - results.keys()),
        forward=forward.peak(given),
        results=tuple(sizes.get(place, 0) for place in range(max(sizes, default=-1) + 1)),
        views=views,
        saved_operands=frozenset(at[number] for number in saved & given if number in at),
        saved_results=frozenset(results[number] for number in saved & results.keys()),
        gradients={
            place: sum(backward.bytes[number] for number in backward.memory.of(outcome))
            for outcome, place in zip(outcomes, places.values(), strict=False)
            if isinstance(outcome, Node) and place is not None
        },
        saved=sum(forward.bytes[n] for n in saved - forward.on([i for i in inputs if i.name not in partition.inputs])),
        unknown=forward.unknown + backward.unknown,
        masks=masks_of(forward.graph.nodes),
        reserved={
            place: size
            for node, size in reserved_of(forward.graph.nodes).items()
            if (place := places.get(node)) is not None
        },
        early=sum(backward.bytes[number] for number in early),
        backward=functools.lru_cache(beside),
    )
    return found if moved else replace(found, as_compiled=as_compiled)


@dataclass
class _Kernel:
    """Fused operators. begin: the position at which it runs; first: that of the first node that reads a result."""

    begin: int
    first: int
    reads: set[int] = field(default_factory=set)
    results: list[int] = field(default_factory=list)


@dataclass
class _Lives:
    """The memory of a graph's nodes, by `AliasSets`' numbers, and from which node to which it lives."""

    graph: Graph
    fused: bool
    leaving: Collection[str] = ()  # results that are moved away after their last use
    memory: AliasSets = field(init=False)
    bytes: dict[int, int] = field(default_factory=dict)
    begins: dict[int, int] = field(default_factory=dict)
    ends: dict[int, int] = field(default_factory=dict)
    unknown: int = 0

    def __post_init__(self) -> None:
        nodes = list(self.graph.nodes)
        self.memory = AliasSets(nodes)
        self._positions = {node: number for number, node in enumerate(nodes)}
        self._given = {
            number: names
            for number, sharing in self.memory.owners.items()
            if (names := [node.name for node in sharing if node.op == "placeholder"])
        }
        self._inside: dict[str, list[int]] = {}  # by the name of an operator, in order
        for node in nodes:
            self._inside.setdefault(_alike(operator_of(node)), []).append(workspace_of(node))
        self._workspaces = {self._positions[node]: size for node in nodes if (size := workspace_of(node))}
        self._inlined: set[int] = set()
        self._first: dict[int, int] = {}  # by tensor: the position of the first node that reads it
        self._known_readers: dict[int, set[Node]] = {}
        self._known_reads: dict[Node, set[int]] = {}
        for number, sharing in sorted(self.memory.owners.items(), key=lambda item: -self._positions[item[1][0]]):
            self.begins[number] = self._positions[sharing[0]]
            self.bytes[number] = self._size(number, sharing)
            users = [
                user
                for node in sharing
                for user in node.users
                if user not in sharing and not (user.op == "output" and node.name in self.leaving)
            ]
            if self._is_inlined(sharing, users):
                self._inlined.add(number)
            last = max((self._positions[node] for node in sharing), default=0)
            self.ends[number] = max([last, *map(self._read_until, users)])
            self._first[number] = min(map(self._read_from, users), default=len(nodes))
        for node in nodes:  # operands before what reads them, so that nothing is deep
            self._reads(node)
        for number in self.ends:  # readers before what they read
            self._readers(number)
        if self.fused:
            self._join_kernels()

    def _size(self, number: int, sharing: Sequence[Node]) -> int:
        sizes = [bytes_in_batch(leaf) for node in sharing for leaf in _leaves(node) if self._is_at(node, leaf, number)]
        self.unknown += not any(size is not None for size in sizes) and bool(sizes)
        return max((size for size in sizes if size is not None), default=0)

    def _is_at(self, node: Node, leaf: torch.Tensor, number: int) -> bool:
        return len(self.memory.of(node)) == 1 or number in map(self.memory.number, storages_of(leaf))

    def _is_inlined(self, sharing: Sequence[Node], users: Iterable[Node]) -> bool:
        if not self.fused or not _is_computed(sharing[0]):
            return False
        return all(_fuses(user) for user in users)

    def _read_until(self, user: Node) -> int:
        """The position of the last node that runs a user's loop, which is in its readers' loops if it is inlined."""
        inlined = self._inlined.intersection(self.memory.of(user)) if _leaves(user) else ()
        return max([self._positions[user], *(self.ends[number] for number in inlined)])

    def _read_from(self, user: Node) -> int:
        """The position of the first node that runs a user's loop."""
        inlined = self._inlined.intersection(self.memory.of(user)) if _leaves(user) else ()
        return min([self._first[number] for number in inlined], default=self._positions[user])

    def _join_kernels(self) -> None:
        """Have the results of one kernel begin together."""
        kernels: list[_Kernel] = []
        for number in sorted(self.begins, key=self.begins.__getitem__):
            node = self.memory.owners[number][0]
            if number in self._inlined or not _fuses(node):
                continue
            read = self._reads(node)
            ready = max((self.begins[each] for each in read), default=0) + 1
            large = {each for each in read if self.bytes[each] == self.bytes[number]}
            for kernel in reversed(kernels):
                begin = max(kernel.begin, ready)
                if kernel.reads & large and begin <= min(kernel.first, self._first[number]):
                    break
            else:
                kernels.append(kernel := _Kernel(begin := self.begins[number], self._first[number]))
            kernel.begin, kernel.first = begin, min(kernel.first, self._first[number])
            kernel.reads |= large
            kernel.results.append(number)
            for result in kernel.results:
                self.begins[result] = begin
        for kernel in kernels:
            nodes = {self.memory.owners[number][0] for number in kernel.results}
            for number in kernel.reads:
                if self._readers(number) <= nodes:
                    self.ends[number] = kernel.begin

    def _reads(self, node: Node) -> set[int]:
        """The tensors in memory that a node's loop reads."""
        if node not in self._known_reads:
            found = self._known_reads[node] = set()
            for number in self.on(node.all_input_nodes):
                found |= self._reads(self.memory.owners[number][0]) if number in self._inlined else {number}
        return self._known_reads[node]

    def on(self, nodes: Iterable[Node]) -> set[int]:
        """The memory of nodes."""
        return {number for node in nodes for number in self.memory.of(node)}

    def leave(self, leaving: Collection[int], given: Collection[int], ahead: int) -> list[int]:
        """Have tensors live until their copies are waited for; returns them in the order in which they leave.

        A copy is waited for where the copy begins that comes `ahead` later, or at the end.
        """
        order = sorted(leaving, key=lambda number: (number not in given, self.ends[number]))
        starts = [self.ends[number] for number in order]
        for place, number in enumerate(order if ahead else ()):
            later = place + ahead
            self.ends[number] = max(starts[later], starts[place]) if later < len(order) else len(self._positions) - 1
        return order

    def read(self, returning: Collection[int], ahead: int, early: Collection[int]) -> tuple[dict[int, int], int]:
        """From which positions on inputs that come back are there, by number; and where others' are read.

        An input is read where the one is used that comes `ahead` before it; `early` ones are there from the start.
        """
        first = {
            number: min(
                (self._positions[user] for node in self.memory.owners[number] for user in node.users), default=0
            )
            for number in returning  # views of what comes back are made of it
        }
        order = sorted(returning, key=first.__getitem__)
        uses = [first[number] for number in order]
        begins = {n: 0 if n in early else uses[max(0, place - ahead)] for place, n in enumerate(order)}
        return begins, uses[max(0, len(uses) - ahead) :][0] if ahead and uses else 0

    def peak(
        self,
        owned: Collection[int],
        returning: Mapping[int, int] = NONE,
        held: Collection[int] = (),
        kept: Collection[int] = (),
        for_others: tuple[int, int] = (0, 0),
    ) -> int:
        """The most bytes that live at a time, besides inputs that others own.

        Inputs that are `returning` live from these positions on; `held` ones, which the caller has, to the end. No
        result takes the place of those, nor of `kept` ones, which others may read. for_others: bytes that are read for
        another call, and from which position on.
        """
        change = [0] * (len(self._positions) + 1)
        change[for_others[1]] += for_others[0]
        for position, size in self._workspaces.items():
            change[position] += size
            change[position + 1] -= size
        for number, size in self.bytes.items():
            if number in self._inlined or number in owned:
                continue
            begin = returning.get(number, self.begins[number])
            change[begin] += size
            change[len(self._positions) if number in held else self.ends[number] + 1] -= size
            if self._takes_place(number, size, {*owned, *held, *kept}):
                change[begin] -= size
                change[begin + 1] += size
        return max(itertools.accumulate(change))

    def peak_of(
        self,
        code: WrapperCode,
        owned: Collection[int],
        held: Collection[int] = (),
    ) -> int:
        """`peak`, of what a compiler has made of the graph."""
        change = [*code.changes, 0]
        for number, names in self._given.items():
            if number in owned:
                continue
            end = code.end if number in held else max(code.dropped.get(name, code.end) for name in names)
            change[0] += self.bytes[number]
            change[end] -= self.bytes[number]
        lives = list(itertools.accumulate(change))
        calls: dict[str, list[int]] = {}
        for name, place in code.operators:
            calls.setdefault(_alike(name), []).append(place)
        inside = [lives[place] + size for name in calls for place, size in self._workspaces_at(name, calls[name])]
        return max(*lives, *inside, 0)

    def _workspaces_at(self, name: str, places: Sequence[int]) -> Iterable[tuple[int, int]]:
        """The workspace of each call of an operator: in the graph's order, unless a compiler has left some out."""
        sizes = self._inside.get(name, [0])
        return zip(places, sizes if len(sizes) == len(places) else [max(sizes)] * len(places), strict=True)

    def _takes_place(self, number: int, size: int, others: set[int]) -> bool:
        """Whether a fused result is written to the memory of an operand of this size that nothing else reads.

        One with several readers is often read by one kernel for all of them, which writes all results elsewhere.
        """
        node = self.memory.owners[number][0]
        if not self.fused or not _fuses(node):
            return False
        return any(
            self.bytes[n] == size and self.ends[n] == self.begins[number] and len(self._readers(n)) == 1
            for n in self._reads(node) - others
        )

    def _readers(self, number: int) -> set[Node]:
        """The nodes whose loops read a tensor, those of inlined ones left out."""
        if number not in self._known_readers:
            sharing = self.memory.owners[number]
            found = self._known_readers[number] = set()
            for user in {user for node in sharing for user in node.users if user not in sharing}:
                inlined = self._inlined.intersection(self.memory.of(user)) if _leaves(user) else ()
                found |= {node for each in inlined for node in self._readers(each)} or {user}
        return self._known_readers[number]


def _alike(operator: str) -> str:
    return PRODUCTS[0] if operator in PRODUCTS else operator


def _leaves(node: Node) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(node.meta.get("val")) if isinstance(leaf, torch.Tensor)]


def bytes_in_batch(leaf: torch.Tensor) -> int | None:
    """The size of a tensor's memory; None if it is not known while the graph is compiled."""
    try:
        size = leaf.untyped_storage().nbytes()
    except (NotImplementedError, RuntimeError):  # a subclass without a storage of its own
        return bytes_of(leaf)
    found = size if isinstance(size, int) else in_batch(size)
    return None if found is None else rounded(int(found), leaf.device.type)


def _has(node: Node, tag: str) -> bool:
    return getattr(torch.Tag, tag, None) in getattr(node.target, "tags", ())


def _is_computed(node: Node) -> bool:
    """Whether a node's result is a function of the position, and of operands at it."""
    return node.op == "call_function" and (_has(node, "pointwise") or operator_of(node) in _COMPUTED)


def _fuses(node: Node) -> bool:
    return node.op == "call_function" and (
        _has(node, "pointwise") or _has(node, "reduction") or operator_of(node) in _FUSED | _COMPUTED
    )
