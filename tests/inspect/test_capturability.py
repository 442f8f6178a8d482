"""Which nodes a CUDA graph cannot record, and why; and that Inductor refuses the same graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils.checkpoint import checkpoint

import fxpasses.experts.runtime.grouped_linear  # noqa: F401 - registers operators
from fxpasses.base.cuda_graphs import Capturability, NumberInput, Obstruction
from fxpasses.inspect.capturability import capturability
from tests.support import captured

pytestmark = pytest.mark.all_cases

aten = torch.ops.aten
GPU, OTHER, CPU = "cuda:0", "cuda:1", "cpu"
FLOAT, INTS, MASK = torch.float32, torch.int64, torch.bool
Input = tuple[list[int], torch.dtype, str]
X: Input = ([4], FLOAT, GPU)
N: Input = ([4], INTS, GPU)
M: Input = ([4], MASK, GPU)


@torch.library.custom_op("fxpasses_tests::not_replayed", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def not_replayed(x: Tensor) -> Tensor:
    return x.clone()


@not_replayed.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def traced(program: Callable[..., Any], *inputs: Input) -> GraphModule:
    """The ATen graph of a program on fake tensors, which may be on devices that this machine lacks."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    fakes = [
        FakeTensor(mode, torch.empty(size, dtype=dtype, device="meta"), torch.device(device))
        for size, dtype, device in inputs
    ]
    with mode:
        return make_fx(program)(*fakes)


def reasons(found: Capturability) -> list[str]:
    return [obstacle.reason.name for obstacle in found.obstacles]


def index_by_mask(x: Tensor, mask: Tensor) -> Tensor:
    return aten.index.Tensor(x, [mask]).sin()


def written_through_mask(x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    return aten.index_put.default(x, [mask], y)


def on_the_host(x: Tensor, y: Tensor) -> Tensor:
    return x * y.sum()


def read_twice(x: Tensor, n: Tensor) -> Tensor:
    return x * n.sum().item() + n.max().item()


OBSTACLES: dict[str, tuple[Callable[..., Any], tuple[Input, ...], list[str]]] = {
    "item": (lambda x, n: x * n.sum().item(), (X, N), ["HOST_READ"]),
    "two items": (read_twice, (X, N), ["HOST_READ"] * 2),
    "nonzero": (lambda x: aten.nonzero.default(x).sin(), (X,), ["DATA_DEPENDENT_SIZE"]),
    "index by a mask": (index_by_mask, (([4], FLOAT, CPU), ([4], MASK, CPU)), ["DATA_DEPENDENT_SIZE"]),
    "masked_select": (torch.masked_select, (X, M), ["DATA_DEPENDENT_SIZE"]),
    "write through a mask": (written_through_mask, (X, M, X), ["MASK_WRITE"]),
    "copy to the host": (lambda x: x.cpu(), (X,), ["COPY_TO_HOST"]),
    "work on the host": (lambda x: x.cpu().sin(), (X,), ["COPY_TO_HOST", "ON_HOST"]),
    "an input on the host": (lambda x, y: x + y.to(x.device), (X, ([4], FLOAT, CPU)), ["ON_HOST", "COPY_FROM_HOST"]),
    "a number on the host": (on_the_host, (X, ([], FLOAT, CPU)), ["ON_HOST"] * 2),
    "copied into a tensor": (aten.copy.default, (X, ([4], FLOAT, CPU)), ["ON_HOST", "COPY_FROM_HOST"]),
    "two devices": (lambda x, y: (x + 1, y), (X, ([4], FLOAT, OTHER)), ["OTHER_DEVICE"]),
    "offsets for the host": (lambda n: torch.ops.fxpasses.offsets_on_host(n), (N,), ["UNSAFE_OPERATOR"]),
    "offsets, on the CPU": (lambda n: torch.ops.fxpasses.offsets_on_host(n), (([4], INTS, CPU),), ["UNSAFE_OPERATOR"]),
    "a tagged operator": (lambda x: not_replayed(x), (X,), ["UNSAFE_OPERATOR"]),
}  # fmt: skip
CAPTURABLE: dict[str, tuple[Callable[..., Any], tuple[Input, ...]]] = {
    "arithmetic": (lambda x, n: (x * n).sin(), (X, N)),
    "index by numbers": (lambda x, n: aten.index.Tensor(x, [n]), (X, N)),
    "a write at numbers": (lambda x, n, y: aten.index_put.default(x, [n], y), (X, N, X)),
    "masked_fill": (lambda x, m: x.masked_fill(m, 0.0), (X, M)),
    "where": (lambda x, m: torch.where(m, x, 0.0), (X, M)),
    "a 0-d constant on the host": (lambda x: x * torch.full((), 3.0), (X,)),
    "integers alone": (lambda n: n.cumsum(0), (N,)),
    "numbers of the shape": (lambda x: x.reshape(2, 2) * x.shape[0], (X,)),
    "on the CPU, as if it were a device": (lambda x, n: x[n], (([4], FLOAT, CPU), ([4], INTS, CPU))),
}


@pytest.mark.parametrize("name", OBSTACLES)
def test_what_is_in_the_way(name: str) -> None:
    program, inputs, expected = OBSTACLES[name]
    gm = traced(program, *inputs)
    assert reasons(capturability(gm)) == expected
    assert refused_by_inductor(gm)


@pytest.mark.parametrize("name", CAPTURABLE)
def test_what_is_not_in_the_way(name: str) -> None:
    program, inputs = CAPTURABLE[name]
    gm = traced(program, *inputs)
    assert capturability(gm) == Capturability()
    assert all(device == CPU for _, _, device in inputs) or not refused_by_inductor(gm)


def refused_by_inductor(gm: GraphModule) -> bool:
    """Private names, checked on torch 2.11, 2.13 and 2.15: the two functions that are imported here."""
    from torch._inductor.cudagraph_utils import check_lowering_disable_cudagraph
    from torch._inductor.utils import get_first_incompatible_cudagraph_node

    devices: dict[torch.device, Any] = {}
    for node in gm.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and (value.ndim or node.op == "placeholder"):
            devices.setdefault(value.device, node)
    with torch._inductor.config.patch(graph_partition=False):
        return get_first_incompatible_cudagraph_node(gm) is not None or bool(check_lowering_disable_cudagraph(devices))


@pytest.mark.parametrize("name", ["run_and_save_rng_state", "run_with_rng_state"])
def test_operators_that_inductor_lists(name: str) -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(getattr(torch.ops.higher_order, name), (x,)))
    found = capturability(GraphModule({}, graph))
    assert reasons(found) == ["UNSAFE_OPERATOR"] and found.obstacles[0].text == name


