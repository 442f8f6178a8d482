"""A trace that is taken from a file: eager mode's numbers without tracing, and never in place of another program."""

from __future__ import annotations

import abc
import functools
import gc
import importlib
import os
import pickle
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils.checkpoint import checkpoint

from fxpasses.compiler import backend
from fxpasses.experts.runtime import grouped_linear
from fxpasses.metadata.runtime.prologue import live_prologues
from fxpasses.restart import dynamo_state, pickling, program, recording, restoring
from fxpasses.restart.saved_trace import SavedTrace
from tests.fold.programs import Plan, Stack
from tests.restart.restarting import counting, forget, traced_from, traces_of
from tests.rows.models import Model as Rows
from tests.rows.models import batch as rows_batch
from tests.rows.test_live_rows import loss
from tests.support import compiled, results

pytestmark = pytest.mark.skipif(torch.__version__ < "2.13", reason="traces are kept from torch 2.13 on")
WIDTH = 4


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale, self.kind = 0.5, "gelu"

    def forward(self, x: Tensor) -> Tensor:
        act = getattr(F, self.kind)
        return x + self.scale * act(self.linear(self.norm(x)))


class Model(nn.Module):
    """Two layers, over a mask that each makes of the batch's lengths."""

    def __init__(self, layer: Callable[[], nn.Module] = Layer) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(2))
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        for layer in self.layers:
            longest = lengths.max().item()
            mask = torch.arange(x.shape[1])[None] < lengths[:, None]
            x = layer(x) * mask[..., None] * longest
        return x


class Asking(Model):
    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        return super().forward(x, lengths).exp() if lengths.max().item() > 3 else super().forward(x, lengths)


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, 3), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        best = self.router(tokens).argmax(-1)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            (rows,) = torch.where(best == number)
            out.index_add_(0, rows, expert(tokens[rows]))
        return out.view_as(x)


class Checkpointed(Model):
    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


class Counting(Model):
    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        with torch.no_grad():
            self.steps += 1
        return super().forward(x, lengths) + self.steps


class Returning(Model):
    def forward(self, x: Tensor, lengths: Tensor) -> dict[str, Any]:
        y = super().forward(x, lengths)
        return {"y": y, "shape": y.shape, "view": y.transpose(0, 1), "x": x}


