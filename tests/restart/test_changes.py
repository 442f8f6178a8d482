"""A trace is never taken in place of a program that has changed since it was kept."""

from __future__ import annotations

import abc
import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxpasses.restart import program
from tests.restart.programs import BATCHES, WIDTH, Layer, Model, reads_variables
from tests.restart.restarting import traced_from, traces_of

pytestmark = pytest.mark.skipif(torch.__version__ < "2.13", reason="traces are kept from torch 2.13 on")


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


@pytest.mark.parametrize("name", ["A", "B", "C"])
def test_variables_of_the_environment_count(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    batches = [(torch.ones(2),)]
    traces = traces_of(reads_variables, batches)
    assert traced_from(traces, reads_variables, batches) == []
    monkeypatch.setenv(f"FXPASSES_TEST_{name}", "3")
    with pytest.warns(UserWarning, match=f"the variable FXPASSES_TEST_{name} of the environment is another"):
        assert traced_from(traces, reads_variables, batches)


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
