"""Hooks that are registered again before each step: traced once if they are idempotent, else as often as they run."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import fxpasses.inspect
from fxpasses.dynamo.rules.idempotent_hooks import distinct
from tests.support import compiled

LIMIT = 2


def sets_grad(module: nn.Module, args: Any, output: Tensor) -> None:
    output.requires_grad_(True)


def sets_grad_of_the_input(module: nn.Module, args: Any, output: Tensor) -> None:
    args[0].requires_grad_()


def doubles(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * 2


def counts(module: Any, args: Any, output: Tensor) -> None:
    module.calls += 1


def reads_a_global(module: nn.Module, args: Any, output: Tensor) -> None:
    output.requires_grad_(LIMIT > 1)


def with_default(module: nn.Module, args: Any, output: Tensor, value: bool = True) -> None:
    output.requires_grad_(value)


def replaces(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return args[0].requires_grad_(True)


def loops(module: nn.Module, args: Any, output: Tensor) -> None:
    while True:
        output.requires_grad_(True)


def fresh() -> Callable[..., None]:
    """Another function each time, as transformers makes them."""

    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        output.requires_grad_(True)

    return hook


returns_its_output = lambda module, args, output: output.requires_grad_(True)  # noqa: E731


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.embedding = nn.Embedding(8, 4)
        self.head = nn.Linear(4, 8)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embedding(ids))


def step(model: nn.Module, program: Any, ids: Tensor) -> list[Any]:
    model.zero_grad()
    output = program(ids)
    output.sum().backward()
    return [output, *(parameter.grad for parameter in model.parameters())]


def graphs_of(*hooks: Callable[[], Any], steps: int = 4) -> int:
    """How many graphs `steps` steps make, with one more of each hook in each step; each equals eager mode's."""
    torch.manual_seed(0)
    eager = Model()
    model = copy.deepcopy(eager)
    with fxpasses.inspect.record() as record:
        program = compiled(model, "aot_eager")
        for number in range(steps):
            for owner in (eager, model):
                for hook in hooks:
                    owner.embedding.register_forward_hook(hook())
            ids = torch.tensor([1, 2, number])
            torch.testing.assert_close(step(model, program, ids), step(eager, eager, ids), rtol=0, atol=0)
    return len(record.graphs)


@pytest.mark.parametrize(
    "hook", [lambda: sets_grad, fresh, lambda: returns_its_output], ids=["one", "fresh", "returning"]
)
def test_an_idempotent_hook_that_is_registered_in_each_step_is_traced_once(hook: Any) -> None:
    assert graphs_of(hook) == 1


def test_a_hook_that_changes_the_output_runs_as_often_as_it_is_registered() -> None:
    assert graphs_of(lambda: doubles, steps=3) == 3


def test_idempotent_hooks_before_another_one_are_traced_as_one() -> None:
    torch.manual_seed(0)
    eager = Model()
    eager.embedding.register_forward_hook(doubles)
    model = copy.deepcopy(eager)
    with fxpasses.inspect.record() as record:
        program = compiled(model, "aot_eager")
        for number in range(4):
            for owner in (eager, model):
                owner.embedding.register_forward_hook(fresh(), prepend=number % 2 == 0)
            ids = torch.tensor([1, 2, 3])
            torch.testing.assert_close(step(model, program, ids), step(eager, eager, ids), rtol=0, atol=0)
    assert len(record.graphs) == 2  # in the first step, there is none after `doubles`


def test_another_hook_that_comes_or_goes_is_seen() -> None:
    torch.manual_seed(0)
    model = Model()
    model.embedding.register_forward_hook(fresh())
    program, ids = compiled(model, "aot_eager"), torch.tensor([1, 2, 3])
    plain = program(ids)
    handle = model.embedding.register_forward_hook(doubles)
    assert torch.equal(program(ids), model(ids)) and not torch.equal(program(ids), plain)
    handle.remove()
    assert torch.equal(program(ids), plain)


def keys_of(hooks: list[Any], with_kwargs: tuple[int, ...] = ()) -> list[int]:
    return [key for key, _ in distinct(dict(enumerate(hooks)), dict.fromkeys(with_kwargs, True))]


def test_neighbours_of_equal_effect_are_one() -> None:
    hooks = [sets_grad, fresh(), sets_grad, returns_its_output, sets_grad_of_the_input, sets_grad]
    assert keys_of(hooks) == [0, 3, 4, 5]


@pytest.mark.all_cases
@pytest.mark.parametrize("hook", [doubles, counts, reads_a_global, with_default, replaces, loops, print, nn.ReLU()])
def test_what_is_not_known_to_be_idempotent_stays(hook: Any) -> None:
    assert keys_of([hook, hook]) == [0, 1]


def test_hooks_that_take_keyword_arguments_stay() -> None:
    assert keys_of([sets_grad] * 4, with_kwargs=(1, 2)) == [0, 1, 2, 3]


def llama() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).train()


def test_checkpointing_that_is_switched_off_and_on_before_each_step_is_one_graph() -> None:
    eager, model = llama(), llama()
    ids = torch.arange(12).view(2, 6)
    with fxpasses.inspect.record() as record:
        program = compiled(model, "aot_eager")
        for _ in range(9):  # beyond Dynamo's limit of recompilations
            found = []
            for owner, run in ((eager, eager), (model, program)):
                owner.activation_checkpointing_disable()
                owner.activation_checkpointing_enable({"use_reentrant": False})
                owner.zero_grad()
                loss = run(input_ids=ids, labels=ids).loss
                loss.backward()
                found.append([loss, *(parameter.grad for parameter in owner.parameters())])
            torch.testing.assert_close(*found, rtol=0, atol=0)
    assert len(record.graphs) == 1
