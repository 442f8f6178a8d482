"""Graphs come back from their pickles with all that compilers ask of them."""

from __future__ import annotations

import importlib
import pickle
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, GraphModule
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import fxpasses.dynamo.runtime.host_functions  # noqa: F401 - defines an operator
from fxpasses.graph.aliases import storages_of
from fxpasses.restart import facts, pickling, program
from fxpasses.restart.pickling import CannotPickle, Input
from tests.support import captured


def again(value: Any) -> Any:
    return pickling.loads(pickling.dumps(value), FakeTensorMode(shape_env=ShapeEnv()))


def test_fake_tensors_keep_memory_strides_and_their_place_in_autograd() -> None:
    with FakeTensorMode(shape_env=ShapeEnv()):
        x = torch.empty(3, 4, requires_grad=True)
        y = (x * 2).t()
        found = [x, y, y[1:], x[1:, 2:], x.detach().view(torch.int32), torch.empty(2, dtype=torch.int64)]
    made = again([Input(x), *found[1:]])
    for old, new in zip(found, made, strict=True):
        assert (old.shape, old.stride(), old.storage_offset()) == (new.shape, new.stride(), new.storage_offset())
        assert (old.dtype, old.requires_grad, old.is_leaf) == (new.dtype, new.requires_grad, new.is_leaf)
        shared = [storages_of(old) == storages_of(other) for other in found]
        assert shared == [storages_of(new) == storages_of(other) for other in made]


def test_graphs_keep_names_notes_and_results() -> None:
    def program(x: Tensor, at: Tensor) -> tuple[Any, ...]:
        pooled = F.max_pool1d(x, 2)
        with torch.no_grad():
            y = x[:, at.sum().item() :].sin()
        return pooled, y.split(2), x.transpose(0, 1)[..., None]

    inputs = torch.randn(2, 4), torch.tensor([1, 1])
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        gm = captured(program, *inputs)
    made = again(gm)
    assert made.code == gm.code and [*made.__dict__] == [*gm.__dict__]
    for old, new in zip(gm.graph.nodes, made.graph.nodes, strict=True):
        assert (old.name, old.op, old.target) == (new.name, new.op, new.target)
        assert str(old.meta.get("example_value")) == str(new.meta.get("example_value"))
    torch.testing.assert_close(made(*inputs), gm(*inputs))


def test_code_with_constants_of_torch() -> None:
    def program(x: Tensor) -> Tensor:
        return x.to(torch.float64)

    code = program.__code__.replace(co_consts=(None, torch.float64, torch.device("cpu"), program.__code__))
    made = again(code)
    assert made.co_consts == code.co_consts and made.co_code == code.co_code


@pytest.mark.parametrize("value", [torch.ones(2), nn.Linear(2, 2)])
def test_what_belongs_to_a_process_is_refused(value: Any) -> None:
    with pytest.raises(CannotPickle, match=f"it holds a {type(value).__name__}"):
        pickling.dumps([value])


def test_fake_tensors_of_two_traces_are_refused() -> None:
    inputs = [Input(FakeTensorMode(shape_env=ShapeEnv()).from_tensor(torch.ones(2))) for _ in range(2)]
    again(inputs[:1])
    with pytest.raises(CannotPickle, match="fake tensors of two traces"):
        pickling.dumps(inputs)


def test_operators_of_this_package_are_found_in_a_process_without_them() -> None:
    script = """
import pickle, pkgutil, sys
import torch
import fxpasses
from torch._subclasses import FakeTensorMode
from fxpasses.restart import pickling
data = pickle.load(sys.stdin.buffer)
assert not any(name.startswith("fxpasses.sequences.operators") for name in sys.modules)
print(pickling.loads(data, FakeTensorMode()))
"""
    modules = "attention.runtime.operators", "loss.operators", "offload.runtime.operators", "sequences.one_by_one"
    for name in (*modules, "offload.runtime.chain", "sequences.operators"):
        importlib.import_module(f"fxpasses.{name}")
    own = [name.partition("::")[2] for name in torch._C._dispatch_get_all_op_names() if name.startswith("fxpasses::")]
    packets = [getattr(torch.ops.fxpasses, name.partition(".")[0]) for name in own]
    data = pickle.dumps(pickling.dumps(packets))
    found = subprocess.run([sys.executable, "-c", script], input=data, capture_output=True)
    assert found.returncode == 0, found.stderr.decode()
    assert found.stdout.decode().strip() == str(packets) and len(packets) > 10


def test_functions_that_have_numbers_in_their_process_are_refused() -> None:
    graph = Graph()
    graph.output(graph.call_function(torch.ops.fxpasses.host_function.default, ("1", [])))
    with pytest.raises(CannotPickle, match="functions of the process"):
        program.operators([GraphModule({}, graph)])


def test_code_that_does_something_else_has_another_digest() -> None:
    def one(x: Any) -> Any:
        return x + 1, [y for y in x if y in {1, 2}]

    def two(x: Any) -> Any:
        return x + 1, [y for y in x if y in {1, 3}]

    assert facts.digest_of(one.__code__) != facts.digest_of(two.__code__)
    assert facts.digest_of(one.__code__) == facts.digest_of(one.__code__.replace(co_filename="elsewhere"))


def test_constants_are_told_apart_by_their_type() -> None:
    values = [1, True, 1.0, "1", b"1", None, (1,), [1], torch.float32, torch.Size([1]), {1}, slice(1), range(1)]
    assert len({repr(facts.constant(value)) for value in values}) == len(values)
    with pytest.raises(CannotPickle):
        facts.constant(object())
