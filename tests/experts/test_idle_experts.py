"""Experts that no token chose: the optimizer skips them where eager mode's loop gives them no gradient."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpasses
from fxpasses.experts.runtime.idle_experts import drop_idle_gradients
from tests.experts.models import HIDDEN, Experts, GeluLinears, LoraLinears, SwiGluLinears
from tests.experts.spellings import SPELLINGS, Moe
from tests.support import compiled, host_reads

pytestmark = pytest.mark.usefixtures("capture_flags")

EXPERTS = 4


def model_of(kind: type[Experts], spelling: str = "skip_numel") -> Moe:
    torch.manual_seed(1)
    return Moe(SPELLINGS[spelling], kind, EXPERTS)


def batch(seed: int, *chosen: int) -> Tensor:
    """Tokens that choose two experts each, none but `chosen`: see `route`."""
    torch.manual_seed(seed)
    x = torch.randn(12, HIDDEN)
    x[:, :EXPERTS] = -9.0
    x[:, list(chosen)] = torch.rand(12, len(chosen))
    return x


def route(model: Moe) -> None:
    """The logit of expert e is feature e."""
    with torch.no_grad():
        model.gate.weight.copy_(torch.eye(EXPERTS, HIDDEN))
    model.gate.weight.requires_grad_(False)


def trained(
    model: Moe, program: Callable[[Tensor], Tensor], batches: list[list[Tensor]], prepare: Callable[[Any], Any]
) -> dict[str, Tensor]:
    """The parameters after a step of AdamW for each list of batches, whose gradients add up."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1, weight_decay=0.5)
    prepare(optimizer)
    for step in batches:
        optimizer.zero_grad()
        for x in step:
            program(x).square().mean().backward()
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


STEPS = {
    "idle later": [[batch(0, 0, 1, 2, 3)], [batch(1, 0, 1)], [batch(2, 1, 2, 3)]],
    "idle first": [[batch(0, 2, 3)], [batch(1, 0, 1, 2, 3)]],
    "idle in a part of the step": [[batch(0, 0, 1), batch(1, 1, 2)], [batch(2, 2, 3), batch(3, 2, 3)]],
}


def as_in_eager_mode(kind: type[Experts], name: str, spelling: str, lowering: str, prepare: Any) -> bool:
    model = model_of(kind, spelling)
    route(model)
    other = copy.deepcopy(model)
    ours = trained(model, compiled(model, lowering), STEPS[name], prepare)
    expected = trained(other, other, STEPS[name], lambda optimizer: None)
    return all(torch.equal(ours[name], expected[name]) for name in expected)


@pytest.mark.parametrize("kind", [SwiGluLinears, GeluLinears, LoraLinears])
@pytest.mark.parametrize("name", STEPS)
def test_steps_are_those_of_eager_mode(kind: type[Experts], name: str) -> None:
    assert as_in_eager_mode(kind, name, "skip_numel", "aot_eager", fxpasses.skip_idle_experts)


@pytest.mark.parametrize("spelling", ["hit_list", "moe_infer"])
def test_other_loops_that_skip(spelling: str) -> None:
    assert as_in_eager_mode(SwiGluLinears, "idle later", spelling, "eager", fxpasses.skip_idle_experts)


def test_a_loop_that_skips_nothing_has_gradients_of_zeros() -> None:
    """In eager mode, too: the products of no rows. AdamW decays what has them."""
    assert as_in_eager_mode(SwiGluLinears, "idle later", "where_pairs", "eager", fxpasses.skip_idle_experts)


def test_a_loop_over_some_of_the_experts_has_no_token_of_theirs() -> None:
    """As on a rank that has some of the experts. The pairs of the others are in no group."""
    experts = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(2))
    gate = nn.Linear(HIDDEN, EXPERTS, bias=False)
    with torch.no_grad():
        gate.weight.copy_(torch.eye(EXPERTS, HIDDEN))

    def program(x: Tensor) -> Tensor:
        weights, idx = gate(x).softmax(-1).topk(2, dim=-1)
        out = x * 1.0
        for e in range(len(experts)):
            tok, slot = torch.where(idx == e)
            if tok.numel() > 0:
                out.index_add_(0, tok, experts[e](x[tok]) * weights[tok, slot, None])
        return out

    compiled(program, "eager")(batch(0, 2, 3)).sum().backward()
    assert drop_idle_gradients(experts.parameters()) == 2 * 2


def test_without_it_an_idle_expert_decays() -> None:
    assert not as_in_eager_mode(SwiGluLinears, "idle later", "skip_numel", "eager", lambda optimizer: None)


@pytest.mark.slow
def test_inductor_keeps_the_sign() -> None:
    model = model_of(GeluLinears)
    route(model)
    compiled(model, "inductor")(batch(0, 0, 1)).sum().backward()
    assert drop_idle_gradients(model.parameters()) == 2 * 4  # of two experts: two weights, two biases
    found = {name for name, p in model.named_parameters() if p.grad is None and p.requires_grad}
    assert {name.split(".")[2] for name in found} == {"2", "3"}


def test_what_is_done_to_gradients_before_the_step_keeps_the_sign() -> None:
    """Clipping, another scale, another dtype, a mean over ranks."""
    model = model_of(SwiGluLinears)
    route(model)
    compiled(model, "eager")(batch(0, 0, 1)).sum().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad = (parameter.grad.bfloat16().mul_(0.3) + parameter.grad.bfloat16()).float() / 2
    assert drop_idle_gradients(model.parameters()) == 2 * 3


def test_gradients_of_zeros_that_tokens_made_stay() -> None:
    layers = [nn.Linear(3, 3) for _ in range(3)]
    for layer, signs in zip(layers, ([-0.0, -0.0], [-0.0, 0.0], [0.0, 0.0]), strict=True):
        layer.weight.grad = torch.full((3, 3), signs[0])
        layer.bias.grad = torch.full((3,), signs[0])
        layer.weight.grad[1, 1] = layer.bias.grad[1] = signs[1]
    assert drop_idle_gradients(p for layer in layers for p in layer.parameters()) == 2
    assert [layer.weight.grad is None for layer in layers] == [True, False, False]


def test_what_has_no_plain_gradient_stays() -> None:
    sparse = nn.Embedding(4, 2, sparse=True)
    sparse(torch.tensor([1])).sum().backward()
    empty, without = nn.Parameter(torch.zeros(0)), nn.Parameter(torch.zeros(2))
    empty.grad = torch.zeros(0)
    assert drop_idle_gradients([sparse.weight, empty, without]) == 0
    assert sparse.weight.grad is not None and empty.grad is not None


def test_reads_of_the_host() -> None:
    """One for all parameters, where no gradient is zero, and one more where some are."""
    parameters = [nn.Parameter(torch.randn(3)) for _ in range(8)]
    for parameter in parameters:
        parameter.grad = torch.randn(3)
    assert host_reads(lambda: drop_idle_gradients(parameters)) == 0  # `tolist` of a vector on the CPU reads its memory
    parameters[3].grad = torch.full((3,), -0.0)
    assert drop_idle_gradients(parameters) == 1 and parameters[3].grad is None


def test_the_handle_ends_it() -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([parameter], weight_decay=0.5)
    fxpasses.skip_idle_experts(optimizer).remove()
    parameter.grad = torch.full((2,), -0.0)
    optimizer.step()
    assert (parameter < 1).all()


def test_an_optimizer_that_skips_can_be_saved() -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([parameter])
    fxpasses.skip_idle_experts(optimizer)
    torch.save(optimizer.state_dict(), io.BytesIO())
