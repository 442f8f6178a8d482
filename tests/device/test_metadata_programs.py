"""What the passes make of programs on a device, beside what `test_metadata_steps.py` counts in whole steps."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import fxpasses
from fxpasses.attention import omit_masks
from fxpasses.attention.runtime import dense, flash
from fxpasses.attention.runtime import operators as attention
from fxpasses.compiler import backend
from fxpasses.experts.runtime import grouped_kernels
from fxpasses.inspect.cli import main
from fxpasses.metadata.runtime.batch_cache import batch_cache
from fxpasses.metadata.runtime.prologue import Prologue, with_prologue
from fxpasses.report import Reason
from tests.device import simulated
from tests.device.simulated import counts
from tests.device.test_metadata_steps import Branching, batch, same, step
from tests.support import compiled, reports_of

LEAST = torch.finfo(torch.float32).min


@pytest.fixture(autouse=True)
def no_batch_is_known(sim):
    batch_cache.clear()


def stalls(program, *inputs) -> int:
    """How often the host waits for the device in a call."""
    simulated.reset_counts()
    program(*inputs)
    return counts().stalls


# Numbers


def test_numbers_that_activations_decide_are_one_copy_for_each_device():
    def program(x: Tensor, y: Tensor) -> Tensor:
        first, second = x.argmax(-1), y.argmax(-1)
        numbers = first.sum().item(), second.sum().item(), first.max().item(), second.max().item()
        return x * numbers[0] + numbers[1] * numbers[2] + numbers[3]

    function = compiled(program)
    x, y = torch.randn(5, 4, device="sim:0"), torch.randn(5, 4, device="sim:1")
    assert torch.equal(function(x, y), program(x, y))
    assert stalls(program, x, y) == 4 and stalls(function, x, y) == 2


def test_a_number_on_another_device_is_not_copied_there_before_it_is_needed():
    def program(x: Tensor, y: Tensor) -> Tensor:
        longest = y.argmax(-1).max().item()
        return x * longest + x.argmax(-1).to(y.device).sum().item()

    function = compiled(program)
    x, y = torch.randn(5, 4, device="sim:0"), torch.randn(5, 4, device="sim:1")
    assert torch.equal(function(x, y), program(x, y))
    assert stalls(function, x, y) == 2


def by_name(lengths: Tensor) -> Tensor:
    return lengths.cpu().to("sim")


def by_keyword(lengths: Tensor) -> Tensor:
    return lengths.cpu().to(device="sim") + torch.ones(3, dtype=torch.int64, device="sim")


def by_method(lengths: Tensor) -> Tensor:
    return lengths.cpu().sim()


@pytest.mark.parametrize("there_and_back", [by_name, by_keyword, by_method])
def test_metadata_that_goes_to_the_host_and_back_is_copied_once(there_and_back):
    def program(x: Tensor, lengths: Tensor) -> Tensor:
        for _ in range(2):
            x = x * there_and_back(lengths).max().item() + lengths.sum().item()
        return x

    function = compiled(program)
    for number, lengths in enumerate(([5, 8, 3], [1, 14, 1])):
        x, lengths = batch(lengths)
        expected = program(x, lengths)
        simulated.reset_counts()
        found = function(x, lengths)
        if number > 0:
            assert counts().copies_out == counts().stalls == 1 and counts().copies_in == 0
        assert torch.equal(found, expected)


@pytest.mark.parametrize("given", ["tensor", "mapping", "sequence"])
def test_prefetch_takes_a_batch_on_the_device_in_every_form(given):
    def program(lengths: Tensor) -> Tensor:
        return torch.ones(4, device=lengths.device) * lengths.max().item()

    function = compiled(program)
    function(torch.tensor([5, 8, 3], device="sim"))
    lengths = torch.tensor([1, 14, 1], device="sim")
    batches = {"tensor": lengths, "mapping": {"lengths": lengths}, "sequence": [lengths]}
    assert fxpasses.prefetch(function, batches[given]) >= 1
    assert stalls(function, lengths) == 1  # for the copy that was started
    assert torch.equal(function(lengths), program(lengths))


def test_prefetch_leaves_a_batch_alone_that_the_model_does_not_take():
    class Unreadable(dict):
        def __getitem__(self, name):
            raise LookupError(f"{name} is read later")

    def program(batch: dict[str, Tensor]) -> Tensor:
        return torch.ones(4, device="sim") * batch["lengths"].max().item()

    function = compiled(program)
    lengths = torch.tensor([5, 8, 3], device="sim")
    function({"lengths": lengths})
    for other in (Unreadable(lengths=lengths.clone()), {"lengths": "5, 8, 3"}):
        assert stalls(fxpasses.prefetch, function, [other]) == counts().copies_out == 0


def test_a_batch_that_breaks_an_assertion_is_told_before_the_graph_runs():
    def program(x: Tensor, lengths: Tensor) -> Tensor:
        torch._check(lengths.sum().item() == 16)
        longest, shortest = lengths.max().item(), lengths.min().item()
        torch._check((longest > 9) | (shortest > 0))
        return x * lengths.sum().item()

    function = compiled(program)
    x, lengths = batch([5, 7, 4])
    function(x, lengths)
    for wrong, text in (([5, 7, 3], "but lengths.sum.* is 15"), ([9, 7, 0], "max.* does not hold")):
        simulated.reset_counts()
        with pytest.raises(fxpasses.MetadataError, match=text):
            function(x, torch.tensor(wrong, device="sim"))
        assert counts().kernels <= 1


def test_lengths_that_the_graph_writes_to_are_read_when_it_asks():
    """The second batch's lengths share memory with what the graph writes to."""

    def program(x: Tensor, lengths: Tensor, other: Tensor) -> Tensor:
        y = x * lengths.max().item()
        other.add_(1)
        return y * lengths.max().item()

    def run(function, lengths: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        return function(torch.ones(4, device="sim"), lengths, other), lengths

    function = compiled(program)
    for shared in (False, True):
        found = []
        for each in (program, function):
            lengths = torch.tensor([5, 8, 3], device="sim")
            found.append(run(each, lengths, lengths[:2] if shared else torch.tensor([1, 2], device="sim")))
        assert same(*found)


def test_on_fake_inputs_the_prologue_does_not_run(monkeypatch):
    """`DDPOptimizer` runs each piece of a graph on some, to see what it returns."""
    made: list[Prologue] = []

    def spy(main, prologue, *args, **kwargs):
        made.append(prologue)
        return with_prologue(main, prologue, *args, **kwargs)

    monkeypatch.setattr(backend, "with_prologue", spy)
    compiled(lambda x, lengths: x * lengths.max().item())(*batch([5, 8, 3]))
    piece = with_prologue(lambda *inputs: inputs, made[0], captured=pytest.fail, fakes=["a fake number"])
    with FakeTensorMode():
        inputs = [torch.empty(3, device="sim") for _ in range(max(made[0].program.roots) + 1)]
        simulated.reset_counts()
        assert piece(*inputs) == (*inputs, "a fake number") and counts().stalls == 0


def test_a_selective_checkpoint_does_not_see_the_prologue():
    """It counts operators, and recomputes a layer when the batch's numbers are there: fewer run then."""

    class Selective(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Branching() for _ in range(2))

        def forward(self, x, lengths):
            contexts = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
            for layer in self.layers:
                x = checkpoint(layer, x, lengths, use_reentrant=False, context_fn=contexts)
            return x

    model, program = Selective().to("sim"), Selective().to("sim")
    program.load_state_dict(model.state_dict())
    program.layers = nn.ModuleList(compiled(layer, "aot_eager") for layer in program.layers)
    for lengths in ([5, 8, 3], [2, 7, 7]):
        x, lengths = batch(lengths)
        assert same(step(program, x, lengths), step(model, x, lengths))


# Attention


def packed(lengths: list[int]) -> tuple[Tensor, Tensor]:
    """Attention over fewer tokens than these is left alone."""
    return torch.randn(sum(lengths), 16).to("sim"), torch.tensor(lengths).to("sim")


def attend(x: Tensor, mask: Tensor, written: bool) -> Tensor:
    q, k, v = (x.view(1, -1, 2, 8).transpose(1, 2) * factor for factor in (1.0, 2.0, 3.0))
    if not written:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    scores = q @ k.transpose(-1, -2) / 8**0.5
    return torch.softmax(scores.masked_fill(~mask, LEAST), -1) @ v


class Attention(nn.Module):
    def __init__(self, written: bool = False) -> None:
        super().__init__()
        self.linear, self.written = nn.Linear(16, 16), written

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        document = torch.searchsorted(lengths.cumsum(0), torch.arange(x.shape[0], device=x.device), right=True)
        mask = (document[:, None] == document[None])[None, None]
        return attend(self.linear(x), mask, self.written)


@pytest.mark.parametrize("large", [False, True])
def test_attention_by_a_plan_is_that_of_the_device(large, monkeypatch):
    """There is no plan to follow, and the mask is made, however large."""
    monkeypatch.setattr(omit_masks, "LARGE", 1 if large else 1 << 40)
    model = Attention().to("sim")
    program = compiled(model, "aot_eager")
    with fxpasses.inspect.record() as record:
        for lengths in ([100, 88, 100], [30, 258, 0]):
            x, lengths = packed(lengths)
            simulated.reset_counts()
            found = step(program, x, lengths)
            assert counts().stalls == 0
            assert same(found, step(model, x, lengths))
    (report,) = reports_of(record, "sparsify_attention")
    assert report.figures["attentions"] == 1
    (omitted,) = reports_of(record, "omit_masks")
    assert not omitted.changed and [refusal.reason for refusal in omitted.refusals] == [Reason.NOT_ON_CPU] * large


def test_attention_by_a_plan_follows_the_devices_autocast():
    model = Attention().to("sim")
    program = compiled(model, "aot_eager")
    x, lengths = packed([100, 88, 100])
    with torch.autocast("sim", torch.bfloat16):
        assert torch.equal(program(x, lengths), model(x, lengths))


def test_scores_that_a_finite_value_hides_stay_as_they_are_written():
    model = Attention(written=True).to("sim")
    with fxpasses.inspect.record() as record:
        x, lengths = packed([100, 88, 100])
        assert same(step(compiled(model, "aot_eager"), x, lengths), step(model, x, lengths))
    (report,) = reports_of(record, "sparsify_attention")
    assert [refusal.reason for refusal in report.refusals] == [Reason.SCORES_CHANGED]


def test_attention_over_all_pairs_is_the_devices_own():
    q, k, v = (torch.randn(1, 2, 4, 8, device="sim") for _ in range(3))
    found, logsumexp = dense.forward(flash.Attention(q, k, v, None, None))
    assert torch.equal(found, F.scaled_dot_product_attention(q, k, v)) and logsumexp.device == q.device


def test_there_is_no_attention_without_a_mask():
    x, plan = torch.ones(1, 2, 4, 8, device="sim"), torch.zeros(8, dtype=torch.int32, device="sim")
    with pytest.raises(ValueError, match="no attention without a mask on sim:0"):
        attention.sparse_attention(x, x, x, None, plan)
    with pytest.raises(ValueError, match="no attention without a mask on sim"):
        attention.plan_in_blocks(lambda start, stop: x, (1, 1, 4, 4), device="sim")


# Experts


def test_products_of_no_rows_do_not_wait_for_their_offsets():
    rows, weights = torch.ones(0, 4, device="sim"), torch.ones(2, 4, 3, device="sim")
    offsets = torch.zeros(2, dtype=torch.int64, device="sim")
    simulated.reset_counts()
    found = grouped_kernels.matmul(rows, weights, offsets, None, False), grouped_kernels.total(rows, offsets)
    assert counts().stalls == 0
    assert found[0].shape == (0, 3) and torch.equal(found[1].cpu(), torch.zeros(2, 4))


def test_triton_launches_on_the_device_of_the_operands():
    grouped_triton = pytest.importorskip("fxpasses.experts.runtime.grouped_triton")
    for device in ("sim:0", "sim:1"):
        with grouped_triton._on(torch.device(device)):
            assert torch.accelerator.current_device_index() == torch.device(device).index
    assert torch.accelerator.current_device_index() == 0


# Reports


def test_the_doctor_names_the_devices(capsys, monkeypatch):
    monkeypatch.delenv("FXPASSES_PASSES", raising=False)
    main(["doctor"])
    assert "2 × sim" in capsys.readouterr().out
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    main(["doctor"])
    assert "the CPU alone" in capsys.readouterr().out
