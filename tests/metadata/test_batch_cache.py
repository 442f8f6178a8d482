"""The batch cache and the prologue at run time."""

from __future__ import annotations

import gc
import threading
import weakref

import numpy
import pytest
import torch
from torch.utils.checkpoint import checkpoint

import fxpasses
from fxpasses.errors import MetadataError
from fxpasses.metadata.runtime.batch_cache import BatchCache, State, batch_cache
from fxpasses.metadata.runtime.prologue import live_prologues
from tests.support import compiled, events

TOKENS = 12


def layer(x, lengths):
    mask = torch.zeros(TOKENS, TOKENS)
    mask[:, : lengths.max().item()] = 1
    return mask @ x


def program(x, lengths):
    for _ in range(3):
        x = checkpoint(layer, x, lengths, use_reentrant=False)
    return x


def test_an_entry_is_found_until_its_tensor_changes_or_dies():
    cache, tensor = BatchCache(), torch.tensor([1, 2])
    cache.put("what", [tensor], State.of([tensor]), "result")
    assert cache.get("what", [tensor]) == "result"
    assert cache.get("else", [tensor]) is None
    assert cache.get("what", [tensor.clone()]) is None
    tensor.add_(1)
    assert cache.get("what", [tensor]) is None
    cache.put("what", [tensor], State.of([tensor]), "again")
    assert len(cache) == 1
    del tensor
    gc.collect()
    assert len(cache) == 0


def test_a_result_computed_from_an_older_version_is_not_found():
    cache, tensor = BatchCache(), torch.tensor([1, 2])
    state = State.of([tensor])
    tensor.add_(1)  # another thread, while the result was computed
    cache.put("what", [tensor], state, "stale")
    assert cache.get("what", [tensor]) is None


def test_tensors_without_versions_are_not_cached():
    cache = BatchCache()
    with torch.inference_mode():
        tensor = torch.tensor([1, 2])
    cache.put("what", [tensor], State.of([tensor]), "result")
    assert cache.get("what", [tensor]) is None


def test_an_edit_in_place_gives_the_new_result():
    x, lengths = torch.randn(TOKENS, 4), torch.tensor([5, 4, 3])
    function = compiled(program)
    assert torch.equal(function(x, lengths), program(x, lengths))
    lengths[0] = 9
    assert torch.equal(function(x, lengths), program(x, lengths))
    lengths.fill_(2)
    assert torch.equal(function(x, lengths), program(x, lengths))


def test_an_edit_that_no_version_counts_gives_the_new_result():
    array = numpy.array([5, 4, 3])
    x, lengths = torch.randn(TOKENS, 4), torch.from_numpy(array)
    function = compiled(program)
    assert torch.equal(function(x, lengths), program(x, lengths))
    array[0] = 9
    assert lengths._version == 0
    assert torch.equal(function(x, lengths), program(x, lengths))


def test_the_prologue_runs_once_for_a_batch():
    x, lengths = torch.randn(TOKENS, 4), torch.tensor([5, 4, 3])
    function = compiled(program)
    others = live_prologues()
    function(x, lengths)
    (prologue,) = [p for p in live_prologues() if p not in others]
    runs = prologue.runs
    function(x, lengths)
    function(x + 1, lengths)
    assert prologue.runs == runs
    function(x, lengths.clone())
    assert prologue.runs == runs + 1


def test_nothing_outlives_the_batch_and_the_backward_pass():
    batch_cache.clear()
    function = compiled(program, "aot_eager")
    x, lengths = torch.randn(TOKENS, 4, requires_grad=True), torch.tensor([5, 4, 3])
    loss = function(x, lengths).sum()
    entries = batch_cache._entries.values()
    held = [weakref.ref(value) for entry in entries for value in entry.result if torch.is_tensor(value)]
    assert held and len(batch_cache) > 0
    loss.backward()
    batch = weakref.ref(lengths)
    del lengths, loss
    gc.collect()
    assert batch() is None
    assert [reference() for reference in held] == [None] * len(held)
    assert len(batch_cache) == 0


