"""The routing analysis on small graphs: each fact is held against the numbers, and what is not understood has none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Interpreter, Node

from fxpasses.experts.routing import Routing
from fxpasses.experts.routing_facts import (
    Choice,
    Columns,
    Counts,
    Ends,
    Fact,
    Hits,
    Mask,
    Nothing,
    OneHot,
    Presence,
    Scattered,
    Sorted,
)

pytestmark = pytest.mark.all_cases

TOKENS, EXPERTS, SLOTS = 7, 5, 2
Program = Callable[[Tensor], Tensor]


class Example(Interpreter):
    """Runs a graph, keeps every value, and puts them where the passes look for values on fake tensors."""

    def __init__(self, program: Program, scores: Tensor) -> None:
        super().__init__(torch.fx.symbolic_trace(lambda scores: program(scores)))
        for node in self.module.graph.find_nodes(op="get_attr"):  # the only tensor that no operand leads to
            with self.module.graph.inserting_before(node):
                node.replace_all_uses_with(self.module.graph.call_function(torch.arange, (EXPERTS,)))
        self.values: dict[Node, Any] = {}
        self.run(scores)
        self.result = self.module.graph.output_node().args[0]

    def run_node(self, node: Node) -> Any:
        found = super().run_node(node)
        node.meta["example_value"] = self.values[node] = found
        return found

    def is_constant(self, node: Node) -> bool:
        """Whether nobody writes in place to its memory later."""
        later = [other for other in self.values if other > node and str(other.target).endswith("_")]
        return not any(_memory(self.values[other.args[0]]) == _memory(self.values[node]) for other in later)


def _memory(value: Any) -> int | None:
    return value.untyped_storage().data_ptr() if isinstance(value, Tensor) else None


def routings() -> list[Tensor]:
    """Scores [TOKENS, EXPERTS]; the first expert has no tokens in the first of them."""
    torch.manual_seed(1)
    scores = torch.rand(2, TOKENS, EXPERTS) + 0.1
    scores[0, :, 0] = 0
    return list(scores)


def fact_of(program: Program) -> Fact:
    """The fact of the result, which must be true of the numbers."""
    for scores in routings():
        example = Example(program, scores)
        fact = Routing(example.is_constant).of(example.result)
        assert holds(fact, example.values[example.result], example.values), fact
        assert example.result in fact.evidence or isinstance(fact, Nothing) or example.result.name == "new_zeros"
    return fact


def holds(fact: Fact, value: Any, values: dict[Node, Any]) -> bool:
    match fact:
        case Nothing():
            return True
        case Choice(choices, distinct, slots):
            rows = value if distinct else value.reshape(-1, slots)
            differ = all(len(set(row)) == len(row) for row in rows.reshape(-1, rows.shape[-1]).tolist())
            return differ and (choices is None or bool(((value >= 0) & (value < choices)).all()))
        case Mask(Columns(matrix, dim, tests), expert=expert):
            column = values[matrix].select(dim, expert)
            for test, number in tests:
                column = test(column, number) if callable(test) else getattr(column, test)(number)
            return bool(((value != 0) == (column != 0)).all())
        case Hits(in_tuple=True):
            return len(value) == 1 and holds(Hits(fact.ids), value[0], values)
    ids = values[fact.ids]
    count = torch.bincount(ids.flatten().long(), minlength=EXPERTS)
    match fact:
        case OneHot(axes=axes):
            size = value.shape[axes.index(None)]
            full = F.one_hot(ids, size)
            missing = [axis for axis in range(ids.ndim) if axis not in axes]
            wanted = full.sum(missing) if missing else full
            left = [*(axis for axis in range(ids.ndim) if axis not in missing), None]
            return bool((value == wanted.permute([left.index(axis) for axis in axes])).all())
        case Mask(axes=axes, dims=dims, expert=expert, flat=flat, spread=spread):
            wanted = (ids == expert).permute(axes)
            wanted = wanted.any(-1) if dims < len(axes) else wanted
            wanted = wanted.flatten() if flat else wanted
            wanted = wanted.unsqueeze(-1).expand_as(value) if spread else wanted
            return value.shape == wanted.shape and bool((value == wanted).all())
        case Presence(expert=expert, present=present):
            return bool((value >= 0).all()) and bool((value != 0).any()) is (bool((ids == expert).any()) is present)
        case Counts(exact_to=exact):
            found = value.flatten()
            return bool((found == count if exact else (found != 0) == (count != 0)).all())
        case Ends():
            return value.tolist() == count.cumsum(0).tolist()
        case Sorted():
            return value.tolist() == sorted(ids.tolist())
        case Hits():
            return value.flatten().tolist() == sorted(set(ids.flatten().tolist()))
        case Scattered():
            return bool(((value != 0) == (F.one_hot(ids, value.shape[1]).sum(1) != 0)).all())
    raise AssertionError(fact)


def index(scores: Tensor) -> Tensor:
    return torch.topk(scores, SLOTS, dim=-1)[1]


def hot(scores: Tensor) -> Tensor:
    return F.one_hot(index(scores), EXPERTS)


def counted(scores: Tensor) -> Tensor:
    return torch.bincount(index(scores).flatten(), minlength=EXPERTS)


def filled(scores: Tensor, value: Any = 1) -> Tensor:
    zeros = scores.new_zeros((TOKENS, EXPERTS))
    zeros.scatter_(1, index(scores), value)
    return zeros


def ones_added(scores: Tensor, dtype: torch.dtype = torch.int64) -> Tensor:
    flat = index(scores).flatten()
    ones = torch.ones_like(flat, dtype=dtype)
    return scores.new_zeros(EXPERTS, dtype=dtype).scatter_add(0, flat, ones)


def histogram(scores: Tensor, ids: Tensor | None = None, bins: int = EXPERTS) -> Tensor:
    ids = index(scores) if ids is None else ids
    return torch.histc(ids.flatten().float(), bins=bins, min=0, max=bins)


def searched(scores: Tensor, right: bool = True) -> Tensor:
    in_order = torch.sort(index(scores).flatten(), stable=True)[0]
    return torch.searchsorted(in_order, torch.arange(EXPERTS), right=right)


CHOICES: dict[str, tuple[Program, Choice]] = {
    "topk": (index, Choice(EXPERTS, distinct=True, top=SLOTS)),
    "cast": (lambda s: index(s).to(torch.int32), Choice(EXPERTS, distinct=True, top=SLOTS)),
    "narrow": (lambda s: index(s).to(torch.uint8), Choice(EXPERTS, distinct=True, top=SLOTS)),
    "flat": (lambda s: index(s).view(-1), Choice(EXPERTS, slots=SLOTS, top=SLOTS)),
    "flat, cast": (lambda s: index(s).flatten().int(), Choice(EXPERTS, slots=SLOTS, top=SLOTS)),
    "transposed": (lambda s: index(s).t().reshape(-1), Choice(EXPERTS, top=SLOTS)),
    "one slot": (lambda s: index(s)[:, 1], Choice(EXPERTS, top=SLOTS)),
    "argmax": (lambda s: s.argmax(dim=-1), Choice(EXPERTS)),
    "max": (lambda s: s.max(-1)[1], Choice(EXPERTS)),
}


@pytest.mark.parametrize("name", CHOICES)
def test_choices(name: str) -> None:
    program, expected = CHOICES[name]
    assert fact_of(program) == expected


UNDERSTOOD: dict[str, tuple[Program, type[Fact]]] = {
    "one_hot": (hot, OneHot),
    "permuted": (lambda s: hot(s).permute(2, 1, 0), OneHot),
    "permuted by a tuple": (lambda s: torch.permute(hot(s), (1, 2, 0)), OneHot),
    "transposed": (lambda s: hot(s).transpose(0, -1), OneHot),
    "as numbers": (lambda s: hot(s).to(torch.float32).double(), OneHot),
    "without slots": (lambda s: hot(s).sum(1), OneHot),
    "any slot": (lambda s: hot(s).permute(2, 0, 1).any(dim=-1), OneHot),
    "scattered ones": (lambda s: s.new_zeros((TOKENS, EXPERTS)).scatter(1, index(s), 1), OneHot),
    "scattered ones in place": (filled, OneHot),
    "scattered scores": (lambda s: filled(s, torch.topk(s, SLOTS, dim=-1)[0]), Scattered),
    "eq": (lambda s: index(s) == 3, Mask),
    "number first": (lambda s: torch.eq(index(s), 3), Mask),
    "slice": (lambda s: hot(s).permute(2, 1, 0)[3], Mask),
    "slice after dots": (lambda s: hot(s)[..., 3], Mask),
    "select": (lambda s: hot(s).select(-1, 3), Mask),
    "slice without slots": (lambda s: hot(s).amax(1)[:, 3], Mask),
    "some slot": (lambda s: (index(s) == 3).any(-1), Mask),
    "some slot, slots first": (lambda s: hot(s).permute(2, 1, 0)[3].sum(0), Mask),
    "laid flat": (lambda s: (index(s) == 3).view(-1), Mask),
    "above zero": (lambda s: hot(s)[..., 3] > 0, Mask),
    "as a number": (lambda s: (index(s) == 3).to(torch.uint8), Mask),
    "for features": (lambda s: (index(s) == 3).any(-1, keepdim=True).expand(TOKENS, 4), Mask),
    "for features, None": (lambda s: (index(s) == 3).any(-1)[:, None], Mask),
    "for features, unsqueeze": (lambda s: (index(s) == 3).any(-1).unsqueeze(-1).bool(), Mask),
    "one slot squeezed": (lambda s: (s.argmax(-1, keepdim=True) == 3).squeeze(-1), Mask),
    "squeezed in vain": (lambda s: (index(s) == 3).squeeze(-1), Mask),
    "column": (lambda s: s[:, 3] > 0.5, Mask),
    "column of a cast test": (lambda s: (s[:, 3] > 0.5).long(), Mask),
    "bincount": (counted, Counts),
    "sum of one_hot": (lambda s: hot(s).sum((0, 1)), Counts),
    "count_nonzero of one_hot": (lambda s: hot(s).permute(2, 1, 0).count_nonzero(dim=(1, 2)), Counts),
    "sum without slots": (lambda s: hot(s).sum(1).sum(0), Counts),
    "sum of floats": (lambda s: hot(s).float().sum((0, 1)).long(), Counts),
    "hits": (lambda s: hot(s).sum((0, 1)) > 0, Counts),
    "some": (lambda s: hot(s).amax((0, 1)), Counts),
    "ones added": (ones_added, Counts),
    "ones added, floats": (lambda s: ones_added(s, torch.float32), Counts),
    "histc": (histogram, Counts),
    "histc as integers": (lambda s: histogram(s).to(torch.int64), Counts),
    "a column of counts": (lambda s: counted(s).unsqueeze(1), Counts),
    "cumsum": (lambda s: counted(s).cumsum(0), Ends),
    "cumsum, by name": (lambda s: torch.cumsum(histogram(s).long(), dim=-1), Ends),
    "searchsorted": (searched, Ends),
    "sort": (lambda s: torch.sort(index(s).flatten(), stable=True)[0], Sorted),
    "count": (lambda s: counted(s)[0], Presence),
    "no count": (lambda s: counted(s)[0] == 0, Presence),
    "no count, turned": (lambda s: (counted(s)[0] < 1) == 0, Presence),
    "first end": (lambda s: counted(s).cumsum(0)[0], Presence),
    "any": (lambda s: (index(s) == 0).any(), Presence),
    "max": (lambda s: (index(s) == 0).max(), Presence),
    "half": (lambda s: (index(s) == 0).to(torch.float16).sum() > 0, Presence),
    "no sum": (lambda s: ((index(s) == 0).sum() == 0).any(), Presence),
    "some token": (lambda s: (index(s) == 0).any(0), Presence),
    "nonzero": (lambda s: (counted(s) > 0).nonzero(), Hits),
    "nonzero, flat": (lambda s: counted(s).nonzero().flatten(), Hits),
    "where": (lambda s: torch.where(counted(s))[0], Hits),
    "unique": (lambda s: index(s).unique(), Hits),
}


@pytest.mark.parametrize("name", UNDERSTOOD)
def test_what_is_understood_is_true_of_the_numbers(name: str) -> None:
    program, kind = UNDERSTOOD[name]
    assert type(fact_of(program)) is kind


NOT_UNDERSTOOD: dict[str, Program] = {
    "not the last axis": lambda s: torch.topk(s, SLOTS, dim=0)[1],
    "written over": lambda s: [m := index(s) == 3, m.fill_(True), m][-1],
    "the scores": lambda s: torch.topk(s, SLOTS, dim=-1)[0],
    "bits": lambda s: index(s).view(torch.int32),
    "truths": lambda s: index(s).bool(),
    "a token twice": lambda s: F.one_hot(index(s) * 0, EXPERTS).sum(1),
    "tokens summed": lambda s: hot(s).sum(0),
    "an index of tokens": lambda s: hot(s)[0],
    "from the end": lambda s: hot(s)[..., -1],
    "scores as integers": lambda s: s[:, 3].long(),
    "zeros beside scattered ones": lambda s: [z := s.new_zeros((TOKENS, EXPERTS)), z.scatter(1, index(s), 1), z][-1],
    "ids that were scattered": lambda s: [i := index(s), s.new_zeros((TOKENS, EXPERTS)).scatter(1, i, 1), i][-1][:, 0],
    "filled twice": lambda s: [z := filled(s), z.scatter_(1, index(s)[:, :1], 0)][-1],
    "filled later": lambda s: [z := s.new_zeros((TOKENS, EXPERTS)), z + 1, z.scatter_(1, index(s), 1)][-1],
    "weights counted": lambda s: torch.bincount(index(s).flatten(), s[:, :SLOTS].flatten(), minlength=EXPERTS),
    "twos added": lambda s: s.new_zeros(EXPERTS).scatter_add(0, s.argmax(-1), s.new_ones(TOKENS) * 2),
    "fewer bins": lambda s: histogram(s, bins=EXPERTS - 1),
    "bins of unknown ids": lambda s: histogram(s, index(s) + 1),
    "counts of bytes": lambda s: hot(s).sum((0, 1), dtype=torch.uint8),
    "counts moved": lambda s: torch.bincount(index(s).flatten(), minlength=6).view(2, 3).t().flatten(),
    "starts": lambda s: searched(s, right=False),
    "the other end": lambda s: counted(s).cumsum(0)[1],
    "descending": lambda s: torch.sort(index(s).flatten(), descending=True)[0],
    "more than one": lambda s: counted(s)[0] > 1,
    "first hit": lambda s: (counted(s) > 0).nonzero()[0],
    "hits with counts": lambda s: index(s).unique(return_counts=True)[0],
    "counts": lambda s: counted(s).any(),
}


@pytest.mark.parametrize("name", NOT_UNDERSTOOD)
def test_what_is_not_understood_has_no_fact(name: str) -> None:
    fact = fact_of(NOT_UNDERSTOOD[name])
    is_column = isinstance(fact, Mask) and isinstance(fact.ids, Columns)
    assert is_column or isinstance(fact, (Nothing, Choice))
