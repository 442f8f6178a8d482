"""Other models of a process are compiled as if this package were not there."""

from __future__ import annotations

import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo.config
import torch._functorch.config
import torch._inductor.config
from torch import Tensor
from torch._dynamo.utils import counters
from torch.fx import GraphModule

from fxpasses.dynamo import collective_operands, flags, interceptions
from tests.support import compiled

CONFIGURATIONS = (torch._dynamo.config, torch._functorch.config, torch._inductor.config)
X, LENGTHS = torch.linspace(-1, 1, 64).view(2, 8, 4).requires_grad_(), torch.tensor([5, 3])


@pytest.fixture(autouse=True)
def flags_start_off() -> Iterator[None]:
    with torch._dynamo.config.patch(dict.fromkeys(flags.FLAGS, False)):
        yield


def reads(x: Tensor, lengths: Tensor) -> Tensor:
    return x[:, : lengths.max().item()].softmax(-1).square()


class Stock:
    """Another backend; it notes its graphs and the flags of Dynamo that its frames were traced with."""

    def __init__(self, then: Callable[[], object] = lambda: None) -> None:
        self.graphs: list[str] = []
        self.flags: set[tuple[bool, ...]] = set()
        self.then = then

    def __call__(self, gm: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        self.graphs.append(gm.code)
        self.flags.add(tuple(getattr(torch._dynamo.config, name) for name in flags.FLAGS))
        self.then()
        return gm.forward


def compiled_by_stock() -> tuple[list[str], dict[str, int], set[tuple[bool, ...]]]:
    """The graphs, the breaks and the flags of a model under another backend."""
    torch._dynamo.reset()
    counters.clear()
    backend = Stock()
    torch.testing.assert_close(torch.compile(reads, backend=backend)(X, LENGTHS), reads(X, LENGTHS))
    return backend.graphs, dict(counters["graph_break"]), backend.flags


def settings() -> dict[str, Any]:
    found = {f"{c.__name__}.{key}": value for c in CONFIGURATIONS for key, value in c.get_config_copy().items()}
    return {**found, "warnings": list(warnings.filters), "grad": torch.is_grad_enabled()}


def methods_of_dynamo() -> list[Any]:
    return [interceptions._get(*place) for row in interceptions.table() for place in row.places]


def train_with_fastpack() -> None:
    step = compiled(reads, "aot_eager")
    for lengths in (LENGTHS, LENGTHS - 1):
        step(X, lengths).sum().backward()


def test_another_model_compiled_after_ours_has_the_same_graphs_and_breaks() -> None:
    before = compiled_by_stock()
    train_with_fastpack()
    assert compiled_by_stock() == before
    assert len(before[0]) > 1 and before[2] == {(False, False)}


@pytest.mark.slow
def test_another_model_trains_under_inductor_after_ours() -> None:
    """With the capture flags, stock Inductor fails in its backward pass."""
    train_with_fastpack()
    torch._dynamo.reset()
    torch.compile(reads)(X, LENGTHS).sum().backward()


def test_nothing_that_others_read_is_changed() -> None:
    import fxpasses.fastpack  # noqa: F401  # the entry point, which is loaded once

    before, methods = settings(), methods_of_dynamo()
    train_with_fastpack()
    after = settings()
    assert {name for name in before if before[name] != after[name]} == set()
    assert all(one is other for one, other in zip(methods, methods_of_dynamo(), strict=True))


def test_another_backend_inside_a_trace_of_ours_finds_the_process_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    import fxpasses.compiler.backend

    inside, in_thread = Stock(), Stock()
    threads: list[threading.Thread] = []
    stock = fxpasses.compiler.backend._rewritten

    def rewritten(*args: Any) -> Any:
        torch.compile(reads, backend=inside)(X, LENGTHS)
        threads.append(threading.Thread(target=torch.compile(reads, backend=in_thread), args=(X, LENGTHS)))
        threads[-1].start()  # it waits for Dynamo's lock
        return stock(*args)

    monkeypatch.setattr(fxpasses.compiler.backend, "_rewritten", rewritten)
    compiled(reads)(X, LENGTHS)
    threads[0].join()
    assert inside.flags == in_thread.flags == {(False, False)}
    assert len(inside.graphs) == 2


def test_the_flags_that_a_user_has_set_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        train_with_fastpack()
        assert compiled_by_stock()[2] == {(True, False)}


def test_our_frames_are_captured_in_every_thread_and_after_a_graph_break() -> None:
    def breaks(x: Tensor, lengths: Tensor) -> Tensor:
        x = reads(x, lengths)
        torch._dynamo.graph_break()
        return x * lengths.sum().item()

    results = []
    step = compiled(breaks)
    thread = threading.Thread(target=lambda: results.append(step(X, LENGTHS)))
    counters.clear()
    thread.start()
    thread.join()
    torch.testing.assert_close(results[0], breaks(X, LENGTHS))
    assert sum(counters["graph_break"].values()) == 1  # the program's own


def test_compiled_autograd_with_our_backend_and_with_another() -> None:
    def gradient(**options: Any) -> Tensor:
        torch._dynamo.reset()
        x = X.detach().clone().requires_grad_()
        loss = reads(x, LENGTHS).sum()
        with torch._dynamo.compiled_autograd._enable(torch.compile(**options)):
            loss.backward()
        assert x.grad is not None
        return x.grad

    ours, stock = gradient(backend="fastpack", options={"fastpack.lowering": "eager"}), Stock()
    torch.testing.assert_close(ours, gradient(backend=stock))
    assert stock.flags == {(False, False)}


def test_pytorch_is_changed_at_three_places_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a frame's trace begins, where a file may have it, and what keeps transformers' `generate` apart.

    There are more once a record was open in this process, or it was one of several ranks.
    """
    for_ranks: list[None] = []
    monkeypatch.setattr(collective_operands, "_install", lambda: for_ranks.append(None))
    train_with_fastpack()
    assert not for_ranks
    ours = {f"{owner.__name__}.{name}" for owner in owners() for name, value in vars(owner).items() if is_ours(value)}
    of_records = {"torch._functorch._aot_autograd.graph_compile._log_fw_bw_graphs"}
    of_ranks = {"FakeTensorMode.dispatch", "torch.fx.experimental.proxy_tensor.proxy_call"}
    assert ours - of_records - of_ranks == {
        "torch._dynamo.convert_frame.compile_frame",
        "torch._dynamo.convert_frame.trace_frame",
        "ConvertFrameAssert.__call__",
    }


def owners() -> Iterator[Any]:
    """The modules of PyTorch's compilers and autograd that are loaded, and their classes."""
    parts = (
        "torch._dynamo.",
        "torch._inductor.",
        "torch._functorch.",
        "torch._subclasses.",
        "torch.fx.",
        "torch.utils.",
    )
    for name, module in list(sys.modules.items()):
        if name.startswith(parts) and type(module) is types.ModuleType:
            yield module
            yield from (value for value in vars(module).values() if type(value) is type and value.__module__ == name)


def is_ours(value: Any) -> bool:
    if type(value) is types.FunctionType:
        return "/fxpasses/" in value.__code__.co_filename
    return type(value).__module__.startswith("fxpasses.")
