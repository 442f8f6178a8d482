"""What a graph assumes of its batch: said in words, guarded, and never a wrong result."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch._dynamo.utils
from torch import Tensor
from torch._dynamo.variables import lists
from torch._dynamo.variables.builtin import BuiltinVariable

import fxpasses.inspect
from fxpasses import AssumptionError, MetadataError
from fxpasses.dynamo import dynamo_names, guarding, variants
from fxpasses.metadata.runtime import batch_cache, transfers
from tests.support import assert_same, compiled, results

X = torch.linspace(-1, 1, 24).view(12, 2)


@pytest.fixture(autouse=True)
def nothing_is_remembered(capture_flags: None) -> None:
    batch_cache.batch_cache.clear()
    variants.forget()


def lengths(*values: int) -> Tensor:
    return torch.tensor(values)


def longest_decides(x: Tensor, lengths: Tensor) -> Tensor:
    return x.sin() if lengths.max().item() > 6 else x.cos() + lengths[0]


def layers(x: Tensor, lengths: Tensor) -> Tensor:
    for _ in range(5):
        total = lengths.sum().item()
        x = x + torch.zeros(total, 2) if lengths.max() > 6 else x - torch.zeros(total, 2)
    return x


def test_layers_that_ask_the_same_assume_it_once() -> None:
    record = assert_same(layers, [(X, lengths(8, 4))])
    (capture, *_), *_ = [graph.reports for graph in record.graphs]
    assert capture.figures == {"assumptions": 1}
    line = layers.__code__.co_firstlineno + 3
    assert capture.changes == [f"assumed: (lengths.max() > 6), at test_guarding.py:{line}"]


def test_an_equal_total_is_asserted_and_not_guarded() -> None:
    program = compiled(layers)
    program(X, lengths(8, 4))
    with pytest.raises(MetadataError, match=r"lengths.sum\(\).*11"):
        program(X, lengths(8, 3))


def test_bounds_that_others_imply_are_left_out() -> None:
    def steps(x: Tensor, lengths: Tensor) -> Tensor:
        n = lengths.max().item()
        while n > 2:
            x, n = x + 1, n - 2
        return x

    record = assert_same(steps, [(X, lengths(9, 3))])
    texts = record.graphs[0].reports[0].changes
    assert len(texts) == 2, texts  # the last step taken and the first one not taken


def test_sizes_and_numbers_in_one_condition() -> None:
    def half(x: Tensor, lengths: Tensor) -> Tensor:
        return x * 2 if 2 * lengths.max().item() > x.shape[0] else x

    batches = [(torch.randn(size, 2), lengths(*pair)) for size in (8, 10, 12, 14) for pair in ((5, 3), (2, 4))]
    record = assert_same(half, batches, dynamic=True)
    assert len(record.graphs) == 2
    assert "lengths.max()" in str(record) and "x.size()[0]" in str(record)


def test_one_transfer_for_guard_and_prologue(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen by what starts a copy to the host: on the CPU nothing does, so a copy is simulated."""
    started = []

    def to_host(tensors: Any, cache: Any) -> list[Tensor]:
        fresh = [t for t in tensors if cache.get("copied", [t]) is None]
        started.append(len(fresh)) if fresh else None
        for tensor in fresh:
            cache.put("copied", [tensor], batch_cache.State.of([tensor]), True)
        return transfers.to_host(tensors, cache)

    def two_inputs(x: Tensor, lengths: Tensor, positions: Tensor) -> Tensor:
        mask = torch.zeros(12, 12)
        mask[: positions.max().item()] = 1
        return x.sin() + (mask @ x if lengths.max().item() > 6 else x)

    program = compiled(two_inputs)
    batch = (X, lengths(8, 4), torch.arange(12))
    program(*batch)
    monkeypatch.setattr(guarding, "to_host", to_host)
    monkeypatch.setattr("fxpasses.metadata.runtime.prologue.to_host", to_host)
    program(X, lengths(9, 3), torch.arange(12))
    assert started == [2]


def test_the_guard_computes_once_for_a_batch() -> None:
    program, batch = compiled(longest_decides), lengths(8, 4)
    program(X, batch)
    program(X, batch)
    before = len(batch_cache.batch_cache)
    program(X, batch)
    assert len(batch_cache.batch_cache) == before
    batch[0] = 2  # an edit in place chooses otherwise
    torch.testing.assert_close(program(X, batch), longest_decides(X, batch))


def test_variants_end_before_dynamo_gives_up() -> None:
    def loop(x: Tensor, lengths: Tensor) -> Tensor:
        for step in range(lengths.max().item()):
            x = x + step
        return x

    program = compiled(loop)
    with pytest.warns(UserWarning, match=r"compiled 6 times because batches differ.*lengths.max\(\)"):
        for n in range(2, 14):
            torch.testing.assert_close(program(X, lengths(n, 1)), loop(X, lengths(n, 1)))


def test_a_reset_gives_a_frame_its_hints_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variants, "_MOST", 2)
    for _ in range(2):
        with pytest.warns(UserWarning, match="compiled 2 times because batches differ"):
            record = assert_same(longest_decides, [(X, lengths(n, 4)) for n in (8, 2)])
        assert "assumed" in str(record)
        torch._dynamo.reset()


