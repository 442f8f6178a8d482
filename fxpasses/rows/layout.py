"""Which dimensions of a value are the batch's sequences and tokens.

    ids: i64[8, 384]                                    metadata
    h = embedding(ids, table)         [8, 384, 512]     batch, tokens, -
    q = linear(h, w).view(8, 384, 8, 64)                batch, tokens, -, -
    q = q.transpose(1, 2)                               batch, -, tokens, -
    logits = linear(h, w).view(3072, 32000)             rows, -
    cross_entropy(logits, target)                       an exit: takes rows, and returns none

The analysis goes forwards, from the embeddings of the batch's tokens, or from hidden rows that the graph is given,
through operators that compute each row from the
same row of their operands (`rules.py`). The only known operator that mixes rows is attention, within one space of rows
or across two. Any other operator that takes rows takes all of them, and its result has no rows: a convolution over
tokens; or the graph's output, since a program's results are exact. Everything before it stays unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import Node

from fxpasses.graph.aliases import written_operands
from fxpasses.graph.calls import OperatorCall, argument, is_in_place, operator_of
from fxpasses.graph.checkpoints import has_policy
from fxpasses.graph.modes import Regions, autocast_regions
from fxpasses.graph.refusals import Refused
from fxpasses.graph.regions import Region
from fxpasses.graph.traits import RESHAPES
from fxpasses.report import Reason
from fxpasses.rows.attentions import ATTENTION, RowAttention, fused, is_written_between, written_out
from fxpasses.rows.exits import Exit, exit_of
from fxpasses.rows.exits import masked as masked_exit
from fxpasses.rows.nodes import Unfollowed, first_of, is_tensor, refused, shape_of, unfollowed, whole_index
from fxpasses.rows.routing import is_inside
from fxpasses.rows.rules import Rules
from fxpasses.rows.scores import Scores, Unpacked
from fxpasses.rows.spaces import BATCH, CHOICES, GROUPS, ROWS, SORTED, TOKENS, Space, Spaces, Tags
from fxpasses.rows.writes import MAKES_MEMORY, Writes

_ARITHMETIC = frozenset({"add", "floor_divide", "getitem", "mul", "sub"})


@dataclass(eq=False)
class Layout:
    """The layout of rows in a graph and its checkpoint bodies.

    tags, spaces: for each value with rows, its dimensions, and the space of its rows. exits: the nodes that take rows
    and return none. takes_all: the nodes that take every row. attentions: those among rows, by their results. parts:
    the values whose rows are a part of another value's. steps: in the order in which they run. origins: for each input
    of a body and each result of a checkpoint, the same value on the other side of the border. results: the results of
    checkpoints. written: for each in-place operator, the value whose memory it writes. fills: for each write into new
    memory, that memory. numbers: sizes of rows, which may only be used to compute sizes of other rows. scores: the
    values of attention that are computed on unpacked rows. given: the graph's inputs that have rows.
    """

    tags: dict[Node, Tags] = field(default_factory=dict)
    spaces: dict[Node, Space] = field(default_factory=dict)
    exits: dict[Node, Exit] = field(default_factory=dict)
    takes_all: dict[Node, TakesAll] = field(default_factory=dict)
    attentions: dict[Node, RowAttention] = field(default_factory=dict)
    parts: set[Node] = field(default_factory=set)
    steps: list[Step] = field(default_factory=list)
    origins: dict[Node, Node] = field(default_factory=dict)
    results: set[Node] = field(default_factory=set)
    written: dict[Node, Node] = field(default_factory=dict)
    fills: dict[Node, Node] = field(default_factory=dict)
    numbers: set[Node] = field(default_factory=set)
    scores: Mapping[Node, Scores] = field(default_factory=dict)
    given: set[Node] = field(default_factory=set)

    def operands(self, node: Node) -> list[Node]:
        """The operands with rows of a node, or of the attention whose result it is."""
        attention = self.attentions.get(node)
        found = attention.reads if attention is not None else node.all_input_nodes
        return [operand for operand in found if operand in self.tags]


@dataclass(frozen=True, eq=False)
class TakesAll:
    """A node that takes every row of its operands. why: the reason why its result has none."""

    operands: tuple[Node, ...]
    why: Refused


@dataclass(frozen=True, eq=False)
class Step:
    """A node that takes or returns rows. autocast: the regions around it."""

    node: Node
    region: Region
    autocast: Regions


def find_layout(
    main: Region, is_metadata: Callable[[Node], bool], may_drop: bool = False, biases: bool = False
) -> Layout | None:
    """The layout of a graph; None without rows. Raises `Refused` if rows cannot be followed.

    Rows come from an embedding of tokens. A graph without one, such as a head that is compiled alone, may be given
    hidden rows, [B, T, H] or [N, H], beside metadata of the same sizes without H, such as labels. may_drop: whether a
    dropout may draw other random numbers than eager mode's. biases: whether additive masks have other values than 0 and
    the least, as ALiBi's.
    """
    tables = [node for region in main.walk() for node in region.gm.graph.nodes if operator_of(node) == "embedding"]
    sizes = [shape_of(ids) for ids in (argument(node, "input") for node in tables) if is_tensor(ids)]
    lengths = {size[1] for size in sizes if len(size) == 2 and size[0] != 1}

    def run(given: Mapping[Node, Node], masked: Mapping[Node, Exit]) -> Layout:
        analysis = _Analysis(is_metadata, may_drop, biases, Spaces(lengths), given, masked)
        analysis.run(main)
        return analysis.layout

    found = run({}, {})
    given = {} if found.steps else _given_rows(main, is_metadata)
    if given:
        found = run(given, {})
    read = {operand for whole in found.takes_all.values() for operand in whole.operands}
    exits = {node: masked_exit(node, found.tags, is_metadata) for node in read if node.graph is main.gm.graph}
    masked = {node: exit for node, exit in exits.items() if exit is not None}
    if masked:
        found = run(given, masked)
    return found if found.exits or (found.steps and not given) else None


def _given_rows(main: Region, is_metadata: Callable[[Node], bool]) -> dict[Node, Node]:
    """The inputs of a graph that look like hidden rows, each with metadata that has an element for each row."""
    inputs = [node for node in main.gm.graph.nodes if node.op == "placeholder" and is_tensor(node)]
    metadata = {shape_of(node): node for node in reversed(inputs) if is_metadata(node)}
    found = {}
    for node in inputs:
        example, (*rows, _) = node.meta["example_value"], shape_of(node) or (None,)
        ids = metadata.get(tuple(rows))
        is_hidden = example.is_floating_point() and not isinstance(example, torch.nn.Parameter)
        if is_hidden and ids is not None and len(rows) in (1, 2) and rows[-1] != 1:
            found[node] = ids
    return found


class _Analysis:
    def __init__(
        self,
        is_metadata: Callable[[Node], bool],
        may_drop: bool,
        biases: bool,
        spaces: Spaces,
        given: Mapping[Node, Node],
        masked: Mapping[Node, Exit],
    ) -> None:
        self.is_metadata, self.biases, self.given, self.masked = is_metadata, biases, given, masked
        self.layout = Layout()
        self.tags, self.spaces = self.layout.tags, self.layout.spaces
        self.known = spaces
        self.written_out: dict[Node, RowAttention] = {}
        self.inside: set[Node] = set()
        self.writes = Writes(self.layout)
        self.rules = Rules(self.tags, self.spaces, self.writes, may_drop)
        self.unpacked = Unpacked(is_metadata, self.rules)
        self.layout.scores = self.unpacked.states

    def run(self, region: Region) -> None:
        attentions, refusals = written_out(region.gm.graph, self.is_metadata)
        planned = {node: found for node, found in attentions.items() if self._is_planned(found)}
        self.written_out |= planned
        self.inside |= {node for found in planned.values() for node in found.inside}
        self.rules.near_misses += refusals
        for node, autocast in autocast_regions(region.gm.graph, region.autocast).items():
            name = operator_of(node)
            if node in region.bodies:
                if has_policy(region.bodies[node].gm):
                    raise Refused(Reason.SELECTIVE, "", node)
                self._body(node, region.bodies[node])
            elif node not in self.inside:
                space = self._space_of_embedding(node, name)
                if space is not None:
                    self.tags[node], self.spaces[node] = (BATCH, TOKENS, None), space
                    self.layout.steps.append(Step(node, region, autocast))
                elif node in self.given:
                    tags = (BATCH, TOKENS) if len(shape_of(node)) == 3 else (ROWS,)
                    self.tags[node], self.spaces[node] = (*tags, None), self.known.of_given(self.given[node])
                    self.layout.given.add(node)
                    self.layout.steps.append(Step(node, region, autocast))
                elif any(operand in self.tags for operand in self._operands(node)):
                    if not self._is_size(node, name):
                        self._visit(node, name, region, autocast)
                elif any(operand in self.layout.numbers for operand in node.all_input_nodes):
                    if not self._is_size(node, name):
                        raise unfollowed(node, "reads a size of rows")
                self.writes.check(node)

    def _is_size(self, node: Node, name: str) -> bool:
        """Whether a node is a size of rows, or a number that is computed from one."""
        is_size = name in ("size", "sym_size") or (name == "getattr" and node.args[1:] == ("shape",))
        computes = name in _ARITHMETIC and all(operand in self.layout.numbers for operand in node.all_input_nodes)
        if not (is_size or computes) or is_tensor(node):
            return False
        self.layout.numbers.add(node)
        return True

    def _operands(self, node: Node) -> list[Node]:
        if node in self.written_out:
            return [operand.node for operand in self.written_out[node].operands]
        return node.all_input_nodes

    def _body(self, call: Node, body: Region) -> None:
        for placeholder, operand in body.operands.items():
            if operand in self.tags:
                self._is(placeholder, operand)
        self.run(body)
        for user in call.users:
            outputs, at = body.gm.graph.output_node().args[0], user.args[-1]
            if operator_of(user) != "getitem" or not isinstance(outputs, (tuple, list)) or not isinstance(at, int):
                raise unfollowed(call, "returns rows in a way that is not known")
            result: Any = outputs[at]
            if result in self.tags:
                self._is(user, result)
                self.layout.results.add(user)

    def _is(self, node: Node, other: Node) -> None:
        """Record that a node has the value of another, on the other side of a checkpoint's border."""
        if other in self.layout.scores:
            raise unfollowed(node, "takes scores across the border of a checkpoint")
        self.tags[node], self.spaces[node], self.layout.origins[node] = self.tags[other], self.spaces[other], other

    def _space_of_embedding(self, node: Node, name: str) -> Space | None:
        """The space of the batch's tokens that an embedding looks up; None for another node."""
        call = OperatorCall.of(node)
        ids: Any = call.argument("input") if name == "embedding" else None
        if not is_tensor(ids) or not self.is_metadata(ids) or len(shape_of(ids)) != 2 or not _reads_inputs(ids):
            return None
        if call.argument("max_norm") is not None or call.argument("scale_grad_by_freq") or call.argument("sparse"):
            return None  # the table's contents or gradient depend on which rows are looked up, and how often
        if ids.meta["example_value"].device.type not in ("cpu", "cuda"):
            raise Refused(Reason.NOT_ON_CPU, f"`{ids.name}`", node)
        return self.known.of_ids(ids)

    def _visit(self, node: Node, name: str, region: Region, autocast: Regions) -> None:
        if node in self.layout.origins:
            return
        if node.kwargs.get("out") is not None:
            raise unfollowed(node, "writes to memory that it is given")
        resizes = name in RESHAPES or name == "expand" or name.startswith("new_")
        if not resizes and self.layout.numbers & set(node.all_input_nodes):
            raise unfollowed(node, "reads a size of rows")
        self.writes.reads(node)
        if node.op == "output" and region.parent is not None:
            return
        try:
            self._follow(node, name)
        except Refused as why:
            if isinstance(why, Unfollowed) or self.tags.keys() & set(written_operands(node)):
                raise
            operands = tuple(operand for operand in self._operands(node) if operand in self.tags)
            self.layout.takes_all[node] = TakesAll(operands, why)
        self.layout.steps.append(Step(node, region, autocast))

    def _follow(self, node: Node, name: str) -> None:
        """Classify a node that takes rows; raises `Refused` if that is not possible."""
        if node.op == "output":
            raise Refused(Reason.RETURNED, "`output` takes rows, which are exact where they are returned", node)
        spaces = {self.spaces[operand]: None for operand in self._operands(node) if operand in self.spaces}
        ends = len(spaces) == 1 and not self.layout.scores.keys() & set(node.all_input_nodes)
        found = self.masked.get(node) or (exit_of(node, self.tags, self.is_metadata) if ends else None)
        if found is not None:
            self.layout.exits[node] = found
        elif name == "setitem":
            if self.rules.routing.inverts(node):
                self.layout.fills[node] = cast("Node", first_of(node))
            else:
                self.writes.sets(node, lambda memory: self.rules.indexed(node, self.tags[memory]))
        elif isinstance(node.meta.get("example_value"), (Tensor, tuple, list)):
            self.tags[node], self.spaces[node] = self._result(node, name, list(spaces))
        else:
            raise refused(node, "reads numbers of rows")

    def _result(self, node: Node, name: str, spaces: list[Space]) -> tuple[Tags, Space]:
        """The tags and the space of a node that returns rows."""
        attention = self.written_out.get(node) or self._fused(node, name)
        attention = attention or self.unpacked.result(node) or self.unpacked.reduced(node)
        if attention is not None:
            return self._attention(attention)
        scores = self.unpacked.scores(node, name)
        if scores is not None:
            return scores, self.spaces[self.layout.scores[node].query]
        if len(spaces) > 1:
            raise refused(node, "combines rows of two texts")
        (space,) = spaces
        cut = self._cut(node, name, space)
        if cut is not None:
            self.layout.parts.add(node)
            return self.tags[first_of(node)], cut
        tags = self.rules.tags_of(node, name)
        found = sorted(filter(None, tags))
        if found not in ([BATCH, TOKENS], [GROUPS, TOKENS], [ROWS]) and not (len(found) == 1 and is_inside(tags)):
            raise refused(node, "combines rows with other rows")
        if is_tensor(node) and not _has_sizes(node, tags, space):
            raise refused(node, "gives other rows than it takes")
        return tags, space

    def _fused(self, node: Node, name: str) -> RowAttention | None:
        if name != ATTENTION:
            return None
        mask = argument(node, "attn_mask")
        planned = mask is None or (self.is_metadata(mask) and not self._has_bias(mask))
        usual = planned and not argument(node, "dropout_p", 0.0)
        return (None if usual else self.unpacked.fused(node)) or fused(node)

    def _is_planned(self, found: RowAttention) -> bool:
        """Whether a plan gives the result of written-out attention; other attentions are computed as written."""
        dtype = found.node.meta["example_value"].dtype
        dtypes = {part.node.meta["example_value"].dtype for part in found.operands}
        inside = (node.meta.get("example_value") for node in found.inside)
        own = [x.dtype.itemsize for x in inside if isinstance(x, Tensor) and x.is_floating_point()]
        is_exact = all(size >= dtype.itemsize for size in own)  # no softmax in a narrower dtype
        return dtypes == {dtype} and is_exact and not self._has_bias(found.masks[0].node)

    def _has_bias(self, mask: Node) -> bool:
        return self.biases and mask.meta["example_value"].is_floating_point()

    def _cut(self, node: Node, name: str, space: Space) -> Space | None:
        """The part of the rows that `x[:, :-1]` takes; None for another node."""
        x = first_of(node)
        if name != "getitem" or not is_tensor(x) or not is_tensor(node) or len(shape_of(node)) != len(shape_of(x)):
            return None
        index = whole_index(node.args[1], len(shape_of(x)))
        if not all(isinstance(part, slice) for part in index):
            return None
        tags, places = self.tags[x], []
        for tag in (BATCH, TOKENS):
            if tag not in tags:
                return None
            places.append(tags.index(tag))
        others = [part for at, part in enumerate(index) if at not in places]
        cuts = (index[places[0]], index[places[1]])
        if any(part != slice(None) for part in others) or all(cut == slice(None) for cut in cuts):
            return None
        return self.known.part(space, cuts, (shape_of(node)[places[0]], shape_of(node)[places[1]]))

    def _attention(self, found: RowAttention) -> tuple[Tags, Space]:
        usual = (BATCH, None, TOKENS, None)
        for operand in found.operands:
            tags = self.tags.get(operand.node, ())
            is_usual = len(tags) == 4 and tuple(tags[axis] for axis in operand.order) == usual
            if not tags or not (is_usual or found.is_unpacked):
                raise refused(found.node, "is not attention of rows to rows, by heads")
        query, key, value = (self.spaces[operand.node] for operand in found.operands)
        if query.sizes[0] != key.sizes[0]:
            raise refused(found.node, "attends to one text that several share")
        if key is not value or (found.is_causal and query is not key):
            raise refused(found.node, "attends to keys and values of two texts")
        if query.whole is not None or key.whole is not None:
            raise refused(found.node, "attends to a part of the rows")
        for mask in found.masks:
            self._check_mask(found, mask.node, query, key)
        if is_written_between(found):
            raise refused(found.node, "goes on while something is written in place")
        self.layout.attentions[found.node] = found
        return found.tags if found.is_unpacked else tuple(usual[axis] for axis in found.order), query

    def _check_mask(self, found: RowAttention, mask: Any, query: Space, key: Space) -> None:
        if not is_tensor(mask) or not self.is_metadata(mask):
            raise refused(found.node, "has a mask that is not the batch's")
        example, sizes = mask.meta["example_value"], shape_of(mask)
        (batch, queries), (_, keys) = query.sizes, key.sizes
        sizes = (1,) * (4 - len(sizes)) + sizes
        fits = len(sizes) == 4 and sizes[0] in (1, batch) and sizes[2] in (1, queries) and sizes[3] == keys
        if (
            not fits
            or example.dtype is torch.float16
            or not (example.dtype is torch.bool or example.is_floating_point())
        ):
            raise refused(found.node, f"has a mask {example.dtype} {list(example.shape)}")


