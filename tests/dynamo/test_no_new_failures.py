"""Code that runs under stock `torch.compile` runs with the capture flags on, and gives the same values and gradients.

Each program is one way in which a value that was read from a tensor is used. It runs under stock with the flags off,
and under a backend that is marked as this package's, with the flags on: with the captured graph run as it is, after
AOTAutograd, which fails on graphs that Dynamo lets through, and with this package's own. Sizes and shapes that depend
on data are in `test_no_new_failures_in_shapes.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.support import thorough

Program = Callable[..., Any]
Check = Callable[[Program, Any], None]
EXPERTS, LENGTHS, COUNT = [0, 1, 0, 1, 1, 0], [2, 4], [3]
PROGRAMS: dict[str, tuple[Program, Any]] = {}


def program(metadata: Any) -> Callable[[Program], Program]:
    """Register a program of activations [6, 4] and an integer tensor."""

    def register(function: Program) -> Program:
        PROGRAMS[function.__name__] = (function, metadata)
        return function

    return register


# The four hazards that were known first.


@program(2)
def index_by_0d_tensor(x: Tensor, e: Tensor) -> Tensor:
    return x[e] * 2


@program(COUNT)
def index_by_element(x: Tensor, e: Tensor) -> Tensor:
    return x[e[0]] * 2


@program(EXPERTS)
def nonzero_tolist(x: Tensor, mask: Tensor) -> Tensor:
    for i in mask.nonzero().flatten().tolist():
        x = x + x[i].sin()
    return x


@program(EXPERTS)
def split_by_bincount(x: Tensor, experts: Tensor) -> Tensor:
    counts = experts.bincount(minlength=2).tolist()
    return torch.cat([part * i for i, part in enumerate(x.cos().split(counts))])


@program([[1, 2, 3]])
def split_by_repeat_interleave(x: Tensor, grid: Tensor) -> Tensor:
    lengths = torch.repeat_interleave(grid[:, 1], grid[:, 0] * 3).tolist()
    return torch.cat([part.softmax(0) for part in torch.split(x, lengths)])


# The same where a break cannot land, or lands elsewhere.


@program(EXPERTS)
def inlined(x: Tensor, experts: Tensor) -> Tensor:
    return split_by_bincount(x.sin(), experts) * 2


@program(EXPERTS)
def inlined_in_loop(x: Tensor, experts: Tensor) -> Tensor:
    for _ in range(3):
        x = nonzero_tolist(split_by_bincount(x, experts), experts)
    return x


@program(EXPERTS)
def in_comprehension(x: Tensor, experts: Tensor) -> Tensor:
    return torch.stack([nonzero_tolist(x, experts == k).sum() for k in range(2)])


@program(EXPERTS)
def in_checkpoint(x: Tensor, experts: Tensor) -> Tensor:
    return checkpoint(split_by_bincount, x.sin(), experts, use_reentrant=False) * 2


@program(EXPERTS)
def in_checkpoint_in_loop(x: Tensor, experts: Tensor) -> Tensor:
    for _ in range(2):
        x = checkpoint(nonzero_tolist, x.sin(), experts, use_reentrant=False) * 2
    return x


@program(EXPERTS)
def in_no_grad(x: Tensor, experts: Tensor) -> Tensor:
    with torch.no_grad():
        first, second = x.detach().split(experts.bincount(minlength=2).tolist())
        shift = first.sum() + 2 * second.sum() + sum(experts.nonzero().flatten().tolist())
    return x * shift


@program(EXPERTS)
def in_autocast(x: Tensor, experts: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        y = x @ x.T
        for i in experts.nonzero().flatten().tolist():
            y = y + y[i]
    return y.float()


@program(EXPERTS)
def in_try(x: Tensor, experts: Tensor) -> Tensor:
    try:
        first, second = x.split(experts.bincount(minlength=2).tolist())
        return torch.cat([first * 2, second])
    except ValueError:
        return x


# A scalar decides.


@program(COUNT)
def branch_on_item(x: Tensor, n: Tensor) -> Tensor:
    x = x.sin()
    if n[0].item() > 2:
        x = x * 2
    return x.cos()


@program(COUNT)
def branch_in_loop(x: Tensor, n: Tensor) -> Tensor:
    count = n.sum().item()
    for k in range(4):
        if count > k:
            x = x.sin() + k
    return x


@program(COUNT)
def branch_in_checkpoint(x: Tensor, n: Tensor) -> Tensor:
    return checkpoint(branch_on_item, x, n, use_reentrant=False)


@program(COUNT)
def range_of_item(x: Tensor, n: Tensor) -> Tensor:
    for i in range(n[0].item()):
        x = x + i
    return x


@program(COUNT)
def while_item(x: Tensor, n: Tensor) -> Tensor:
    left = n[0].item()
    while left > 0:
        x, left = x + left, left - 1
    return x


@program(LENGTHS)
def assertion(x: Tensor, lengths: Tensor) -> Tensor:
    assert sum(lengths.tolist()) == x.shape[0], "lengths do not fit"
    return torch.cat([part.sin() for part in x.split(lengths.tolist())])


@program(LENGTHS)
def python_containers(x: Tensor, lengths: Tensor) -> Tensor:
    values = lengths.tolist()
    kept = [n for n in values if n > 2]
    return x * len(kept) * len(set(values)) * {(2, 4): 3}.get(tuple(values), 1) + sorted(values)[0] + max(values)


@program(LENGTHS)
def any_over_a_generator(x: Tensor, lengths: Tensor) -> Tensor:
    return x * (2 if any(n > 3 for n in lengths.tolist()) else 1)


@program(COUNT)
def list_index_and_repetition(x: Tensor, n: Tensor) -> Tensor:
    count = n[0].item()
    return [x, x * 2, x * 3, x * 4][count] + torch.stack([x] * count).sum(0)


@program(COUNT)
def text(x: Tensor, n: Tensor) -> Tensor:
    return x * len(f"{n[0].item()}")


@program(COUNT)
def returned(x: Tensor, n: Tensor) -> tuple[Tensor, int, list[int]]:
    return x * 2, n[0].item(), n.tolist()


@program([0.5, 1.5])
def float_scalars(x: Tensor, scales: Tensor) -> Tensor:
    return x[: int(scales[1].item() * 2)] * scales[0].item() if scales.sum().item() > 0.5 else x


@pytest.mark.parametrize("name", PROGRAMS)
def test_stock_runs_it(name: str, check_stock: Check) -> None:
    check_stock(*PROGRAMS[name])


@pytest.mark.parametrize("name", PROGRAMS)
def test_it_runs_with_the_flags_on(name: str, check_capturing: Check) -> None:
    check_capturing(*PROGRAMS[name])


@thorough
@pytest.mark.slow
@pytest.mark.parametrize("checkpointed", [False, True])
def test_the_vision_tower_of_qwen2_vl_runs(
    checkpointed: bool, capture: None, backend_of: Callable[[str], Callable[..., Any]]
) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel

    vision = transformers.Qwen2VLConfig(
        vision_config={"depth": 2, "embed_dim": 32, "hidden_size": 16, "num_heads": 2, "patch_size": 4}
    ).vision_config
    tower = Qwen2VisionTransformerPretrainedModel._from_config(vision, attn_implementation="sdpa").train()
    if checkpointed:
        tower.gradient_checkpointing_enable({"use_reentrant": False})
    compiled = torch.compile(tower, backend=backend_of("aot_eager"))
    for grid in ([[1, 4, 4], [1, 2, 4]], [[1, 6, 4]], [[2, 2, 4], [1, 4, 6], [1, 2, 2]]):
        patches = torch.randn(sum(t * h * w for t, h, w in grid), 3 * 2 * 4 * 4)
        outputs = []
        for model in (tower, compiled):
            tower.zero_grad()
            output = model(patches, torch.tensor(grid)).pooler_output
            output.square().sum().backward()
            outputs.append([output, *(weight.grad.clone() for weight in tower.parameters())])
        torch.testing.assert_close(*outputs)
