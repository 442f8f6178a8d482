"""A case of toys: its contenders run in processes as those of `bench/cases` do, and take no time."""

from __future__ import annotations

import torch

from bench.case import Case, Contender, Parameters, Program


def adds(parameters: Parameters, device: str, right: float = 1.0) -> Program:
    numbers = torch.arange(parameters["size"])
    return Program(
        step=lambda: numbers.sum().item(),
        values=lambda: {"sum": numbers.sum().item() * right},
        batches=2,
        figures=lambda: {"numbers": len(numbers)},
    )


def adds_wrongly(parameters: Parameters, device: str) -> Program:
    return adds(parameters, device, right=1.5)


def fails(parameters: Parameters, device: str) -> Program:
    raise RuntimeError("no such toy\nand a second line")


CASE = Case(
    name="tests.bench.toy_case",
    title="Toys",
    groups=lambda device, quick: [{"size": 3}] if quick else [{"size": 3}, {"size": 5}],
    contenders=[
        Contender("plain", adds, compiles=False),
        Contender("ours", adds, compiles=False, ours=True),
        Contender("wrong", adds_wrongly),
        Contender("failing", fails),
        Contender("compiling", adds, unavailable=lambda parameters, device: "it is for one test alone"),
        Contender("absent", adds, unavailable=lambda parameters, device: f"there is no {device} toy"),
    ],
    baseline="plain",
    x="size",
    expected="Toys take no time.",
)
