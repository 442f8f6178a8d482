"""What transformers records of layers through hooks (`output_router_logits`, `output_hidden_states`), in one graph."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

import fxpasses.inspect
from tests.end_to_end.test_hf_experts import batch, model_of
from tests.support import compiled, reports_of

pytestmark = pytest.mark.usefixtures("capture_flags")

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "use_cache": False,
}  # fmt: skip

both_kinds = pytest.mark.parametrize("checkpointed", [False, True], ids=["plain", "checkpointed"])


def pair(model: Any, checkpointed: bool) -> tuple[Any, Any]:
    """Twice the same model, which has not recorded anything yet."""
    models = (model.train(), copy.deepcopy(model))
    for one in models:
        if checkpointed:
            one.activation_checkpointing_enable({"use_reentrant": False})
    return models


def assert_same_step(eager: Any, program: Any, model: Any, ids: Tensor, loss_of: Any, **arguments: Any) -> Any:
    """Up to the order in which gradients are summed; returns what the program gave."""
    given = []
    for run, owner in ((eager, eager), (program, model)):
        owner.zero_grad()
        found = run(input_ids=ids, labels=ids, **arguments)
        loss_of(found).backward()
        given.append((found, [p.grad for p in owner.parameters()]))
    (expected, gradients), (actual, own) = given
    assert expected.keys() == actual.keys()
    torch.testing.assert_close(loss_of(actual), loss_of(expected), rtol=0, atol=0)
    none = [g is None for g in gradients]  # an expert without tokens has zeros in the grouped program
    torch.testing.assert_close(
        [g for g, left in zip(own, none, strict=True) if not left], [g for g in gradients if g is not None]
    )
    return actual


@pytest.mark.quick(1)
@both_kinds
def test_router_logits_for_the_loss_that_balances_experts(checkpointed: bool) -> None:
    model: Any = model_of("qwen3_moe", layers=2)
    model.config.output_router_logits = True
    eager, model = pair(model, checkpointed)
    with fxpasses.inspect.record() as record:
        program = compiled(model, "aot_eager")
        for number in range(2):
            found = assert_same_step(eager, program, model, batch(number), lambda found: found.loss)
            assert found.aux_loss > 0 and len(found.router_logits) == 2
    assert len(record.graphs) == 1
    assert reports_of(record, "group_experts")[0].figures["loops_grouped"] == 2


@pytest.mark.quick(1)
@both_kinds
def test_hidden_states_that_a_loss_is_made_of(checkpointed: bool) -> None:
    torch.manual_seed(0)
    eager, model = pair(LlamaForCausalLM(LlamaConfig(**SIZES)), checkpointed)

    def loss_of(found: Any) -> Tensor:
        return found.loss + sum(state.square().mean() for state in found.hidden_states)

    with fxpasses.inspect.record() as record:
        program = compiled(model, "aot_eager")
        found = assert_same_step(eager, program, model, batch(0), loss_of, output_hidden_states=True)
        assert len(found.hidden_states) == 3
        assert_same_step(eager, program, model, batch(0), lambda found: found.loss)
    assert len(record.graphs) == 2  # with and without


def test_a_hook_of_the_users_own_is_repeated_in_the_recomputation() -> None:
    """As in eager mode, so the graph breaks there, as it does under stock PyTorch."""
    layer, seen = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), list[Tensor]()
    layer[0].register_forward_hook(lambda module, arguments, output: seen.append(output.detach()))

    def model(x: Tensor) -> Tensor:
        return checkpoint(layer, x, use_reentrant=False).square()  # type: ignore[no-any-return]

    counters.clear()
    compiled(model)(torch.randn(2, 4, requires_grad=True)).sum().backward()
    assert len(seen) == 2
    assert counters["graph_break"]


def test_a_call_is_bound_to_a_signature_after_a_dict_changed() -> None:
    """As by transformers' `select_hidden_states`. The dict cannot be the one behind the signature's proxy."""

    def scaled(x: Tensor, by: float = 2.0, *, shift: float = 1.0) -> Tensor:
        return x * by + shift

    signature, seen = inspect.signature(scaled), dict[str, int]()

    def program(x: Tensor) -> Tensor:
        seen["calls"] = 1
        bound = signature.bind(x.sin(), shift=3.0)
        bound.apply_defaults()
        return scaled(*bound.args, **bound.kwargs)

    x = torch.linspace(-1, 1, 6)
    torch.testing.assert_close(compiled(program, fullgraph=True)(x), program(x))
