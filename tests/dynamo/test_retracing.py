"""The way back where capture leads into an error: for whom, in which steps, and what it leaves alone."""

import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo.config as config
from torch._dynamo import convert_frame
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.utils import counters
from torch.fx import GraphModule

from fxpasses.dynamo import flags, retracing
from fxpasses.dynamo.dynamo_names import DynamoNames
from fxpasses.dynamo.failures import CaptureRejected


class Recording:
    """A backend that runs the graph as it is, and keeps it. Value hints, which avoid most hazards, are off for it."""

    def __init__(self, *, fastpack: bool) -> None:
        self.graphs: list[GraphModule] = []
        self.kwargs = {"options": {"fastpack.capture": "off"}}  # as `torch.compile` keeps them
        if fastpack:
            self._is_fastpack = True

    def __call__(self, gm: GraphModule, example_inputs: list[Any], **kwargs: Any) -> Callable[..., Any]:
        self.graphs.append(gm)
        return gm.forward

    def calls(self, name: str) -> list[int]:
        """How often each graph calls `name`."""
        return [sum(node.target == name for node in gm.graph.nodes) for gm in self.graphs]


@pytest.fixture(autouse=True)
def hook_and_flags() -> Iterator[None]:
    with config.patch(dict.fromkeys(flags.FLAGS, True)):
        assert retracing.install()
        yield
    retracing.install()


def uninstall() -> None:
    convert_frame.trace_frame = getattr(convert_frame.trace_frame, "original", convert_frame.trace_frame)


