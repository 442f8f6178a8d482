"""A compiled graph that raises when it runs: the batch runs uncompiled, with one warning, where nothing shows twice."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fxpasses.compiler.backend as backend
from fxpasses.errors import MetadataError
from tests.support import compiled, results


def trimmed(x: Tensor, lengths: Tensor) -> Tensor:
    mask = torch.zeros(4)
    mask[: lengths.max()] = 1
    return (x * mask).sum()


def writing(x: Tensor, lengths: Tensor) -> Tensor:
    lengths.add_(1)
    return x.sum() * lengths.max()


def out_of_range(x: Tensor, lengths: Tensor) -> Tensor:
    return x[:, lengths + 4].sum()


def batch() -> tuple[Tensor, Tensor]:
    return torch.arange(8.0).view(2, 4).requires_grad_(), torch.tensor([3, 2])


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code that raises when it runs."""

    def lower(*arguments: Any, **options: Any) -> Any:
        def run(*inputs: Any) -> Any:
            raise AssertionError("expected size 4==4, stride 1==2 at dim=1")

        return run

    monkeypatch.setattr(backend, "lower", lower)


def test_code_that_raises_when_it_runs_gives_way_to_the_captured_graph(failing: None) -> None:
    program = compiled(trimmed, "aot_eager", strict=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            torch.testing.assert_close(results(program, batch()), results(trimmed, batch()))
    assert sum("failed when it ran" in str(warning.message) for warning in caught) == 1


def test_code_that_raises_when_it_runs_raises_where_a_second_run_would_write_twice(failing: None) -> None:
    with pytest.raises(AssertionError, match="expected size"):
        compiled(writing, "aot_eager", strict=False)(*batch())


class Normed(torch.nn.Module):
    """Its statistics are written by a function whose name does not tell, in a checkpoint as well."""

    def __init__(self, checkpointed: bool, counted: bool) -> None:
        super().__init__()
        self.norm, self.checkpointed = torch.nn.BatchNorm1d(4), checkpointed
        if not counted:
            self.norm.num_batches_tracked = None

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        x = x[:, : lengths.max().item()].repeat(1, 2)[:, :4]
        return checkpoint(self.norm, x, use_reentrant=False) if self.checkpointed else self.norm(x)


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("counted", [False, True])
def test_what_was_written_is_restored(checkpointed: bool, counted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    original = backend.lower

    def lower(*arguments: Any, **options: Any) -> Any:
        compiled = original(*arguments, **options)

        def run(*inputs: Any) -> Any:
            compiled(*inputs)
            raise AssertionError("expected size 4==4, stride 1==2 at dim=1")

        return run

    monkeypatch.setattr(backend, "lower", lower)
    model, twin = Normed(checkpointed, counted), Normed(checkpointed, counted)
    step = compiled(model, "aot_eager", strict=False)
    with pytest.warns(UserWarning, match="failed when it ran"):
        torch.testing.assert_close(results(step, batch()), results(twin, batch()))
    torch.testing.assert_close(model.state_dict(), twin.state_dict())


def test_an_error_of_the_program_stays_its_own(failing: None) -> None:
    with pytest.raises(IndexError, match="out of bounds"):
        compiled(out_of_range, "aot_eager", strict=False)(*batch())


def test_a_batch_that_breaks_an_assertion_raises_and_does_not_run_again() -> None:
    def program(x: Tensor, lengths: Tensor) -> Tensor:
        torch._check(lengths.max().item() < 4)
        return (x * lengths.max().item()).sum()

    x, lengths = batch()
    run = compiled(program, "aot_eager", strict=False)
    run(x, lengths)
    with pytest.raises(MetadataError):
        run(x, lengths + 4)
