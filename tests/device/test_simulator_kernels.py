"""Kernels of the simulated device: the CPU's numbers, queued, with shapes known at once."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.device import simulated
from tests.device.simulated import counts


def test_kernels_are_queued_and_the_host_goes_on():
    x = torch.randn(4, 5)
    device = x.to("sim")
    simulated.reset_counts()
    found = F.softmax(device @ device.t(), -1).sum(0)
    assert counts().stalls == 0 and counts().kernels == 3
    assert found.shape == (4,) and not torch.accelerator.current_stream().query()
    assert torch.equal(found.cpu(), F.softmax(x @ x.t(), -1).sum(0))
    assert counts().stalls == counts().blocking_copies == 1


OPERATORS = {
    "views": lambda x: x.t()[1:, ::2].unfold(0, 2, 1).reshape(-1, 2).transpose(0, 1).contiguous(),
    "in place": lambda x: x.clone().mul_(2).add_(x).clamp_(min=0.5),
    "written through a view": lambda x: torch.zeros_like(x).index_fill_(0, torch.arange(2, device=x.device), 3.0)[1:],
    "several results": lambda x: torch.cat([part.flatten() for part in (*x.max(1), *x.topk(2, 0))]),
    "lists": lambda x: torch.cat(torch._foreach_mul([x, x + 1], 3.0)),
    "factories": lambda x: torch.arange(7, device=x.device) + torch.ones(7, dtype=torch.int64, device=x.device),
    "out": lambda x: torch.mm(x, x.t(), out=torch.empty(4, 4, device=x.device)),
    "numbers": lambda x: (x + torch.tensor(2.5)) * 3 - 1,
    "indices on the host": lambda x: x[torch.tensor([2, 0])] + x[1],
    "complex": lambda x: torch.view_as_real(torch.complex(x, x) * 1j),
    "dtypes": lambda x: x.to(torch.bfloat16).sum(0).to(torch.float64),
    "layer norm": lambda x: F.layer_norm(x, (5,)),
    "resized": lambda x: torch.empty(0, device=x.device).resize_(3).fill_(2.0),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_results_are_those_of_the_cpu(name, order):
    x = torch.randn(4, 5)
    found = OPERATORS[name](x.to("sim"))
    assert found.device == torch.device("sim", 0)
    assert torch.equal(found.cpu(), OPERATORS[name](x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_norms_are_those_of_the_cpu(dtype, order):
    def gradient(device: str) -> torch.Tensor:
        x = torch.arange(20.0).view(4, 5).to(device, dtype).requires_grad_()
        F.layer_norm(x, (5,)).square().sum().backward()
        return x.grad.cpu()

    assert torch.equal(gradient("sim"), gradient("cpu"))


def test_gradients_are_those_of_the_cpu(order):
    def gradients(device: str) -> list[torch.Tensor]:
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.GELU(), torch.nn.Linear(7, 3)).to(device)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            loss = F.cross_entropy(model(torch.ones(4, 5, device=device)), torch.tensor([0, 1, 2, 0], device=device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return [tensor.cpu() for tensor in (loss.detach(), *(p.grad for p in model.parameters()), *model.parameters())]

    assert all(torch.equal(one, other) for one, other in zip(gradients("sim"), gradients("cpu"), strict=True))


@pytest.mark.parametrize(
    "program",
    [
        lambda x: x.nonzero(), lambda x: x.gt(0).masked_select(x > 1), lambda x: x.long().unique(),
        lambda x: torch.repeat_interleave(x[0], (x[0] > 0).long()), lambda x: x.flatten().abs().long().bincount(),
    ],
)  # fmt: skip
def test_a_result_whose_shape_only_the_data_tells_stalls(program):
    x = torch.randn(4, 5)
    device = x.to("sim")
    simulated.reset_counts()
    found = program(device)
    assert counts().shapes == 1
    assert torch.equal(found.cpu(), program(x))


def test_a_read_stalls():
    device = torch.arange(3, device="sim")
    simulated.reset_counts()
    assert device.sum().item() == 3 and bool((device > 1).any()) and device.tolist() == [0, 1, 2]
    assert counts().reads == 2 and counts().copies_out == 1


def test_what_a_kernel_raises_comes_where_the_host_waits():
    table = torch.randn(4, 2, device="sim")
    found = table[torch.tensor([5], device="sim")]
    with pytest.raises(IndexError, match="out of bounds"):
        found.cpu()
    assert table.sum().item() == table.cpu().sum().item()


def test_a_wrong_shape_is_told_at_once():
    with pytest.raises(RuntimeError, match=r"mat1 and mat2 shapes cannot be multiplied|size mismatch"):
        torch.ones(2, 3, device="sim") @ torch.ones(2, 3, device="sim")


def test_tensors_of_several_devices_do_not_mix():
    one, other, host = torch.ones(2, device="sim:0"), torch.ones(2, device="sim:1"), torch.ones(2)
    for operand in (other, host):
        with pytest.raises(RuntimeError, match=r"(?i)expected all tensors to be on the same device"):
            one + operand


def test_random_numbers_follow_seed_and_offset_and_do_not_touch_the_host():
    before = torch.get_rng_state()
    torch.manual_seed(3)
    host_state = torch.get_rng_state()
    first = torch.rand(5, device="sim")
    state = torch.get_device_module("sim").get_rng_state()
    dropped, normal = F.dropout(torch.ones(50, device="sim")), torch.randn(5, device="sim")
    torch.get_device_module("sim").set_rng_state(state)
    assert torch.equal(F.dropout(torch.ones(50, device="sim")), dropped)
    assert torch.equal(torch.randn(5, device="sim"), normal)
    torch.manual_seed(3)
    assert torch.equal(torch.rand(5, device="sim"), first)
    generator = torch.Generator("sim").manual_seed(3)
    assert torch.equal(torch.rand(5, device="sim", generator=generator), first)
    assert torch.equal(torch.get_rng_state(), host_state)
    torch.set_rng_state(before)


def test_autocast_casts_by_pytorchs_lists():
    x = torch.randn(4, 4, device="sim")
    with torch.autocast("sim", torch.bfloat16):
        assert (x @ x).dtype == F.linear(x, x).dtype == torch.bfloat16
        assert (x @ x).exp().dtype == (x @ x).sum().dtype == F.layer_norm(x @ x, (4,)).dtype == torch.float32
        assert torch.addcmul(x, x @ x, x @ x).dtype == torch.float32
    assert (x @ x).dtype == torch.float32