def hazard(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    for i in mask.nonzero().flatten().tolist():
        x = x + x[i]
    return x


X, MASK = torch.arange(12.0).view(4, 3), torch.tensor([0, 1, 1, 0])


def test_installing_twice_wraps_once_and_uninstalling_restores() -> None:
    assert retracing.install()
    uninstall()
    uninstall()
    assert inspect.isfunction(convert_frame.trace_frame)
    with pytest.raises(Exception, match="data-dependent"):
        torch.compile(hazard, backend=Recording(fastpack=True))(X, MASK)


def test_another_backend_gets_the_error_that_stock_gives() -> None:
    def error() -> str:
        torch._dynamo.reset()
        with pytest.raises(Exception, match="data-dependent") as caught:
            torch.compile(hazard, backend=Recording(fastpack=False))(X, MASK)
        return f"{type(caught.value)}: {caught.value}"

    with_hook = error()
    uninstall()
    assert error() == with_hook


def test_another_backend_captures_and_breaks_as_without_the_hook() -> None:
    def branches(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        n = mask.sum().item()
        return x[:n] * 2 if n > 1 else x

    def graphs() -> list[str]:
        torch._dynamo.reset()
        backend = Recording(fastpack=False)
        torch.compile(branches, backend=backend)(X, MASK)
        return [gm.code for gm in backend.graphs]

    with_hook = graphs()
    uninstall()
    assert graphs() == with_hook


def test_fullgraph_keeps_the_original_error() -> None:
    def error(backend: Recording) -> str:
        torch._dynamo.reset()
        with pytest.raises(Exception, match="data-dependent") as caught:
            torch.compile(hazard, backend=backend, fullgraph=True)(X, MASK)
        return f"{type(caught.value)}: {caught.value}"

    assert error(Recording(fastpack=True)) == error(Recording(fastpack=False))


def test_the_middle_step_breaks_at_nonzero_and_captures_the_reads_after_it() -> None:
    backend = Recording(fastpack=True)
    assert torch.equal(torch.compile(hazard, backend=backend)(X, MASK), hazard(X, MASK))
    assert backend.calls("item") == [2]  # stock has two graphs, and breaks at `.tolist()`


def test_what_comes_before_the_hazard_is_still_read_in_the_graph() -> None:
    def reads_then_hazard(x: torch.Tensor, lengths: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return hazard(x[: lengths[0].item()], mask)

    backend = Recording(fastpack=True)
    lengths = torch.tensor([4])
    result = torch.compile(reads_then_hazard, backend=backend)(X, lengths, MASK)
    assert torch.equal(result, reads_then_hazard(X, lengths, MASK))
    assert backend.calls("item")[0] == 1


def test_a_break_in_a_loop_takes_the_last_step_instead_of_skipping_the_frame() -> None:
    def compares_in_loop(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        n = lengths.sum().item()
        for k in range(3):
            if n > k:
                x = x.sin() + k
        return x

    backend = Recording(fastpack=True)
    lengths = torch.tensor([1, 1])
    assert torch.equal(
        torch.compile(compares_in_loop, backend=backend)(X, lengths), compares_in_loop(X.clone(), lengths)
    )
    assert sum(backend.calls("sin")) == 2


def test_an_error_of_another_kind_is_raised_once_and_unchanged() -> None:
    attempts = []

    def fails(gm: GraphModule, example_inputs: list[Any]) -> None:
        attempts.append(gm)
        raise ZeroDivisionError("mine")

    fails._is_fastpack = True  # type: ignore[attr-defined]
    with pytest.raises(BackendCompilerFailed, match="mine"):
        torch.compile(lambda x: x + 1, backend=fails)(X)
    assert len(attempts) == 1


def test_a_backend_may_reject_what_was_captured() -> None:
    class Rejecting(Recording):
        def __call__(self, gm: GraphModule, example_inputs: list[Any], **kwargs: Any) -> Callable[..., Any]:
            if any(node.target == "item" for node in gm.graph.nodes):
                raise CaptureRejected("no scalar reads, please")
            return super().__call__(gm, example_inputs)

    def scales(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return x.cos() * lengths.max().item()

    backend = Rejecting(fastpack=True)
    lengths = torch.tensor([2, 3])
    assert torch.equal(torch.compile(scales, backend=backend)(X, lengths), scales(X, lengths))
    assert len(backend.graphs) == 2  # as in stock: a break at `.item()`


def test_a_thread_in_which_nothing_was_switched_on_captures_too() -> None:
    backend = Recording(fastpack=True)
    lengths = torch.tensor([2, 3])

    def scales(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return x.cos() * lengths.max().item()

    thread = threading.Thread(target=lambda: torch.compile(scales, backend=backend)(X, lengths))
    thread.start()
    thread.join()
    assert backend.calls("item") == [1]


def test_the_flags_are_as_before_after_a_trace() -> None:
    with config.patch(capture_dynamic_output_shape_ops=False):
        torch.compile(hazard, backend=Recording(fastpack=True))(X, MASK)
        assert (config.capture_scalar_outputs, config.capture_dynamic_output_shape_ops) == (True, False)


def test_each_compilation_starts_with_both_flags_again() -> None:
    def hazard_or_not(x: torch.Tensor, mask: torch.Tensor, plain: bool) -> torch.Tensor:
        return x[mask.bool()] * 2 if plain else hazard(x, mask)

    backend = Recording(fastpack=True)
    compiled = torch.compile(hazard_or_not, backend=backend)
    compiled(X, MASK, False)
    backend.graphs.clear()
    assert torch.equal(compiled(X, MASK, True), hazard_or_not(X, MASK, True))
    assert len(backend.graphs) == 1


def test_a_graph_break_is_not_counted_as_an_error_of_the_frame() -> None:
    counters.clear()
    torch.compile(hazard, backend=Recording(fastpack=True))(X, MASK)
    assert counters["frames"]["ok"] == counters["frames"]["total"]


def test_a_missing_private_name_is_one_warning_and_the_feature_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    uninstall()
    original = convert_frame.trace_frame
    monkeypatch.delattr(convert_frame, "trace_frame")
    with pytest.warns(RuntimeWarning, match=r"has no torch._dynamo.convert_frame.trace_frame \(checked with"):
        assert not retracing.install()
    monkeypatch.setattr(convert_frame, "trace_frame", lambda *arguments: original(*arguments), raising=False)
    with pytest.warns(RuntimeWarning, match="parameter 'code'"):
        assert not retracing.install()


def test_the_private_names_are_all_found_in_this_torch() -> None:
    assert isinstance(DynamoNames.find().convert_frame, ModuleType)


def marked(gm: GraphModule, example_inputs: list[Any], **kwargs: Any) -> Callable[..., Any]:
    return gm.forward


marked._is_fastpack = True  # type: ignore[attr-defined]


@functools.wraps(marked)
def around(gm: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
    return marked(gm, example_inputs)


@pytest.mark.all_cases
@pytest.mark.parametrize(
    ("backend", "options", "expected"),
    [
        (marked, None, True),
        (marked, {"a": 1}, True),
        (functools.partial(marked, options={}), None, True),
        (functools.partial(functools.partial(marked), options={}), None, True),
        (around, None, True),
        (lambda gm, inputs: gm.forward, None, False),
        (functools.partial(lambda gm, inputs: gm.forward), None, False),
        ("eager", None, False),
        ("aot_eager", None, False),
    ],
)
def test_the_marked_backend_is_recognised_in_what_torch_compile_puts_around_it(
    backend: Any, options: dict[str, Any] | None, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._dynamo.symbolic_convert import InstructionTranslator

    seen = []
    run = InstructionTranslator.run

    def recording_run(tx: Any) -> None:
        seen.append(retracing.is_fastpack(tx.output.compiler_fn))
        run(tx)

    monkeypatch.setattr(InstructionTranslator, "run", recording_run)
    torch.compile(lambda x: x + 1, backend=backend, options=options)(X)
    assert seen == [expected]


def test_the_marked_backend_is_recognised_under_ddp() -> None:
    pytest.importorskip("torch.distributed")
    from torch._dynamo.backends.distributed import DDPOptimizer

    for backend, expected in ((marked, True), (lambda gm, inputs: gm, False)):
        optimizer = DDPOptimizer(
            bucket_bytes_cap=1 << 25, backend_compile_fn=torch._TorchCompileWrapper(backend, None, None, None)
        )
        assert retracing.is_fastpack(optimizer.compile_fn) is expected


def test_wrappers_that_go_in_a_circle_end() -> None:
    circle = SimpleNamespace()
    circle.compiler_fn = circle
    assert not retracing.is_fastpack(circle)