def test_the_batch_may_die_before_the_backward_pass():
    function = compiled(program, "aot_eager")
    x, lengths = torch.randn(TOKENS, 4, requires_grad=True), torch.tensor([5, 4, 3])
    expected = torch.autograd.grad(program(x, lengths).sum(), x)
    loss = function(x, lengths).sum()
    del lengths
    gc.collect()
    assert torch.equal(torch.autograd.grad(loss, x)[0], expected[0])


def test_a_broken_assertion_names_both_numbers():
    def checked(x, lengths):
        torch._check(int(lengths.sum()) == x.shape[0])
        return x * lengths.max().item()

    function = compiled(checked)
    x = torch.randn(TOKENS, 4)
    assert torch.equal(function(x, torch.tensor([5, 7])), x * 7)
    with pytest.raises(MetadataError, match=r"lengths\.sum\(\) >= 12, but lengths\.sum\(\) is 11 .*test_batch_cache"):
        function(x, torch.tensor([5, 6]))
    assert torch.equal(function(x, torch.tensor([4, 8])), x * 8)


def test_new_lengths_recompile_nothing():
    torch._dynamo.utils.counters.clear()
    function = compiled(program)
    for lengths in ([5, 4, 3], [1, 10, 1], [12, 0, 0], [4, 4, 4]):
        function(torch.randn(TOKENS, 4), torch.tensor(lengths))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_several_threads_with_batches_of_their_own():
    function = compiled(program)
    function(torch.randn(TOKENS, 4), torch.tensor([5, 4, 3]))
    wrong = []

    def work(seed):
        generator = torch.Generator().manual_seed(seed)
        for _ in range(20):
            x = torch.randn(TOKENS, 4, generator=generator)
            lengths = torch.randint(1, 9, (3,), generator=generator)
            if not torch.equal(function(x, lengths), program(x, lengths)):
                wrong.append(lengths)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_under_inference_mode_and_then_training():
    function = compiled(program, "aot_eager")
    lengths = torch.tensor([5, 4, 3])
    x = torch.randn(TOKENS, 4, requires_grad=True)
    with torch.inference_mode():
        function(x.detach(), lengths)
    expected = torch.autograd.grad(program(x, lengths).sum(), x)
    assert torch.equal(torch.autograd.grad(function(x, lengths).sum(), x)[0], expected[0])


# Prefetching


def test_prefetch_computes_the_prologue_before_the_call():
    function = compiled(program)
    x = torch.randn(TOKENS, 4)
    function(x, torch.tensor([5, 4, 3]))
    lengths = torch.tensor([2, 2, 8])
    assert fxpasses.prefetch(function, {"x": x, "lengths": lengths}) >= 1
    counts = events(lambda: function(x, lengths))
    assert counts["aten::_local_scalar_dense"] == 0 and counts["aten::zeros"] == 0
    assert torch.equal(function(x, lengths), program(x, lengths))


def test_prefetch_leaves_the_batch_to_the_models_that_take_it():
    def needs_long(x, lengths):
        torch._check(lengths[0].item() >= 4)
        return x * lengths[0].item()

    other, function = compiled(needs_long), compiled(program)
    x, lengths = torch.randn(TOKENS, 4), torch.tensor([5, 4, 3])
    other(x, lengths)
    function(x, lengths)
    short = torch.tensor([2, 2, 8])
    assert fxpasses.prefetch(function, {"x": x, "lengths": short}) >= 1
    assert torch.equal(function(x, short), program(x, short))


def test_prefetch_for_a_module_with_positional_arguments():
    class Model(torch.nn.Module):
        def forward(self, x, batch):
            return program(x, batch["lengths"])

    model = compiled(Model())
    x = torch.randn(TOKENS, 4)
    model(x, {"lengths": torch.tensor([5, 4, 3])})
    batch = {"lengths": torch.tensor([2, 2, 8])}
    assert fxpasses.prefetch(model, (x, batch)) >= 1
    assert events(lambda: model(x, batch))["aten::_local_scalar_dense"] == 0


def test_prefetch_of_a_batch_that_does_not_fit_starts_nothing():
    function = compiled(program)
    function(torch.randn(TOKENS, 4), torch.tensor([5, 4, 3]))
    assert fxpasses.prefetch(function, {"other": torch.tensor([1])}) == 0
    with pytest.raises(TypeError, match="a int"):
        fxpasses.prefetch(function, 3)
