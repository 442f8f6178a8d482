"""A size that the batch determines may be 1: it is broadcast and squeezed as in eager mode, in a graph of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fxpasses import MetadataError
from tests.support import assert_same, compiled, results

Program = Callable[[Tensor, Tensor], Tensor]


@pytest.fixture(autouse=True)
def flags(capture_flags: None) -> None:
    pass


def batch(*lengths: int) -> tuple[Tensor, Tensor]:
    return torch.linspace(-1, 1, 64).view(2, 8, 4).requires_grad_(), torch.tensor(lengths)


def last_token(x: Tensor, lengths: Tensor) -> Tensor:
    h = x[:, : lengths.max()]
    return x * h[:, -1:]


def first_token(x: Tensor, lengths: Tensor) -> Tensor:
    h = x[:, : lengths.max().item()]
    return h - h[:, :1]


def row_of_table(x: Tensor, lengths: Tensor) -> Tensor:
    return x + torch.linspace(0, 1, 32).view(8, 4)[: lengths.max().item()][-1:]


@pytest.mark.parametrize("program", [last_token, first_token, row_of_table])
def test_a_slice_of_one_is_broadcast_in_one_graph_for_all_lengths(program: Program) -> None:
    record = assert_same(program, [batch(8, 3), batch(5, 3), batch(1, 1), batch(2, 8)], lowering="aot_eager")
    assert len({graph.compile_id for graph in record.graphs}) <= 2  # torch 2.11 compiles a graph in two attempts


def added(x: Tensor, lengths: Tensor) -> Tensor:
    return x + torch.ones(lengths.max().item(), 4)


def chosen(x: Tensor, lengths: Tensor) -> Tensor:
    return torch.where(torch.ones(lengths.max().item(), 1) > 0, x, 0.0)


def squeezed(x: Tensor, lengths: Tensor) -> Tensor:
    h = x[:, : lengths.max().item()].squeeze(1)
    return x * h.ndim + h.sum()


def summed(x: Tensor, lengths: Tensor) -> Tensor:
    return torch.einsum("btd,btd->bd", x[:, : lengths.max().item()], x)


def unbound(x: Tensor, lengths: Tensor) -> Tensor:
    return torch.stack(x[:, : lengths.max()].unbind(1)).sum(0)  # which squeezes; before, gradients were multiplied


def divided_by(x: Tensor, lengths: Tensor) -> Tensor:
    """AOTAutograd asks of the reciprocal what the trace knows. Before, an older answer came from the cache."""
    return x[:, : lengths.max()].__rdiv__(torch.ones_like(x)) * 0 + x


@pytest.mark.parametrize("program", [unbound, divided_by])
def test_a_part_of_an_operator_asks(program: Program) -> None:
    assert_same(program, [batch(8, 3), batch(1, 1), batch(1, 0)], lowering="aot_eager")


def last_as_target(x: Tensor, lengths: Tensor) -> Tensor:
    h = x[:, : lengths.max().item()]
    return F.l1_loss(h, h[:, -1:])  # which asks whether the sizes are equal, in Python


def near_the_first(x: Tensor, lengths: Tensor) -> Tensor:
    h = x[:, : lengths.max().item()]
    return F.cosine_similarity(h, h[:, :1], dim=-1)  # which asks the same in C++


@pytest.mark.parametrize("program", [last_as_target, near_the_first])
@pytest.mark.filterwarnings("ignore:Using a target size")
def test_sizes_that_are_equal_by_being_1_may_differ_in_another_batch(program: Program) -> None:
    assert_same(program, [batch(1, 1), batch(8, 3), batch(1, 1)], tolerance=1e-6)


def test_a_question_inside_a_kernel_is_answered() -> None:
    def program(x: Tensor, lengths: Tensor) -> Tensor:
        first, second = (row[:n] for row, n in zip(x, lengths.tolist(), strict=True))
        return torch.addcmul(first, first, second)

    record = assert_same(program, [batch(8, 8), batch(5, 5)], tolerance=1e-6)
    assert len(record.graphs) == 1


@pytest.mark.parametrize("program", [added, chosen, squeezed, summed])
@pytest.mark.parametrize("lengths", [((8, 2), (1, 1), (8, 8)), ((1, 1), (8, 3), (1, 0))], ids=["8 first", "1 first"])
def test_a_size_of_one_is_another_graph(program: Program, lengths: Any) -> None:
    assert_same(program, [batch(*of_batch) for of_batch in lengths], tolerance=1e-6)


def test_a_batch_that_fails_in_eager_mode_raises_in_the_users_words() -> None:
    model = compiled(added)
    model(*batch(8, 2))
    with pytest.raises(MetadataError, match=r"lengths.max\(\) >= 8, but lengths.max\(\) is 5"):
        model(*batch(5, 2))


def test_a_size_that_activations_determine_breaks_the_graph_before() -> None:
    def program(x: Tensor, lengths: Tensor) -> Tensor:
        row = x[0]
        return row + row[row.sum(-1) > lengths[0]]

    x = torch.zeros(2, 8, 4)
    x[0, 3] = 1
    assert_same(program, [(x, torch.tensor([3])), (x + 5, torch.tensor([3]))])


def test_what_pytorch_asserts_of_unknown_sizes_does_not_stop_a_batch() -> None:
    """The lengths are cut by a size that activations determine, and unknown while tracing."""

    def program(x: Tensor, lengths: Tensor) -> Tensor:
        x = x[:, (x[0] > -9).all(-1)]
        return x - x[:, : lengths.clamp(max=x.shape[1])[-1]][:, :1]

    model = compiled(program, "aot_eager", strict=False)
    with pytest.warns(UserWarning, match="it runs uncompiled, as it was captured"):
        for lengths in ((1, 4), (2, 4), (4, 4), (1, 1)):
            torch.testing.assert_close(results(model, batch(*lengths)), results(program, batch(*lengths)))


def test_an_error_that_the_program_catches_is_caught() -> None:
    def program(x: Tensor, lengths: Tensor) -> Tensor:
        try:
            return x.narrow(1, 0, lengths.max().item())
        except RuntimeError:
            return x * 7

    assert_same(program, [batch(3, 2), batch(20, 1), batch(5, 5)])


@pytest.mark.parametrize("name", ["_is_about_a_dimension", "SizeDefaults._is_answered", "SizeDefaults._note_assertion"])
def test_an_error_of_ours_inside_an_operator_is_one_warning(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo wraps what an operator on fake tensors raises, as an error of the program."""

    def fails(*args: Any) -> Any:
        raise KeyError("of ours")

    monkeypatch.setattr(f"fxpasses.dynamo.size_defaults.{name}", fails)
    model = compiled(first_token, strict=False)
    with pytest.warns(UserWarning, match="'value hints' failed") as given:
        for lengths in ((8, 3), (1, 1)):
            torch.testing.assert_close(model(*batch(*lengths)), first_token(*batch(*lengths)), rtol=0, atol=0)
    assert sum("fxpasses: " in str(warning.message) for warning in given) == 1
