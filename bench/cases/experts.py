"""Case 3: a mixture-of-experts block, with three spellings of its loop, and the same block without a loop."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from bench.case import Case, Contender, Parameters, Program
from bench.cases.compilers import (
    EAGER,
    OURS,
    STOCK_FLAGS,
    Compiler,
    contender,
    eager,
    inductor,
    inductor_with_flags,
    ours,
)
from bench.results import find

SLICES = "fastpack, slices"
BY_HAND = "by hand, Inductor"
GROUPED_MM = "HF grouped_mm"
FORMS = ("where", "one_hot", "mask")


def build(compiler: Compiler, parameters: Parameters, device: str, form: str = "") -> Program:
    """form: the group's by default; "by hand" and "HF" do the same with the same weights, without a loop."""
    import torch

    from bench.cases.expert_block import new_block
    from bench.cases.training import training_program

    dtype = getattr(torch, parameters["dtype"])
    block = new_block(form or parameters["loop"], parameters).to(device, dtype)
    compiled = compiler(block)
    generator = torch.Generator().manual_seed(3)
    shape = (parameters["tokens"], parameters["hidden"])
    batches = [{"x": torch.randn(shape, generator=generator).to(device, dtype)} for _ in range(4)]
    return training_program(block, lambda batch: compiled(batch["x"]).float().square().mean(), batches)


def groups(device: str, quick: bool) -> list[dict[str, Any]]:
    sizes = {"tokens": 1024, "hidden": 256, "width": 512, "top": 2}
    if device == "cuda":
        sizes = {"tokens": 8192, "hidden": 2048, "width": 768, "top": 8}
    forms = [(8, "where", "float32")]
    if not quick:
        forms = [(e, "where", "float32") for e in (8, 32, 128)] + [(32, "where", "bfloat16")]
        forms += [(32, loop, "float32") for loop in FORMS if loop != "where"]
    return [{"experts": e, "loop": loop, "dtype": dtype, **sizes} for e, loop, dtype in forms]


def without_loop(name: str, form: str, compiler: Compiler) -> Contender:
    return contender(name, functools.partial(build, form=form), compiler)


def arithmetic(entries: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Our time relative to the hand-written form."""
    rows = []
    for entry in entries:
        if entry["contender"] != OURS or BY_HAND not in entry.get("against", {}):
            continue
        parameters, by_hand = entry["parameters"], find(entries, entry["parameters"], BY_HAND)
        ratio = entry["against"][BY_HAND]
        rows.append(
            {
                "loop": parameters["loop"],
                "dtype": parameters["dtype"],
                "E": parameters["experts"],
                f"{OURS}, ms": 1e3 * entry["median_s"],
                f"{BY_HAND}, ms": 1e3 * by_hand["median_s"] if by_hand else None,
                "ratio": ratio["median"],
                "quartiles": f"{ratio['q1']:.2f} to {ratio['q3']:.2f}",
            }
        )
    return rows


CASE = Case(
    name="experts",
    title="Experts: a loop over E experts in three spellings",
    groups=groups,
    contenders=[
        contender(EAGER, build, eager),
        contender(STOCK_FLAGS, build, inductor_with_flags),
        without_loop(GROUPED_MM, "HF", eager),
        without_loop(f"{GROUPED_MM}, Inductor", "HF", inductor),
        without_loop(BY_HAND, "by hand", inductor),
        ours(SLICES, build, experts="slices"),
        ours(OURS, build),
    ],
    baseline=EAGER,
    x="experts",
    expected=(
        "The loop asks the router E times which tokens belong to an expert, and runs E strings of small operators; its "
        "graph, and the time to compile it, grow with E. After one sort, the tokens of all experts go through one "
        "grouped program: there is no host read beyond those of the grouped product, and the graph does not grow. The "
        "hand-written form does the same; fastpack should be within 5% of it."
    ),
    arithmetic=arithmetic,
    notes=(
        "Three spellings of the loop: `where` is `torch.where(idx == e)` and `index_add_`, `one_hot` is a permuted "
        "one-hot mask and `torch.where`, `mask` is a boolean mask as an index on both sides. All forms have the same "
        "weights and router. The contenders without a loop all call the same products, which are nearly all of a step "
        "in bfloat16 where the processor has no instructions for it, as here. Eager mode failed twice because the "
        "profile that counts its operators did not fit in memory; it was not timed there."
    ),
    cpu_time=True,
)
