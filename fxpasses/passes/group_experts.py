"""Run a mixture of experts once on all tokens, sorted by expert, and not in a loop over the experts.

Before, for each expert (E queries, E small programs; the host waits for the device at each query):

    where_0 = torch.where(idx == 0);  tok_0 = where_0[0];  slot_0 = where_0[1]
    y_0 = silu(x[tok_0] @ w1[0]) @ w2[0];  out.index_add_(0, tok_0, y_0 * weights[tok_0, slot_0, None])

After, whatever E is:

    sorted, order = torch.sort(idx.flatten(), stable=True);  offsets = searchsorted(sorted, arange(E), right=True)
    tok = order // k;  slot = order % k
    y = grouped_mm(silu(grouped_mm(gather_rows(x, tok), w1, offsets)), w2, offsets)
    out.index_add_(0, tok, y * weights[tok, slot, None])

*Find* loops by their ends (`experts/loops.py`), *unify* the branches (`graph/families.py`), know what their queries
mean (`experts/selection.py`), and *lift* the common program to all rows (`experts/lifting.py`). Sums are taken in the
order of the loop. A loop in which anything is not understood keeps its branches, with the reason in the report; its
queries become one sort and slices (`experts/slices.py`), where they are understood.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.fx import Node

from fxpasses.graph import effects
from fxpasses.graph.families import Family, Mismatch, Unifier, leaves, members, operator_of
from fxpasses.graph.provenance import module_of, where
from fxpasses.graph.regions import Region
from fxpasses.graph.skips import Skip, skips_of
from fxpasses.graph.symbols import is_symbolic
from fxpasses.passes.experts.assertions import is_implied
from fxpasses.passes.experts.checkpoints import save_routing
from fxpasses.passes.experts.cuts import Spans, cut_of, spans_of
from fxpasses.passes.experts.emitting import Emitter
from fxpasses.passes.experts.lifting import Lifting, Rows
from fxpasses.passes.experts.loops import Loop, find_loops, has_rows
from fxpasses.passes.experts.memory import Memory, storages
from fxpasses.passes.experts.selection import Masks, Unknown, is_query
from fxpasses.passes.experts.skips import erase_unused, prove, prove_idle
from fxpasses.passes.experts.slices import slice_queries
from fxpasses.passes.experts.words import described, spelling
from fxpasses.pipeline import Context
from fxpasses.report import Reason, Refusal, Report

_FACTORIES = frozenset({"zeros", "zeros_like", "new_zeros", "empty", "empty_like", "new_empty", "full", "full_like",
                        "clone", "new_full"})  # fmt: skip
_NOT_GROUPED = {"auto": "the branches have no common end", "slices": "the option asks for slices"}
_MODES = ("_enter_autocast", "_exit_autocast", "_set_grad_enabled", "set_grad_enabled", "_enter_inference_mode")


class GroupExperts:
    """The pass."""

    name = "group_experts"
    requires: tuple[str, ...] = ()

    def __call__(self, gm: torch.fx.GraphModule, context: Context) -> Report:
        report = Report(self.name)
        level = context.options.experts
        if level == "off":
            return report
        shared = {key for node in context.shared_inputs for key in storages(node)}
        counts = {"loops_grouped": 0, "loops_sliced": 0}
        for region in Region(gm).walk():
            memory = Memory(region.gm.graph, context.fake_mode, shared)
            left: list[tuple[Loop, Refusal]] = []
            changes: list[str] = []
            if level != "slices":
                for loop, found in self._loops_of(region, memory, context, skips_of(gm)):
                    if isinstance(found, Refusal):
                        left.append((loop, found))
                    else:
                        counts["loops_grouped"] += len(found)
                        changes += found
            prove_idle(region.gm.graph, skips_of(gm), context.fake_mode)
            if level != "grouped":
                memory.refresh()
                sliced = slice_queries(region.gm.graph, memory, context, left, _NOT_GROUPED[level])
                counts["loops_sliced"] += len(sliced.changes)
                changes += sliced.changes
                report.refusals += sliced.refusals
            report.refusals += [refusal for _, refusal in left]
            report.changes += changes
            if changes:
                region.gm.recompile()
                around = region
                while around.parent is not None:
                    save_routing(around.gm)
                    around = around.parent
        report.figures = {name: count for name, count in counts.items() if count}
        report.changed = bool(report.figures)
        report.summary = _summary(**counts)
        return report

    def _loops_of(
        self, region: Region, memory: Memory, context: Context, skips: dict[int, Skip]
    ) -> Iterator[tuple[Loop, list[str] | Refusal]]:
        """What became of each loop. One may go on with another's sum, so they are looked for anew after each change."""
        tried: set[tuple[Node, ...]] = set()
        while True:
            loops = ((loop, tuple(merge.node for merge in loop.merges)) for loop in find_loops(region.gm.graph))
            loop, key = next(((loop, key) for loop, key in loops if key not in tried), (None, ()))
            if loop is None:
                return
            tried.add(key)
            first = key[0]
            if context.may_change(first):
                memory.refresh()
                yield loop, self._group(region, loop, memory, context.fake_mode, skips)
            else:
                yield loop, Refusal(first.name, Reason.LEFT_OUT, "", where(first), module_of(first)[0])

    def _group(
        self, region: Region, loop: Loop, memory: Memory, fake_mode: Any, skips: dict[int, Skip]
    ) -> list[str] | Refusal:
        """What became of a loop: of all of it, or of its rounds where it is a loop in a loop (over slots, say)."""
        refusal = None
        for rounds in loop.rounds():
            groupings = []
            try:
                groupings = [_Grouping(region, inner, memory, fake_mode, skips) for inner in rounds]
                if len({grouping.experts() for grouping in groupings}) > 1:
                    raise Unknown("the rounds of the loop are of different experts")
                return self._run_all(groupings)
            except (Unknown, Mismatch) as unknown:
                at = where(unknown.node) if unknown.node is not None else ""
                first = loop.merges[0].node
                refusal = refusal or Refusal(
                    first.name, Reason.NOT_ALIKE, str(unknown), at or where(first), module_of(first)[0]
                )
        assert refusal is not None
        return refusal

    def _run_all(self, groupings: list[_Grouping]) -> list[str]:
        changes: list[str] = []
        for grouping in groupings:
            try:
                changes.append(grouping.run())
            except (Unknown, Mismatch):
                if not changes:
                    raise
                break  # the rounds before stand for themselves
        return changes


