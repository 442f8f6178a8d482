"""Case 14: top-k of long rows in one stage and in two."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from bench.case import Case, Contender, Parameters, Program

ONE, PARTS, OURS = "torch.topk", "top-k of 32 parts", "split_topk"
Ways = Callable[[Tensor, int], tuple[Tensor, Tensor]]


def one_stage(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    return torch.topk(x, k)


def of_parts(x: Tensor, k: int, parts: int = 32) -> tuple[Tensor, Tensor]:
    """What NVIDIA's account of MLPerf describes: each row as 32, and the top-k of their top-k."""
    length = x.shape[-1] // parts
    values, places = x[..., : parts * length].unflatten(-1, (parts, length)).topk(k, sorted=False)
    places = places + torch.arange(0, parts * length, length)[:, None]
    rest = torch.arange(parts * length, x.shape[-1]).expand(*x.shape[:-1], -1)
    found, which = torch.cat([values.flatten(-2), x[..., parts * length :]], -1).topk(k)
    return found, torch.cat([places.flatten(-2), rest], -1).gather(-1, which)


def of_blocks(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    found: tuple[Tensor, Tensor] = torch.ops.fxpasses.split_topk(x, k, -1, True, True)
    return found


def as_the_pass(parameters: Parameters) -> Ways:
    """As the pass has it in a graph: where the rule leaves one stage, nothing is replaced."""
    from fxpasses.topk.blocks import block_length

    dtype = getattr(torch, parameters["dtype"])
    acts = block_length(parameters["rows"], parameters["columns"], parameters["k"], dtype, largest=True)
    return of_blocks if acts else one_stage


def build(way: Ways, parameters: Parameters, device: str) -> Program:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(parameters["rows"], parameters["columns"], generator=generator)
    x = x.to(getattr(torch, parameters["dtype"])).to(device)

    def values() -> Mapping[str, float]:
        found, places = way(x, parameters["k"])
        again = x.gather(-1, places)
        return {"sum": found.double().sum().item(), "1 + differences": 1 + (again != found).double().sum().item()}

    return Program(lambda: way(x, parameters["k"]), values)


def program_of(way: Ways) -> Callable[[Parameters, str], Program]:
    return lambda parameters, device: build(way, parameters, device)


def too_many(parameters: Parameters, device: str) -> str:
    return "a part has fewer elements than k" if parameters["columns"] < 32 * parameters["k"] else ""


def groups(device: str, quick: bool) -> list[dict[str, Any]]:
    if quick:
        return [{"rows": 5, "columns": 100_000, "k": 100, "dtype": "float32"}]
    return [
        {"rows": rows, "columns": columns, "k": k, "dtype": dtype}
        for rows, columns in ((1, 10**4), (1, 10**6), (16, 10**5), (16, 10**6))
        for k in (10, 1000)
        for dtype in (("float32", "bfloat16") if rows * columns == 16 * 10**6 else ("float32",))
    ]


def arithmetic(entries: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Which groups the rule leaves at one stage."""
    from fxpasses.topk.blocks import block_length

    rows = []
    for entry in entries:
        if entry["contender"] != OURS or "against" not in entry:
            continue
        given = entry["parameters"]
        length = block_length(given["rows"], given["columns"], given["k"], getattr(torch, given["dtype"]), True)
        rows.append({**given, "elements of a block": length or "one stage", "ratio": entry["against"][ONE]["median"]})
    return rows


CASE = Case(
    name="split_topk",
    title="Top-k of long rows in one stage and in two",
    groups=groups,
    contenders=[
        Contender(ONE, program_of(one_stage), compiles=False),
        Contender(PARTS, program_of(of_parts), compiles=False, unavailable=too_many),
        Contender(OURS, lambda given, device: build(as_the_pass(given), given, device), compiles=False, ours=True),
    ],
    baseline=ONE,
    shows=("time",),
    expected=(
        "PyTorch's kernel copies a row into pairs of value and index, 16 bytes for each element, and selects among "
        "these. The maxima of blocks of 128 read the row once, with vector instructions; what is selected from is then "
        "1/128 of the row, and k blocks. Where the rule leaves one stage, the ratio is 1."
    ),
    arithmetic=arithmetic,
)