def test_sparse_tensors() -> None:
    graph = torch.fx.Graph()
    made = graph.call_function(aten._to_sparse.default, (graph.placeholder("x"),))
    made.meta["val"] = torch.eye(2).to_sparse()
    graph.output(made)
    gm = GraphModule({}, graph)
    assert reasons(capturability(gm)) == ["SPARSE"] and refused_by_inductor(gm)


def test_what_inductor_lists_is_known() -> None:
    """Each operator of its list is one of ours, or makes an unbacked symbol, or checks one."""
    inductor = pytest.importorskip("torch._inductor.utils")
    listed = getattr(inductor, "FORBIDDEN_CUDAGRAPH_OPS", frozenset())
    from fxpasses.inspect import capturability as ours

    assert listed - ours._FORBIDDEN <= {"aten._local_scalar_dense", "aten._assert_scalar"}


# Graphs of Dynamo


def on_data(program: Any, *inputs: Any) -> GraphModule:
    flags = {"capture_scalar_outputs": True, "capture_dynamic_output_shape_ops": True}
    with torch._dynamo.config.patch(flags):
        return captured(program, *inputs)


def layer(x: Tensor, lengths: Tensor) -> Tensor:
    return x * lengths.max().item()


def test_bodies_are_searched_and_named() -> None:
    def program(x: Tensor, lengths: Tensor) -> Any:
        return checkpoint(layer, x, lengths, use_reentrant=False)

    (obstacle,) = capturability(on_data(program, torch.randn(4), torch.tensor([1, 2]))).obstacles
    assert obstacle.reason is Obstruction.HOST_READ
    assert obstacle.body == "main/wrap_body_0" and obstacle.where.startswith("test_capturability.py:")
    assert "in main/wrap_body_0 at test_capturability.py" in str(obstacle)


def branching(x: Tensor) -> Any:
    return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))


def writing_through_a_mask(x: Tensor) -> Any:
    y = x.clone()
    y[y > 0] = 0.0
    y[0] = 1.0
    return y


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        (lambda x: x.nonzero() + 1, ["DATA_DEPENDENT_SIZE"]),
        (lambda x: x[x > 0].sin(), ["DATA_DEPENDENT_SIZE"]),
        (lambda x: x.long().tolist()[0] + x, ["HOST_READ"]),
        (lambda x: x.cpu() + 1, ["COPY_TO_HOST"]),
        (lambda x: x.to("cpu") + 1, []),
        (lambda x: x.masked_fill(x > 0, 1.0), []),
        (branching, ["CONTROL_FLOW"]),
        (writing_through_a_mask, ["MASK_WRITE"]),
    ],
    ids=["nonzero", "index", "tolist", "cpu", "to the device where it is", "masked_fill", "cond", "write"],
)
def test_what_programs_write(program: Any, expected: list[str]) -> None:
    assert reasons(capturability(on_data(program, torch.randn(4)))) == expected


def test_numbers_that_are_inputs() -> None:
    def program(x: Tensor, times: int, unused: int) -> Any:
        return x * times

    torch._dynamo.reset()
    graphs: list[GraphModule] = []

    def backend(gm: GraphModule, examples: Any) -> Any:
        graphs.append(gm)
        return gm.forward

    torch.compile(program, backend=backend, dynamic=True)(torch.randn(5), 3, 7)
    found = capturability(graphs[0])
    size, times = found.numbers
    assert found.whole and isinstance(size, NumberInput)
    assert (size.kind, size.sizes, times.kind, times.sizes) == ("int", True, "int", False)
    assert times.source == "times" and times.where.startswith("test_capturability.py:")
    assert str(found).startswith("can be recorded as one CUDA graph, again for each value of `x.size()[0]` at test_")


def test_the_text_names_the_first_node_and_counts() -> None:
    program, inputs, _ = OBSTACLES["two items"]
    text = str(capturability(traced(program, *inputs)))
    assert text.startswith("cannot be recorded as one CUDA graph: 2 nodes in the way, first `_local_scalar_dense`")


def test_graphs_without_values_are_not_in_the_way() -> None:
    assert capturability(torch.fx.symbolic_trace(lambda x: x + 1)) == Capturability()