def inputs(*lengths: int, tokens: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(len(lengths), tokens, WIDTH, generator=generator).requires_grad_()
    return x, torch.tensor(lengths)


def with_hook(model: nn.Module) -> nn.Module:
    def requires_grad(module: Any, args: Any, output: Tensor) -> None:
        output.requires_grad_(True)

    model.layers[0].register_forward_hook(requires_grad)
    return model


BATCHES = [inputs(2, 3), inputs(6, 1)]
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


def changed(model: Model, **attributes: Any) -> None:
    for name, value in attributes.items():
        setattr(model.layers[1], name, value)


def frozen(model: Model) -> None:
    model.layers[0].linear.weight.requires_grad_(False)


def tied(model: Model) -> None:
    model.layers[1].linear = model.layers[0].linear


def hooked(model: Model) -> None:
    model.layers[1].register_forward_hook(lambda module, args, output: output * 2)


def widened(model: Model) -> None:
    model.layers[1].linear = nn.Sequential(nn.Linear(WIDTH, 7), nn.Linear(7, WIDTH))


def of_another_class(model: Model) -> None:
    class Other(Layer):
        def forward(self, x: Tensor) -> Tensor:
            return -super().forward(x)

    model.layers[1] = Other()


def in_another_method(model: Model) -> None:
    model.layers[1].forward = lambda x: x * 3  # type: ignore[method-assign]


CHANGES: dict[str, Callable[[Model], None]] = {
    "constant": functools.partial(changed, scale=0.25),
    "text": functools.partial(changed, kind="relu"),
    "type_of_a_constant": functools.partial(changed, scale=1),
    "weight": widened,
    "dtype": lambda model: model.double() and None,
    "gradient": frozen,
    "tied": tied,
    "hook": hooked,
    "class": of_another_class,
    "method": in_another_method,
    "one_layer_less": lambda model: model.layers.__delitem__(1),
    "evaluation": lambda model: model.eval() and None,
    "no_bias": lambda model: model.layers[0].linear.register_parameter("bias", None),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_trace_of_another_program_is_not_used(name: str) -> None:
    torch.manual_seed(0)
    model = Model()
    traces = traces_of(model, BATCHES)
    CHANGES[name](model)
    batches = [(x.detach().double().requires_grad_(), n) for x, n in BATCHES] if name == "dtype" else BATCHES
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert traced_from(traces, model, batches)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"fold": "off"}, "an option"),
        ({"fullgraph": True}, "`fullgraph`"),
        ({"file": "x"}, "the file of "),
        ({"setting": "x"}, "the setting torch._inductor.config"),
        ({"modules": "x"}, "what its modules are and own"),
    ],
)
def test_a_trace_under_other_settings_is_not_used_and_says_why(
    change: dict[str, Any], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model()
    traces = traces_of(model, BATCHES)
    if "file" in change:
        monkeypatch.setattr(program, "file_digest", lambda name: "another")
        change = {}
    elif "modules" in change:
        monkeypatch.setattr(program, "modules_digest", lambda *given: "another")
        change = {}
    inductor: Any = torch._inductor.config
    patch = {"max_fusion_size": 3} if "setting" in change else {}
    options = {name: value for name, value in change.items() if name != "setting"}
    text = f"forward .* is traced anew: its saved trace is not used, because {why}"
    with inductor.patch(patch), pytest.warns(UserWarning, match=text):
        assert traced_from(traces, model, BATCHES, **options)


def test_a_changed_setting_of_the_process_is_seen() -> None:
    before = program.settings()
    functorch: Any = torch._functorch.config
    with functorch.patch(donated_buffer=not functorch.donated_buffer):
        assert program.differs(before, program.settings()) == "torch._functorch.config"
    with torch.device("meta"):
        assert program.differs(before, program.settings()) == "device"
    assert not program.differs(before, program.settings())


@pytest.mark.parametrize("part", ["head", "body"])
def test_damaged_traces_are_left_alone(part: str) -> None:
    model = Model()
    (trace,) = traces_of(model, BATCHES, strict=False)
    whole = getattr(trace, part)
    for content in (b"", whole[: len(whole) // 2], b"x" * 100, pickle.dumps(None)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = traced_from([replace(trace, **{part: content})], model, BATCHES, strict=False)
        assert found == ["forward"]


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (restoring, "_guards"),
        (restoring, "_check_batch"),
        (restoring, "_examples"),
        (restoring, "set_tracked_fakes"),
        (restoring, "RestoredFrame"),
        (restoring, "add_automatic_dynamic"),
        (dynamo_state, "CheckFunctionManager"),
        (pickling, "no_dispatch"),
        (backend, "lower"),
    ],
)
def test_what_fails_while_a_trace_is_restored_has_the_frame_traced(
    owner: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model()
    traces = traces_of(model, BATCHES, strict=False)
    original, failures = getattr(owner, name), []

    def fails(*args: Any, **kwargs: Any) -> Any:
        if not failures:
            failures.append(name)
            raise ZeroDivisionError("a defect")
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, fails)
    with pytest.warns(UserWarning, match=r"taking a trace from a file failed \(ZeroDivisionError: a defect\)"):
        assert traced_from(traces, model, BATCHES, strict=False) == ["forward"]
    assert failures
    traces = traces_of(model, BATCHES)
    failures.clear()
    with pytest.raises(Exception, match="a defect"):
        traced_from(traces, model, BATCHES)


def test_what_fails_while_a_trace_is_kept_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any) -> Any:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr(program, "sources", fails)
    recording.start()
    assert results(compiled(Model()), BATCHES[0])
    assert [*recording.refusals().values()] == ["a defect"] and not recording.saved()


def test_frames_that_another_process_cannot_have_are_traced() -> None:
    class Breaks(Model):
        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            y = super().forward(x, lengths)
            torch._dynamo.graph_break()
            return y + 1

    recording.start()
    forget()
    model = Breaks()
    results(compiled(model), BATCHES[0])
    assert any("graph break" in why for why in recording.refusals().values())


