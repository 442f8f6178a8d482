"""The ledger of unbacked symbols: the binders, users and assertions of each, and which are orphans.

An unbacked symbol (`u0`) is a number that only the running program knows, such as the result of `.item()`. A compiler
needs the node that binds it before every use. A symbol that is used and never bound is often the first sign of a wrong
rewrite.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from fxpasses.inspect.dataflow import Dataflow
from fxpasses.inspect.model import MAIN, Stage

_UNBACKED = re.compile(r"\b(?:u|zuf)\d+\b")


@dataclass
class Account:
    """One symbol. binders, users, assertions: names of nodes (`region: name` outside the main graph).

    users: nodes that take a number that depends on the symbol. tensors: the number of tensors with it in their size.
    """

    symbol: str
    binders: list[str] = field(default_factory=list)
    users: list[str] = field(default_factory=list)
    assertions: list[str] = field(default_factory=list)
    tensors: int = 0

    @property
    def problem(self) -> str:
        """A text for what is wrong with the symbol, or ""."""
        if not self.binders:
            return "orphan: used, and bound nowhere"
        return "" if self.users or self.assertions or self.tensors else "bound, and never used"


def unbacked_in(expression: int | str) -> set[str]:
    """The unbacked symbols of a size or a number."""
    return set(_UNBACKED.findall(expression)) if isinstance(expression, str) else set()


def ledger(stage: Stage, graph: Dataflow | None = None) -> list[Account]:
    """An account of every unbacked symbol outside the prologue, in graph order."""
    graph = graph or Dataflow(stage)
    accounts: dict[str, Account] = {}

    def account(symbol: str) -> Account:
        return accounts.setdefault(symbol, Account(symbol))

    for number, node in enumerate(graph.nodes):
        if graph.in_prologue[number]:
            continue
        region, name = graph.key(number)
        label = name if region == MAIN else f"{region.removeprefix(MAIN + '/')}: {name}"
        in_scalar = unbacked_in(node.scalar)
        in_sizes = {symbol for value in node.values for size in value.shape for symbol in unbacked_in(size)}
        for symbol in node.binds:
            account(symbol).binders.append(label)
        if node.op == "placeholder" and region == MAIN:
            for symbol in sorted(in_scalar | in_sizes):  # an input binds its sizes
                account(symbol).binders.append(label)
            continue
        if graph.is_border(number):
            continue
        for symbol in sorted(in_sizes):
            account(symbol).tensors += 1
        for symbol in sorted(in_scalar - set(node.binds)):
            account(symbol)
        taken = {s for source in graph.inputs[number] for s in unbacked_in(graph.nodes[source].scalar)}
        for symbol in sorted(taken):
            (account(symbol).assertions if node.is_assertion else account(symbol).users).append(label)
    return list(accounts.values())
