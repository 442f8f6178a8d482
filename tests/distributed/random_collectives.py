"""Random programs with collectives: on metadata and activations, in branches and loops that the batch decides.

A program is Python source: Dynamo traces nothing else. `x` are activations [4] with a gradient, `lengths` the batch's
metadata [2].
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from tests.distributed import collective_programs
from tests.distributed.collective_programs import Program

# Each is a statement, or several; they leave `x` of order 1.
_PLAIN = ["x = x.sin()", "x = torch.tanh(x * 2)", "x = x * 1.5 + 0.1", "x = x.detach() + x"]
_COLLECTIVES = [
    "x = torch.tanh(x * reduced(lengths.max()))",
    "x = x + reduced(lengths.max()) / 16",
    "x = x * reduced(x.detach().sum()).cos()",
    "reduced(lengths.max())",
    "reduced(x.detach())",
    "lengths = reduced(lengths) % 5 + 1; x = x + lengths.sum() / 64",
    "x = x + functional.all_reduce(x.detach(), 'sum', dist.group.WORLD).cos()",
    "x = x + functional.all_reduce(lengths, 'max', dist.group.WORLD).sum() / 32",
    "x = gathered(x.sin())[2:6]",
    "x = gathered(x)[:4] + x",
    "every = gathered_metadata(lengths); x = x * (every.sum() / 64).cos()",
    "x = scattered(torch.cat([x, x.cos()])).sin()",
    "x = scattered(torch.cat([x, x])) / 8",
    "x = exchanged(x)",
    "x = exchanged(x.cos()) * x",
    "splits = (exchanged_metadata(lengths) * 0 + 2).tolist(); x = exchanged(x * 2, splits, (2, 2)).sin()",
    "x = ReducedGradient.apply(x.sin())",
    "x = Announced.apply(x) / 2",
    "other = gathered(x.cos())",
]
_BREAKS = ["torch._dynamo.graph_break()", "x = x + (0.1 if reduced(x.detach().sum()).item() > 0 else 0.2)"]
_NAMES = vars(collective_programs) | {"torch": torch, "dist": dist, "functional": functional}


def gathered_metadata(lengths: torch.Tensor) -> torch.Tensor:
    return functional.all_gather_tensor(lengths, 0, dist.group.WORLD)


def exchanged_metadata(lengths: torch.Tensor) -> torch.Tensor:
    return functional.all_to_all_single(lengths, None, None, dist.group.WORLD)


@st.composite
def blocks(draw: Any, depth: int = 1, may_break: bool = True) -> str:
    """Some statements; those of depth 0 hold no others."""
    lines = []
    for _ in range(draw(st.integers(1, 3))):
        kinds = (
            ["plain", "collective", "collective"]
            + ["break"] * may_break
            + ["branch", "loop", "checkpoint"] * (2 * depth)
        )
        kind = draw(st.sampled_from(kinds))
        if kind in ("plain", "collective", "break"):
            lines.append(draw(st.sampled_from({"plain": _PLAIN, "collective": _COLLECTIVES, "break": _BREAKS}[kind])))
            continue
        inner = textwrap.indent(draw(blocks(0 if kind == "checkpoint" else depth - 1, may_break)), "    ")
        if kind == "branch":
            lines.append(f"if lengths.max() > {draw(st.integers(2, 6))}:\n{inner}")
        elif kind == "loop":
            lines.append(f"for step in range(min(lengths.max().item(), {draw(st.integers(1, 4))})):\n{inner}")
        else:
            options = draw(st.sampled_from(["", ", early_stop=False"]))
            body = f"def body(x, lengths=lengths):\n{inner}\n    return x"
            lines.append(f"{body}\nx = checkpoint(body, x, use_reentrant=False{options})")
    return "\n".join(lines)


@st.composite
def sources(draw: Any) -> str:
    """`def program(x, lengths)`: one or two equal layers, or different ones; it may return what nobody trains on."""
    layers = [draw(blocks())] * draw(st.integers(1, 2)) if draw(st.booleans()) else [draw(blocks()), draw(blocks())]
    returned = draw(st.sampled_from(["x", "x", "x, other"]))
    lines = ["lengths, other = lengths.clone(), x", *layers, f"return {returned}"]
    return "def program(x, lengths):\n" + textwrap.indent("\n".join(lines), "    ")


def made(source: str) -> Program:
    names: dict[str, Any] = dict(_NAMES, gathered_metadata=gathered_metadata, exchanged_metadata=exchanged_metadata)
    exec(compile(source, "<random program>", "exec"), names)
    program: Callable[..., Any] = names["program"]
    return program


_LENGTHS = st.tuples(st.integers(1, 4), st.integers(1, 9))


def steps_of_ranks() -> Any:
    """For each rank, the lengths that it sees in each step. One changes its mind; the other sees one batch."""
    return st.tuples(
        st.lists(_LENGTHS, min_size=1, max_size=3, unique=True), st.lists(_LENGTHS, min_size=1, max_size=1)
    )