def _has_sizes(node: Node, tags: Tags, space: Space) -> bool:
    """Whether a value has the sizes of a space in its tagged dimensions: one text may have been expanded to several."""
    batch, tokens = space.sizes
    known = {BATCH: batch, TOKENS: tokens, ROWS: batch * tokens}
    multiples = {GROUPS: batch, CHOICES: batch * tokens, SORTED: batch * tokens}
    sizes = shape_of(node)
    return len(sizes) == len(tags) and all(
        known.get(tag, size) == size and (size / multiples.get(tag, size)).is_Integer
        for tag, size in zip(tags, sizes, strict=True)
        if tag
    )


def _reads_inputs(node: Node) -> bool:
    """Whether a value depends on the values of input tensors; distances between positions do not."""
    waiting, seen = [node], set()
    while waiting:
        found = waiting.pop()
        if found.op in ("placeholder", "get_attr") and is_tensor(found):
            return True
        if found not in seen and operator_of(found) not in ("size", "sym_size"):
            seen.add(found)
            makes = operator_of(found) in MAKES_MEMORY
            waiting += [operand for operand in found.all_input_nodes if not (makes and is_tensor(operand))]
            waiting += _writers(found)
    return False


def _writers(node: Node) -> list[Node]:
    """The nodes that write into a value, or into a view of it."""
    users = [user for user in node.users if user.args and user.args[0] is node]
    views = [user for other in users if operator_of(other) == "getitem" for user in other.users]
    return [user for user in (*users, *views) if is_in_place(operator_of(user)) or operator_of(user) == "setitem"]
