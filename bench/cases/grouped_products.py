"""Grouped products of a mixture's experts alone: our Triton kernels, PyTorch's, and a product for each expert."""

from __future__ import annotations

import functools
from typing import Any

from bench.case import Case, Contender, Parameters, Program

LOOP, LIBRARY, TRITON, OURS = "a product for each expert", "F.grouped_mm", "fastpack, Triton", "fastpack"


def build(way: str, parameters: Parameters, device: str) -> Program:
    """rows [N, K], weights [E, M, K], as `nn.Linear` has them, offsets int32 [E] -> [N, M], forward and backward."""
    import torch
    import torch.nn.functional as F
    from torch import Tensor

    from bench.cases.training import training_program
    from fxpasses.experts.runtime import grouped_kernels, grouped_linear, grouped_ways

    def by_loop(rows: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
        parts = rows.tensor_split(offsets.tolist()[:-1])
        return torch.cat([F.linear(part, weight) for part, weight in zip(parts, weights, strict=True)])

    def by_library(rows: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
        return F.grouped_mm(rows, weights.transpose(1, 2), offs=offsets)

    def by_ours(rows: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
        found: Tensor = grouped_linear.grouped_mm(rows, weights, offsets, None, True)
        return found

    if way == TRITON:  # wherever PyTorch has a kernel, too
        grouped_kernels._way = lambda operand, *widths: grouped_ways.Way.TRITON
    product = {LOOP: by_loop, LIBRARY: by_library}.get(way, by_ours)
    torch.manual_seed(0)
    dtype = getattr(torch, parameters["dtype"])
    experts, width, hidden = parameters["experts"], parameters["width"], parameters["hidden"]
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(torch.randn(experts, width, hidden) * hidden**-0.5)
    layer.to(device, dtype)

    def loss_of(batch: Any) -> Tensor:
        rows = batch["rows"].requires_grad_()
        return product(rows, layer.weight, batch["offsets"]).float().square().mean()

    return training_program(layer, loss_of, batches(parameters, device, dtype))


def batches(parameters: Parameters, device: str, dtype: Any) -> list[dict[str, Any]]:
    """rows [tokens, hidden]; offsets int32 [experts], where the rows of each expert end, drawn as a router would."""
    import torch

    generator = torch.Generator().manual_seed(3)
    tokens, experts = parameters["tokens"], parameters["experts"]
    found = []
    for _ in range(4):
        rows = torch.randn(tokens, parameters["hidden"], generator=generator).to(device, dtype)
        chosen = torch.randint(experts, (tokens,), generator=generator)
        offsets = chosen.bincount(minlength=experts).cumsum(0).int().to(device)
        found.append({"rows": rows, "offsets": offsets})
    return found


def no_library(parameters: Parameters, device: str) -> str:
    return "" if device == "cpu" or parameters["dtype"] == "bfloat16" else "on CUDA it takes bfloat16 alone"


def no_triton(parameters: Parameters, device: str) -> str:
    import torch

    if device == "cpu":
        return "it runs on a device alone"
    return "" if torch.cuda.get_device_capability()[0] >= 8 else "it needs a device of compute capability 8.0"


def groups(device: str, quick: bool) -> list[dict[str, Any]]:
    if device == "cpu":
        sizes = {"tokens": 512, "hidden": 128, "width": 256}
        return [{"experts": 8, **sizes, "dtype": "float32"}]
    sizes = {"tokens": 16384, "hidden": 2048, "width": 1536}
    found = [{"experts": e, **sizes, "dtype": dtype} for dtype in ("bfloat16", "float32") for e in (8, 64)]
    return found[:1] if quick else found


def way(name: str, **more: Any) -> Contender:
    return Contender(name, functools.partial(build, name), compiles=False, **more)


CASE = Case(
    name="grouped_products",
    title="Grouped products: the experts' products alone",
    groups=groups,
    contenders=[
        way(LOOP),
        way(LIBRARY, unavailable=no_library),
        way(TRITON, ours=True, unavailable=no_triton),
        way(OURS, ours=True),
    ],
    baseline=LOOP,
    x="experts",
    expected=(
        "All contenders make the same products. A product for each expert reads the offsets on the host, and launches "
        "three kernels an expert; a grouped one launches three in all. fastpack takes PyTorch's kernel where it has "
        "one, and Triton's elsewhere."
    ),
    notes="No compiler: each contender is called as it is. In float32, Triton's kernels round as `torch.mm` does.",
)
