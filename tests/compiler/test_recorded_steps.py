"""A step around which the program itself records a CUDA graph: its metadata is recorded too, or refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import fxpasses
from fxpasses.metadata.runtime.batch_cache import BatchCache
from fxpasses.metadata.runtime.prologue import Prologue, live_prologues
from fxpasses.metadata.runtime.transfers import to_host
from fxpasses.runtime import cuda_extras
from tests.support import compiled

TOKENS = 12


def program(x, lengths):
    for _ in range(2):
        mask = torch.zeros(TOKENS, TOKENS)
        mask[:, : lengths.max().item()] = 1
        x = mask @ x
    return x


@pytest.fixture
def prologue():
    """That of `program`, whose cache knows the batch already, as after the steps before a recording."""
    before = set(live_prologues())
    function = compiled(program)
    function(torch.randn(TOKENS, 4), torch.tensor([5, 7]))
    (found,) = (p for p in live_prologues() if p not in before)
    yield found
    del function


@pytest.fixture
def recorded(monkeypatch):
    monkeypatch.setattr(cuda_extras, "is_recording", lambda: True)


def inputs_of(prologue, lengths):
    return dict.fromkeys(prologue.program.roots, lengths)


def test_metadata_of_a_device_is_refused(prologue, recorded):
    inputs = inputs_of(prologue, torch.tensor([5, 7], device="meta"))
    with pytest.raises(fxpasses.RecordingError, match=r"torch.int64 \[2\] on meta\) on the host.*reduce-overhead"):
        prologue(inputs)


def test_a_copy_that_is_on_the_host_already_is_refused(recorded):
    class Knows(BatchCache):
        def get(self, what, tensors):
            raise AssertionError("a recording takes nothing from the cache")

    with pytest.raises(fxpasses.RecordingError):
        to_host([torch.ones(2, device="meta")], Knows())


def test_metadata_that_the_host_copies_to_the_device_is_refused(prologue, recorded):
    copied = replace(prologue.program, imports=((0, torch.device("cuda")),), device=prologue.program.host)
    with pytest.raises(fxpasses.RecordingError, match="copied from the host to cuda"):
        Prologue(copied)(inputs_of(prologue, torch.tensor([5, 7])))


def test_metadata_is_computed_anew_and_not_kept(prologue, monkeypatch):
    lengths = torch.tensor([5, 7])
    inputs = inputs_of(prologue, lengths)
    kept = prologue(inputs)
    assert prologue(inputs) is kept
    with monkeypatch.context() as patch:
        patch.setattr(cuda_extras, "is_recording", lambda: True)
        first, second = prologue(inputs), prologue(inputs)
    assert first is not kept and second is not first
    assert prologue(inputs) is kept
    torch.testing.assert_close(first, kept)


def test_nothing_asks_a_driver_that_was_not_asked_before():
    assert not torch.cuda.is_initialized() or torch.cuda.is_available()
    assert cuda_extras.is_recording() is False