def test_nothing_is_kept_unless_it_is_asked_for() -> None:
    forget()
    results(compiled(Model()), BATCHES[0])
    assert not recording.saved() and not recording.refusals()


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
    globals()[name] = "the program's"
    try:
        with counting() as found:
            results(run, BATCHES[0])
        assert found == [] and globals()[name] == "the program's"
    finally:
        del globals()[name]


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
    assert grouped_linear is not None


def replaced(owner: type, name: str, function: Any) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda monkeypatch: monkeypatch.setattr(owner, name, function)


def twice(self: Any, x: Tensor) -> Tensor:
    return F.linear(x, self.weight, self.bias) * 2


class Helper:
    factor = 2.0

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.factor

    def __len__(self) -> int:
        return 3


class WithHelper(Model):
    def __init__(self) -> None:
        super().__init__()
        self.helper = Helper()

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        return self.helper(super().forward(x, lengths)) * len(self.helper)


class Meta(type):
    def factor(cls) -> float:
        return 2.0


class OfMeta(metaclass=Meta):
    pass


class Protocol(abc.ABC):  # noqa: B024
    pass


class OfWhatItIs(Model):
    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        x = super().forward(x, lengths) * OfMeta.factor()
        return x * 3 if isinstance(self, Protocol) else x


@pytest.mark.parametrize("change", ["metaclass", "registry", "autocast", "hook"])
def test_what_is_not_guarded_is_compared(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = OfWhatItIs()
    traces = traces_of(model, BATCHES)
    assert traced_from(traces, model, BATCHES) == []
    dtype, handle = torch.get_autocast_dtype("cpu"), None
    try:
        if change == "metaclass":
            monkeypatch.setattr(Meta, "factor", lambda cls: 5.0)
        elif change == "registry":
            Protocol.register(OfWhatItIs)
        elif change == "autocast":
            torch.set_autocast_dtype("cpu", torch.float16)
        else:
            handle = nn.modules.module.register_module_forward_hook(doubled)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert traced_from(traces, model, BATCHES)
    finally:
        torch.set_autocast_dtype("cpu", dtype)
        if handle is not None:
            handle.remove()


def doubled(module: nn.Module, args: Any, output: Any) -> Any:
    return output * 2 if isinstance(module, nn.Linear) else output


def layer_of(factor: float) -> type[nn.Module]:
    if factor == 2.0:

        class L(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return x * 2.0
    else:

        class L(nn.Module):  # type: ignore[no-redef]
            def forward(self, x: Tensor) -> Tensor:
                return x + 1.0

    return L


def test_classes_of_one_name_are_told_apart() -> None:
    kinds = [layer_of(2.0), layer_of(1.0)]
    batches = [(torch.ones(2, requires_grad=True),)]
    traces = traces_of(nn.Sequential(*(kind() for kind in kinds)), batches)
    assert traced_from(traces, nn.Sequential(*(kind() for kind in kinds)), batches) == []
    assert traced_from(traces, nn.Sequential(*(kind() for kind in reversed(kinds))), batches)


REPLACED = {
    "method_of_the_program": replaced(Layer, "forward", lambda self, x: x * 5),
    "method_of_torch": replaced(nn.Linear, "forward", twice),
    "call_of_a_helper": replaced(Helper, "__call__", lambda self, x: x - 1),
    "length_of_a_helper": replaced(Helper, "__len__", lambda self: 5),
    "constant_of_a_class": replaced(Helper, "factor", 3.0),
}


@pytest.mark.parametrize("name", REPLACED)
def test_what_a_class_has_now_counts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = WithHelper()
    traces = traces_of(model, BATCHES)
    assert traced_from(traces, model, BATCHES) == []
    REPLACED[name](monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert traced_from(traces, model, BATCHES)


@torch._dynamo.assume_constant_result
def constant_result() -> int:
    return 3


def reads_a_constant(x: Tensor) -> Tensor:
    return x * constant_result()


def reads_the_environment(x: Tensor) -> Tensor:
    return x * sum(len(os.getenv(f"A_{name}", "")) for name in "AB")


def reads_variables(x: Tensor) -> Tensor:
    if "FXPASSES_TEST_A" in os.environ:
        x = x + 1
    return x * float(os.environ.get("FXPASSES_TEST_B", "2")) * len(os.getenv("FXPASSES_TEST_C", "abc"))


@pytest.mark.parametrize(
    ("function", "why"), [(reads_a_constant, "constant"), (reads_the_environment, "the environment")]
)
def test_what_dynamo_does_not_guard_is_not_kept(function: Any, why: str) -> None:
    recording.start()
    forget()
    compiled(function)(torch.ones(2))
    assert any(why in reason for reason in recording.refusals().values()), recording.refusals()


@pytest.mark.parametrize("name", ["A", "B", "C"])
def test_variables_of_the_environment_count(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    batches = [(torch.ones(2),)]
    traces = traces_of(reads_variables, batches)
    assert traced_from(traces, reads_variables, batches) == []
    monkeypatch.setenv(f"FXPASSES_TEST_{name}", "3")
    with pytest.warns(UserWarning, match=f"the variable FXPASSES_TEST_{name} of the environment is another"):
        assert traced_from(traces, reads_variables, batches)


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


def test_a_file_that_was_written_to_while_the_process_ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "a_module_of_this_test.py"
    path.write_text("def double(x): return x * 2\n")
    module = importlib.import_module(path.stem)
    os.utime(path, (1, 1))
    forget()
    traces = traces_of(module.double, [(torch.ones(2),)])
    assert traced_from(traces, module.double, [(torch.ones(2),)]) == []
    path.write_text("def double(x): return x * 3\n")
    recording.start()
    forget()
    compiled(module.double)(torch.ones(2))
    assert "was written to after the process had begun" in " ".join(recording.refusals().values())


def test_operators_of_the_program() -> None:
    definition = torch.library.custom_op(
        "fxpasses_tests::triple", lambda x: x * 3, mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    definition.register_fake(lambda x: torch.empty_like(x))

    def calls(x: Tensor) -> Tensor:
        return torch.ops.fxpasses_tests.triple(x) + 1

    traces = traces_of(calls, [(torch.ones(2),)])
    assert traced_from(traces, calls, [(torch.ones(2),)]) == []
    definition.register_fake(lambda x: torch.zeros_like(x))
    with pytest.warns(UserWarning, match="the operator fxpasses_tests.triple.default is another"):
        assert traced_from(traces, calls, [(torch.ones(2),)])


def test_the_order_of_sets_counts() -> None:
    def loops(x: Tensor) -> Tensor:
        for name in {"a", "bb", "ccc"}:
            x = x * 2 + len(name)
        return x

    traces = traces_of(loops, [(torch.ones(2),)])
    assert traced_from(traces, loops, [(torch.ones(2),)]) == []
    with pytest.MonkeyPatch.context() as patch, pytest.warns(UserWarning, match="the order of sets"):
        patch.setattr(program, "order_of_sets", lambda: "another")
        assert traced_from(traces, loops, [(torch.ones(2),)])


_read = os.getenv


def reads_by_another_name(x: Tensor) -> Tensor:
    return reads_variables(x) * len(_read("FXPASSES_TEST_D", "abcd"))


def test_variables_that_are_read_by_another_name() -> None:
    recording.start()
    forget()
    compiled(reads_by_another_name)(torch.ones(2))
    assert recording.saved() or recording.refusals()
    assert not any("FXPASSES_TEST_D" not in head.environment for head in map(head_of, recording.saved()))


def head_of(trace: SavedTrace) -> Any:
    return pickle.loads(trace.head)


def test_a_plan_of_memory_for_any_size_is_not_saved() -> None:
    """It is for the batch that it was made for: another process may begin with a much larger one."""
    forget()
    recording.start()
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
    run = compiled(model, "aot_eager", memory=1 << 50)
    for rows in (4, 6):
        run(torch.randn(rows, WIDTH)).sum().backward()
    assert len(recording.saved()) == 1 and "its memory is planned" in str(recording.refusals())
