"""A trace that is taken from a file: eager mode's numbers without tracing."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fxpasses.metadata.runtime.prologue import live_prologues
from fxpasses.restart import pickling, recording, restoring
from fxpasses.restart.saved_trace import SavedTrace
from tests.fold.programs import Plan, Stack
from tests.restart.programs import BATCHES, Asking, Checkpointed, Counting, Mixture, Model, Returning, inputs
from tests.restart.restarting import counting, forget, traced_from, traces_of
from tests.rows.models import Model as Rows
from tests.rows.models import batch as rows_batch
from tests.rows.test_live_rows import loss
from tests.support import compiled, results

pytestmark = pytest.mark.skipif(torch.__version__ < "2.13", reason="traces are kept from torch 2.13 on")


def with_hook(model: nn.Module) -> nn.Module:
    def requires_grad(module: Any, args: Any, output: Tensor) -> None:
        output.requires_grad_(True)

    model.layers[0].register_forward_hook(requires_grad)
    return model


ROWS = [rows_batch(12, 5, 7), rows_batch(3, 9, 1)]
TOKENS = [(torch.arange(12).view(2, 6),)]
PROGRAMS: dict[str, tuple[Callable[[], nn.Module], Any, dict[str, Any]]] = {
    "reads": (Model, BATCHES, {}),
    "asks": (Asking, BATCHES[:1], {}),
    "asks_both": (Asking, BATCHES, {}),
    "mixture": (Mixture, BATCHES, {}),
    "mixture_in_slices": (Mixture, BATCHES, {"experts": "slices"}),
    "checkpoints": (Checkpointed, BATCHES, {}),
    "writes": (Counting, BATCHES, {}),
    "returns": (Returning, BATCHES, {}),
    "hook": (lambda: with_hook(Model()), BATCHES, {}),
    "sizes": (Model, [inputs(2, 3), inputs(2, 3, tokens=8), inputs(2, 3, tokens=10)], {}),
    "fullgraph": (Model, BATCHES, {"fullgraph": True}),
    "dynamic": (Model, [inputs(2, 3), inputs(4, 5, tokens=9)], {"dynamic": True}),
    "live_rows": (lambda: Rows(loss), ROWS, {"tolerance": 1e-6}),
    "all_rows_then_live_rows": (lambda: Rows(loss), [rows_batch(12, 12, labelled=1.0), *ROWS], {"tolerance": 1e-6}),
    "folded": (lambda: Stack(Plan(("attention",) * 4, checkpointed=frozenset({1}))), TOKENS, {"lowering": "aot_eager"}),
    "autocast": (lambda: Stack(Plan(("block",) * 2, autocast=True)), TOKENS, {"tolerance": 1e-6}),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_is_not_traced_again(name: str) -> None:
    torch.manual_seed(0)
    make, batches, options = PROGRAMS[name]
    model = make()
    traces = traces_of(model, batches, **{key: value for key, value in options.items() if key != "tolerance"})
    assert traced_from(traces, model, batches, **options) == []
    assert recording.saved() and all(trace in traces for trace in recording.saved())  # kept for the next start


def test_batches_of_other_kinds_are_traced() -> None:
    model = Asking()
    traces = traces_of(model, BATCHES[:1])
    assert traced_from(traces, model, BATCHES) == ["forward"]
    traces = traces_of(model := Model(), BATCHES)
    assert traced_from(traces, model, [inputs(2, 3, tokens=7), *BATCHES]) == ["forward"] * 1


def test_sizes_that_were_seen_before_count() -> None:
    """The second size is dynamic, as without a restart."""
    model = Model()
    traces = traces_of(model, [inputs(2, 3)])
    batches = [inputs(2, 3), *(inputs(2, 3, tokens=tokens) for tokens in (7, 8, 9))]
    assert traced_from(traces, model, batches) == ["forward"]


def test_globals_of_the_program_stay() -> None:
    model = Model()
    traces = traces_of(model, BATCHES)
    name = pickling.loads(traces[0].body, FakeTensorMode(shape_env=ShapeEnv())).name
    forget()
    restoring.load(traces)
    run = compiled(model)
    namespace = Model.forward.__globals__
    namespace[name] = "the program's"
    try:
        with counting() as found:
            results(run, BATCHES[0])
        assert found == [] and namespace[name] == "the program's"
    finally:
        del namespace[name]


def test_a_reset_frees_what_a_trace_holds() -> None:
    model = Asking()
    traces = traces_of(model, BATCHES)
    forget()
    gc.collect()
    before = len(live_prologues())
    for _ in range(3):
        assert traced_from(traces, model, BATCHES) == []
    forget()
    traced_from(traces, model, BATCHES)
    forget()
    gc.collect()
    assert len(live_prologues()) <= before + 2


def test_lazy_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.loss.heads import batch
    from tests.loss.test_lazy_outputs import Model as Lazy

    for owner, name, value in _SMALL:
        monkeypatch.setattr(owner, name, value)
    torch.manual_seed(0)
    model, given = Lazy(), batch(3, 7)
    forget()
    recording.start()
    compiled(model, outputs="lazy")(*given)["loss"].backward()
    traces = recording.saved()
    assert len(traces) == 1
    forget()
    restoring.load(traces)
    with counting() as found:
        actual, expected = compiled(model, outputs="lazy")(*given), model(*given)
    assert found == [] and type(actual["logits"]).__name__ == "LazyTensor"
    torch.testing.assert_close(actual["loss"], expected["loss"])
    torch.testing.assert_close(actual["logits"] + 0, expected["logits"])


def _small() -> list[tuple[Any, str, Any]]:
    from fxpasses.loss import chunks, region

    return [
        (region, "LEAST_COLUMNS", 16),
        (region, "LEAST_BYTES", 0),
        (chunks, "_LEAST_ROWS", 5),
        (chunks, "CHUNK_BYTES", 1),
    ]


_SMALL = _small()


def test_a_trace_is_plain_data() -> None:
    (trace,) = traces_of(Model(), BATCHES)
    assert isinstance(trace, SavedTrace) and isinstance(trace.head, bytes) and isinstance(trace.body, bytes)


def test_inputs_that_share_memory() -> None:
    def writes(a: Tensor, b: Tensor) -> Tensor:
        a.mul_(2)
        return b * 3

    base = torch.arange(8.0)
    traces = traces_of(writes, [(torch.arange(4.0), torch.arange(4.0))], "aot_eager")
    forget()
    restoring.load(traces)
    run = compiled(writes, "aot_eager")
    with counting() as found:
        actual = run(base[0:4], base[2:6])
    assert found and torch.equal(actual, torch.tensor([2.0 * 2, 3.0 * 2, 4.0, 5.0]) * 3)


def test_a_frame_in_a_mode_is_traced() -> None:
    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    model = Model()
    traces = traces_of(model, BATCHES)
    forget()
    restoring.load(traces)
    run = compiled(model)
    with counting() as found:
        run(*BATCHES[0])
        assert found == []
        with Mode():
            run(*BATCHES[0])
    assert found