@pytest.fixture
def no_guards(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Any:
        raise dynamo_names.MissingName("torch._dynamo.source.ShapeEnvSource")

    monkeypatch.setattr(guarding, "check_guard_names", missing)


def test_without_guards_a_broken_assumption_raises(no_guards: None) -> None:
    with fxpasses.inspect.record() as record:
        program = compiled(longest_decides)
        torch.testing.assert_close(program(X, lengths(8, 4)), longest_decides(X, lengths(8, 4)))
    assert "a batch that breaks one raises AssumptionError" in str(record)
    torch.testing.assert_close(program(X, lengths(7, 4)), longest_decides(X, lengths(7, 4)))
    with pytest.raises(AssumptionError, match=r"lengths.max\(\) > 6, at .*but lengths.max\(\) is 5.*fastpack.capture"):
        program(X, lengths(5, 5))


def test_without_guards_a_size_may_be_part_of_it(no_guards: None) -> None:
    def half(x: Tensor, lengths: Tensor) -> Tensor:
        return x * 2 if 2 * lengths.max().item() > x.shape[0] else x

    program = compiled(half, dynamic=True)
    program(torch.randn(8, 2), lengths(5, 3))
    program(torch.randn(12, 2), lengths(7, 5))
    with pytest.raises(AssumptionError):
        program(torch.randn(12, 2), lengths(6, 6))


def test_a_guard_that_cannot_be_made_means_a_trace_without_hints(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr(guarding, "guard", fails)
    with pytest.warns(UserWarning, match="feature 'value hints' failed .*a defect") as said:
        record = assert_same(longest_decides, [(X, lengths(8, 4)), (X, lengths(3, 3))], strict=False)
    assert len(said) == 1
    assert all(report.pass_name != "capture" for graph in record.graphs[1:] for report in graph.reports)


def test_off_means_off() -> None:
    record = assert_same(longest_decides, [(X, lengths(8, 4)), (X, lengths(3, 3))], capture="off")
    assert "assumed" not in str(record)
    assert len(record.graphs) > 1


def test_nothing_stays_installed() -> None:
    names = (torch._dynamo.utils, "run_node"), (BuiltinVariable, "call_bool"), (lists, "iter_contains")
    before = [getattr(owner, name) for owner, name in names]
    inside = []

    def spy(gm: Any, inputs: Any) -> Any:
        inside.extend(getattr(owner, name) for owner, name in names)
        return gm.forward

    spy._is_fastpack = True  # type: ignore[attr-defined]
    torch.compile(longest_decides, backend=spy)(X, lengths(8, 4))
    assert not any(one is other for one, other in zip(inside, before, strict=True))
    assert [getattr(owner, name) for owner, name in names] == before


def test_another_backend_meanwhile_gets_no_hints() -> None:
    def stock() -> Any:
        def backend(gm: Any, inputs: Any) -> Any:
            graphs.append(gm)
            return gm.forward

        graphs: list[Any] = []
        return backend, graphs

    in_thread, inside, threads = stock(), stock(), []

    def nested(gm: Any, inputs: Any) -> Any:
        compiled_in_thread = torch.compile(longest_decides, backend=in_thread[0])
        threads.append(threading.Thread(target=compiled_in_thread, args=(X, lengths(8, 4))))
        threads[0].start()  # waits for Dynamo's lock, which this thread holds while it compiles
        torch.compile(longest_decides, backend=inside[0])(X, lengths(8, 4))
        return gm.forward

    nested._is_fastpack = True  # type: ignore[attr-defined]
    torch.compile(longest_decides, backend=nested)(X, lengths(8, 4))
    threads[0].join(timeout=60)
    assert not threads[0].is_alive()
    assert [len(graphs) for _, graphs in (in_thread, inside)] == [2, 2]  # stock breaks at the branch


def test_an_input_that_the_graph_does_not_use_is_not_guarded() -> None:
    def program(x: Tensor, lengths: Tensor, labels: Tensor) -> Tensor:
        return labels.dim() * longest_decides(x, lengths)  # a constant: Dynamo removes the input again

    labels = torch.ones(3, dtype=torch.int64)
    record = assert_same(program, [(X, lengths(8, 4), labels), (X, lengths(8, 3), labels)], fullgraph=True)
    assert len(record.graphs) == 1


def test_what_a_router_decides_has_no_hint() -> None:
    def routed(x: Tensor, weight: Tensor) -> Tensor:
        chosen = (x @ weight).argmax(-1)
        return x * 2 if chosen.max().item() > 0 else x

    torch.manual_seed(0)
    record = assert_same(routed, [(X, torch.randn(2, 3, requires_grad=True))])
    assert "assumed" not in str(record)


def test_a_written_input_is_read_as_it_is_at_that_moment() -> None:
    def writes(x: Tensor, lengths: Tensor) -> Tensor:
        before = lengths.max().item()
        lengths.add_(4)
        x = x * 2 if before > 6 else x
        return x + 1 if lengths.max().item() > 8 else x

    assert_same(writes, [(X, lengths(*pair)) for pair in ((8, 4), (3, 4), (6, 6), (9, 9), (3, 4))])


def test_a_write_through_a_layer_is_not_overlooked() -> None:
    def through_a_view(x: Tensor, lengths: Tensor) -> Tensor:
        scratch = torch.zeros(2, dtype=torch.long)
        scratch[:] = lengths
        scratch.copy_(x.abs().sum(0).long())  # an activation overwrites metadata
        return x * 2 if scratch.max().item() > 2 else x

    record = assert_same(through_a_view, [(X, lengths(8, 4)), (X * 9, lengths(1, 1))])
    assert "assumed" not in str(record)


def test_parameters_and_gradients_are_those_of_eager_mode() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))

    class Chooses(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            x = self.inner(x)
            return x.sin() if (lengths > 6).any() else x.cos()

    program = Chooses()
    quick = compiled(program, "aot_eager")
    for pair in ((8, 4), (3, 4), (7, 1)):
        torch.testing.assert_close(results(quick, (X, lengths(*pair))), results(program, (X, lengths(*pair))))