def _summary(loops_grouped: int, loops_sliced: int) -> str:
    parts = []
    if loops_grouped:
        loops = "loops" if loops_grouped > 1 else "loop"
        parts.append(f"{loops_grouped} {loops} over experts became grouped programs")
    if loops_sliced:
        routings = "routings" if loops_sliced > 1 else "routing"
        parts.append(f"the queries of {loops_sliced} {routings} became one sort each")
    return "; ".join(parts)


class _Grouping:
    """One loop: check everything first, lift, and put the result where the last branch ended."""

    def __init__(self, region: Region, loop: Loop, memory: Memory, fake_mode: Any, skips: dict[int, Skip]) -> None:
        """Raises `Unknown` or `Mismatch` where the branches are not one program, or the loop may not be moved."""
        self.graph = region.gm.graph
        self.loop = loop
        self.memory = memory
        self.masks = Masks(memory.is_constant)
        self._emit = Emitter(self.graph, fake_mode, loop.merges[0].node)
        self.positions = memory.positions
        self.values = Unifier(spans_of).unify([merge.values for merge in loop.merges])
        families = members([self.values])
        self.branch = [family for family in families if any(has_rows(node) for node in family.nodes)]
        queries = [family for family in families if is_query(family)]
        queries += [key for key in [_mask_key(loop, self.values)] if key is not None]
        # All queries of a loop find as many tokens, so each is bounded by the smallest mask.
        self.asked = [_mask_of(query).example.numel() for query in queries if isinstance(_mask_of(query), Family)]
        self.selection = self.masks.selection_of(_mask_of(queries[0])) if queries else None
        cuts = [cut for family in families if (cut := cut_of(family)) is not None]
        self.cut = cuts[0] if cuts else None
        self.totals = {total: cut for cut in cuts for total in cut.totals}
        spans = [leaf for leaf in leaves(self.values) if isinstance(leaf, Spans)]
        if self.selection is None and self.cut is None:
            raise Unknown("the branches ask for no tokens")
        self.question = queries[0].nodes[0] if queries else self.cut.nodes[0]  # type: ignore[union-attr]
        self.inside = self._check(
            families, {*itertools.chain(*(cut.nodes for cut in cuts), *(span.nodes for span in spans))}
        )
        ends = {node for merge in loop.merges for node in (merge.node, *merge.parts)}
        routing = self.selection or self.cut
        self.proof = prove(self.graph, skips, loop, self.inside | ends, routing, fake_mode)

    def experts(self) -> Any:
        """Which experts the branches are of."""
        selection = self.selection
        return (selection.first, selection.step, selection.count) if selection is not None else None

    def run(self) -> str:
        """What was done, in words; raises `Unknown`, and leaves the graph as it was."""
        lifting = Lifting(self._emit, self.masks)
        last = max(self.loop.merges, key=lambda merge: self.positions[merge.node]).node
        place, words = where(last), spelling(self.question, self.loop.kind, len(self.loop.merges))
        ids = self.selection.ids if self.selection is not None else None
        routing = described(len(self.loop.merges), self.masks.slots(ids) if ids is not None else None)
        try:
            with self.graph.inserting_before(last):
                if self.selection is not None:
                    lifting.begin(self.selection)
                elif self.cut is not None:
                    lifting.begin_cut(self.cut)
                # In the order of the program, so that what is written in place is written before it is read.
                for family in sorted(self.branch, key=lambda family: self.positions[family.nodes[0]]):
                    lifting.lift(family)
                result = self._merge(lifting, self.values)
            known = {total: lifting.total(cut) for total, cut in self.totals.items()}
        except (Unknown, Mismatch):
            self._emit.undo()
            raise
        self._replace(result, last)
        left = self._erase(self.inside - self.totals.keys())
        for total, number in known.items():
            self._emit.settle(total, number)
        self._erase(left | self.totals.keys())
        erase_unused(self.graph, self.proof.conditions - self.inside, self._assertions_on)
        self.proof.conclude()
        return f"{words} at {place} → level 2, one grouped program ({routing})"

    # Legality

    def _check(self, families: list[Family], cut: set[Node]) -> set[Node]:
        """Nothing else may look at the branches' rows, and nothing else may write while the loop runs."""
        loop = self.loop
        own = {node for family in families for node in family.nodes}
        parts = {part for merge in loop.merges for part in merge.parts}
        ends = {merge.node for merge in loop.merges}
        rows = {node for family in self.branch for node in family.nodes} | parts | cut
        scaffolding = self._assertions_on(rows)
        for node in rows - self.totals.keys():
            for user in node.users:
                if user not in rows and user not in ends and user not in scaffolding:
                    raise Unknown(f"`{user.name}` looks at an expert's tokens as well", user)
        first = min(self.positions[node] for node in rows | ends)
        last = max(self.positions[merge.node] for merge in loop.merges)
        for node in self.graph.nodes:
            if not first <= self.positions[node] <= last or node in ends:
                continue
            name = operator_of(node)
            if name in _MODES:
                raise Unknown(f"`{name}` in the middle of the loop", node)
            if _writes(node) and node not in rows:
                raise Unknown(f"`{node.name}` writes in the middle of the loop", node)
        self._check_before(own, rows, first)
        self._check_buffer(own, ends | parts, first, last)
        # What only led to the rows (masks, a weight of each expert) goes with them, if nobody else looks at it.
        made = {node for node in own if node.op.startswith("call") and not _writes(node)}
        return rows | scaffolding | made

    def _check_before(self, own: set[Node], rows: set[Node], first: int) -> None:
        """What was made before the loop, and is made anew for all rows at its end, must not have changed."""
        made = [node for node in own if node.op.startswith("call") and self.positions[node] < first]
        kept = {key for node in made for operand in (node, *node.all_input_nodes) for key in storages(operand)}
        start = min((self.positions[node] for node in made), default=first)
        for node in self.graph.nodes:
            if start <= self.positions[node] < first and node not in rows and kept & self.memory.written_by(node):
                raise Unknown(f"`{node.name}` writes to what the branches are made of", node)

    def _check_buffer(self, own: set[Node], ends: set[Node], first: int, last: int) -> None:
        buffer = self.loop.buffer
        if buffer is None:
            return
        name = operator_of(buffer)
        chained = {merge.node for merge in self.loop.merges}
        if self._is_functional():
            for node in chained - {self.loop.merges[-1].node}:
                if not set(node.users) <= chained:
                    raise Unknown(f"`{node.name}`, a part of the sum, is used by itself", node)
        if not (name in _FACTORIES or self._is_functional()):
            raise Unknown(f"`{buffer.name}`, which the results are merged into, may share memory", buffer)
        lookers = [user for holder in {buffer, *chained} for user in holder.users]
        if not self._is_functional():
            lookers += self.memory.users(buffer, buffer, None)  # by views of it
        for user in lookers:
            if user not in ends and first <= self.positions[user] < last:
                raise Unknown(f"`{user.name}` looks at the sum before it is complete", user)
        if any(node in own for node in (buffer, *chained)):
            raise Unknown("a branch reads what another has added", buffer)

    def _is_functional(self) -> bool:
        return self.loop.kind in ("index_add", "scatter_add", "index_put")

    def _assertions_on(self, rows: set[Node]) -> set[Node]:
        """What only asserts sizes of rows as Dynamo does: all that follows from it ends in such an assertion."""
        found: set[Node] = set()
        for node in reversed(self.graph.nodes):
            if node.op not in ("call_function", "call_method") or node in rows:
                continue
            if node.target is torch.ops.aten._assert_scalar.default or node.target is torch._check:
                if any(self._follows(operand, rows) for operand in node.all_input_nodes) and self._is_implied(node):
                    found.add(node)
            elif node.users and all(user in found for user in node.users) and not _is_tensor_op(node):
                found.add(node)
        return found

    def _is_implied(self, assertion: Node) -> bool:
        """Whether what is asserted holds of any rows; `torch._check(tok.numel() <= capacity)` is the program's own."""
        asked = [self.cut.rows.meta["example_value"].shape[0]] if self.cut is not None else self.asked
        return is_implied(assertion, min((size for size in asked if isinstance(size, int)), default=None))

    def _follows(self, node: Node, rows: set[Node]) -> bool:
        waiting, seen = [node], set()
        while waiting:
            current = waiting.pop()
            if current in rows:
                return True
            if current in seen or not is_symbolic(current.meta.get("example_value")):
                if not (isinstance(current.meta.get("example_value"), torch.Tensor) and current not in seen):
                    continue
                if current.target is not operator.getitem:
                    continue
            seen.add(current)
            waiting += current.all_input_nodes
        return False

    # Rewriting

    def _merge(self, lifting: Lifting, values: Any) -> Node | None:
        loop, order = self.loop, lifting.order
        assert order is not None

        def covered(rows: Rows) -> Node:
            """The rows, with zeros where a row is of no expert."""
            if order.valid is None:
                return rows.node
            shape = [1] * rows.ndim
            shape[rows.row] = -1
            return self._emit(torch.where, (self._emit("reshape", (order.valid, shape)), rows.node, 0))

        if loop.kind == "cat":
            (value,) = values
            rows = lifting.lift(value)
            if not isinstance(rows, Rows) or rows.row != 0 or order.valid is not None:
                raise Unknown("the rows of all experts together are not known to be all rows")
            return rows.node
        if loop.kind in ("setadd", "assign"):
            key, value = values
            return self._merge_by_key(lifting, key, value, covered)
        args, kwargs = values
        first = loop.merges[0].node
        if loop.kind.startswith("index_put"):
            if kwargs.get("accumulate", args[2] if len(args) > 2 else False) is not True:
                raise Unknown("`index_put` without accumulate", first)
        elif kwargs.get("dim", args[0]) != 0:
            raise Unknown(f"`{loop.kind}` along another dimension", first)
        lifted_args = [self._argument(lifting, arg, covered) for arg in args]
        lifted_kwargs = {name: self._argument(lifting, arg, covered) for name, arg in kwargs.items()}
        return self._emit(first.target, (loop.buffer, *lifted_args), lifted_kwargs, like=first)

    def _argument(self, lifting: Lifting, arg: Any, covered: Callable[[Rows], Node]) -> Any:
        if isinstance(arg, (tuple, list)):
            return type(arg)([self._argument(lifting, part, covered) for part in arg])
        lifted = lifting.lift(arg)
        if isinstance(lifted, Rows):
            if lifted.row != 0:
                raise Unknown("rows in another dimension than the first", self.loop.merges[0].node)
            floating = lifted.node.meta["example_value"].dtype.is_floating_point
            return covered(lifted) if floating else lifted.node
        if lifted is not None and not isinstance(lifted, (int, float, str, Node)):
            raise Unknown("the results are merged in a way that is not known", self.loop.merges[0].node)
        return lifted

    def _merge_by_key(self, lifting: Lifting, key: Any, value: Any, covered: Callable[[Rows], Node]) -> Node:
        spans = _whole_first_dimension(key)
        if spans is not None:
            return self._merge_by_spans(lifting, spans, value)
        selection = lifting.selection
        if selection is None or lifting.order is None:
            raise Unknown("parts are put in places that are not known", self.loop.merges[0].node)
        keys = key if isinstance(key, tuple) else (key,)
        coordinates: list[Rows] = []
        for part in keys:
            if isinstance(part, Family) and part.example.dtype is torch.bool:
                coordinates += lifting.coordinates_of(part)
            else:
                lifted = lifting.lift(part)
                if not isinstance(lifted, Rows):
                    raise Unknown("a key that is not known", self.loop.merges[0].node)
                coordinates.append(lifted)
        rows = lifting.lift(value)
        if not isinstance(rows, Rows) or rows.row != 0:
            raise Unknown("a value that is no row", self.loop.merges[0].node)
        if not selection.distinct:
            raise Unknown("a token may be twice in one expert, as far as the graph shows", selection.ids)
        places = tuple(c.node for c in coordinates)
        adds = self.loop.kind == "setadd"
        if not adds and not (len(places) == len(selection.axes) or self._one_slot(selection)):
            raise Unknown("the last expert of a token overwrites the others", self.loop.merges[0].node)
        dtype = self.loop.buffer.meta["example_value"].dtype  # type: ignore[union-attr]
        node = covered(rows) if adds else rows.node
        if node.meta["example_value"].dtype != dtype:
            if adds:
                raise Unknown("the sum has another dtype than its parts", self.loop.merges[0].node)
            node = self._emit("to", (node, dtype))
        if not adds and lifting.order.valid is not None:
            raise Unknown("rows of no expert would be overwritten", self.loop.merges[0].node)
        if adds and len(places) == 1:
            return self._emit("index_add_", (self.loop.buffer, 0, places[0], node))
        return self._emit("index_put_", (self.loop.buffer, places, node), {"accumulate": adds})

    def _merge_by_spans(self, lifting: Lifting, spans: Spans, value: Any) -> Node:
        """`y[start:stop] = value`, which all branches together do to the whole of y."""
        buffer, cut = self.loop.buffer, lifting.cut
        assert buffer is not None
        rows = lifting.lift(value)
        if cut is None or (cut.counts, cut.running) != (spans.counts, spans.running) or self.loop.kind != "assign":
            raise Unknown("parts are put in places that are not known", self.loop.merges[0].node)
        lifting.check_covered(buffer, checks=False)
        # Fewer dimensions would be broadcast, and the rows be taken for features.
        if not isinstance(rows, Rows) or rows.row != 0 or rows.ndim != buffer.meta["example_value"].ndim:
            raise Unknown("a value that is no row", self.loop.merges[0].node)
        return self._emit("copy_", (buffer, rows.node))

    def _one_slot(self, selection: Any) -> bool:
        sizes = selection.ids.meta["example_value"].shape
        return len(selection.axes) == 2 and sizes[selection.axes[1]] == 1

    def _replace(self, result: Node | None, last: Node) -> None:
        """Let the rest of the graph look at the result where it looked at the last branch's."""
        merges = [merge.node for merge in self.loop.merges]
        if result is not None and self.loop.kind not in ("setadd", "assign"):
            # In place, the result of any branch is the buffer, whoever looks at it later.
            for node in merges if not self._is_functional() and self.loop.kind != "cat" else [last]:
                node.replace_all_uses_with(result, lambda user: user not in merges)
        for node in dict.fromkeys(reversed(merges)):
            self.graph.erase_node(node)

    def _erase(self, inside: set[Node]) -> set[Node]:
        """Erase what nobody uses any more; returns the others."""
        left = set()
        for node in sorted(inside, key=lambda node: -self.positions[node]):
            if node.users:
                left.add(node)
            else:
                self.graph.erase_node(node)
        return left


def _mask_of(query: Any) -> Any:
    if isinstance(query, Family) and query.example is not None and getattr(query.example, "dtype", None) is torch.bool:
        return query
    return query.args[1] if query.name == "getitem" else query.args[0]


def _whole_first_dimension(key: Any) -> Spans | None:
    """The slices of `y[start:stop] = value`, and of `y[start:stop, :]`."""
    first, *rest = key if isinstance(key, tuple) else (key,)
    return first if isinstance(first, Spans) and all(part == slice(None) for part in rest) else None


def _mask_key(loop: Loop, values: Any) -> Family | None:
    """The mask of `out[mask] = y`, which asks for tokens as well."""
    if loop.kind not in ("setadd", "assign"):
        return None
    key = values[0]
    return key if isinstance(key, Family) and getattr(key.example, "dtype", None) is torch.bool else None


def _writes(node: Node) -> bool:
    if node.op not in ("call_function", "call_method"):
        return False
    name = operator_of(node)
    if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
        return True
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return True  # its body may
    in_place = (name.endswith("_") and not name.endswith("__")) or name in effects.WRITERS or "out" in node.kwargs
    return in_place or bool(node.kwargs.get("inplace"))


def _is_tensor_op(node: Node) -> bool:
    return isinstance(node.meta.get("example_value"), torch.Tensor) and node.target is not operator.getitem
