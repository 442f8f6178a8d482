"""`PrefetchLoader`: prologues are ready before the steps that need them, and the loader is otherwise as it was."""

from __future__ import annotations

from collections import UserDict, namedtuple
from dataclasses import dataclass
from weakref import WeakSet

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from fxpasses.data import PrefetchLoader
from fxpasses.metadata.runtime.batch_cache import batch_cache
from fxpasses.metadata.runtime.prologue import live_prologues
from tests.support import compiled, host_reads

TOKENS = 12
LENGTHS = ([5, 4, 3], [2, 2, 8], [1, 10, 1], [4, 4, 4])


@pytest.fixture(autouse=True)
def no_prologues_of_other_tests(monkeypatch):
    """Dynamo keeps what it compiled of a function of a module whose graph breaks, as long as the module."""
    monkeypatch.setattr("fxpasses.metadata.runtime.prologue._live", WeakSet())


def layer(x, lengths):
    mask = torch.zeros(TOKENS, TOKENS)
    mask[:, : lengths.max().item()] = 1
    return torch.tanh(mask @ x)


class Model(torch.nn.Module):
    def forward(self, x, lengths):
        return layer(layer(x, lengths), lengths)


class OfObject(torch.nn.Module):
    def forward(self, batch):
        return layer(layer(batch.x, batch.lengths), batch.lengths)


@dataclass(frozen=True)
class Both:
    x: torch.Tensor
    lengths: torch.Tensor


Pair = namedtuple("Pair", ["x", "lengths"])


class Packed(Dataset):
    def __len__(self):
        return len(LENGTHS)

    def __getitem__(self, index):
        return {"x": torch.full((TOKENS, 4), index + 1.0), "lengths": torch.tensor(LENGTHS[index])}


def loader(**more):
    return DataLoader(Packed(), batch_size=None, **more)


def trained(model=None):
    """A compiled model that has seen a batch."""
    model = compiled(Model() if model is None else model)
    x, lengths = torch.randn(TOKENS, 4), torch.tensor([3, 3, 6])
    model(Both(x, lengths)) if isinstance(model._orig_mod, OfObject) else model(x, lengths)
    return model


def runs():
    return sum(prologue.runs for prologue in live_prologues())


def test_a_step_has_no_host_reads_and_each_prologue_is_ready_before_the_step_of_the_batch_before():
    model, given = trained(), []

    def watched():
        for number, batch in enumerate(loader()):
            given.append(number)
            yield batch

    started = runs()
    for number, batch in enumerate(PrefetchLoader(watched(), model)):
        ahead = min(number + 2, len(LENGTHS))
        assert given == list(range(ahead)) and runs() - started >= ahead
        before = runs()
        assert host_reads(lambda batch=batch: model(**batch)) == 0
        assert runs() == before
        assert torch.equal(model(**batch), Model()(**batch))


def test_before_the_first_step_it_is_a_plain_loader():
    model = compiled(Model())
    found = [model(**batch) for batch in PrefetchLoader(loader(), model)]
    assert all(torch.equal(a, Model()(**b)) for a, b in zip(found, loader(), strict=True))


@pytest.mark.parametrize(
    ("make", "call"),
    [
        (lambda b: {**b, "labels": torch.ones(1)}, lambda model, b: model(b["x"], b["lengths"])),
        (lambda b: UserDict(b), lambda model, b: model(**b)),
        (lambda b: (b["x"], b["lengths"]), lambda model, b: model(*b)),
        (lambda b: [b["x"], b["lengths"], torch.ones(1)], lambda model, b: model(*b[:2])),
        (lambda b: Pair(b["x"], b["lengths"]), lambda model, b: model(b.x, b.lengths)),
    ],
    ids=["dict with labels", "mapping", "tuple", "list with labels", "tuple with names"],
)
def test_kinds_of_batches(make, call):
    model = trained()
    batches = [make(batch) for batch in loader()]
    for given, batch in zip(PrefetchLoader(batches, model), batches, strict=True):
        assert given is batch
        assert host_reads(lambda batch=batch: call(model, batch)) == 0


def test_a_batch_that_is_one_object():
    model = trained(OfObject())
    for batch in PrefetchLoader([Both(**batch) for batch in loader()], model):
        assert host_reads(lambda batch=batch: model(batch)) == 0


def test_arguments_say_what_the_model_gets():
    model = trained()
    for batch in PrefetchLoader(({"inputs": batch} for batch in loader()), model, arguments=lambda b: b["inputs"]):
        assert host_reads(lambda batch=batch: model(**batch["inputs"])) == 0


def test_length_attributes_and_several_epochs_are_the_loaders():
    sampler = DistributedSampler(Packed(), num_replicas=1, rank=0, shuffle=True)
    plain = loader(sampler=sampler)
    ahead = PrefetchLoader(plain, trained())
    assert len(ahead) == len(plain) == 4
    assert ahead.sampler is sampler and ahead.dataset is plain.dataset
    for epoch in range(3):
        ahead.sampler.set_epoch(epoch)
        expected = [batch["x"][0, 0].item() for batch in plain]
        assert [batch["x"][0, 0].item() for batch in ahead] == expected
    with pytest.raises(AttributeError, match="nonsense"):
        ahead.nonsense  # noqa: B018


def test_a_loader_without_a_length_has_none():
    class Endless(IterableDataset):
        def __iter__(self):
            return iter(Packed()[index] for index in range(3))

    ahead = PrefetchLoader(DataLoader(Endless(), batch_size=None), trained())
    assert len(list(ahead)) == 3
    with pytest.raises(TypeError):
        len(ahead)


def test_an_error_of_the_loader_comes_after_the_batch_before_it():
    def failing():
        yield Packed()[0]
        yield Packed()[1]
        raise OSError("the disk is gone")

    seen = []
    with pytest.raises(OSError, match="the disk is gone"):
        for batch in PrefetchLoader(failing(), trained()):
            seen.append(batch)
    assert len(seen) == 2


def test_a_loop_may_stop_early_and_begin_again():
    ahead = PrefetchLoader(loader(), trained())
    for _ in range(2):
        for number, _batch in enumerate(ahead):
            if number == 1:
                break
    assert len(list(ahead)) == 4


def test_nothing_is_left_of_a_batch_when_it_is_gone():
    batch_cache.clear()
    model = trained()
    for _batch in PrefetchLoader(loader(), model):
        assert len(batch_cache) <= 8
    del _batch
    assert len(batch_cache) <= 4  # of the first step's batch, until its function's frame is gone


def test_the_state_is_that_of_the_batch_given_out_last():
    class Stateful:
        position = 0

        def __iter__(self):
            while self.position < 4:
                self.position += 1
                yield Packed()[self.position - 1]
            self.position = 0

        def state_dict(self):
            return {"position": self.position}

        def load_state_dict(self, state):
            self.position = state["position"]

    ahead = PrefetchLoader(Stateful(), trained())
    for number, _batch in enumerate(ahead):
        if number == 1:
            break
    assert ahead.state_dict() == {"position": 2} and ahead.loader.position == 3
    ahead.load_state_dict({"position": 1})
    assert ahead.state_dict() == {"position": 1}
    assert [batch["x"][0, 0].item() for batch in ahead] == [2, 3, 4]
    assert not hasattr(PrefetchLoader(loader(), trained()), "state_dict")


def test_an_evaluation_computes_prologues_once():
    model = trained()
    ahead = PrefetchLoader(loader(), model, keep_bytes=1 << 20)
    for epoch in range(3):
        before = runs()
        for batch in ahead:
            assert torch.equal(model(**batch), Model()(**batch))
        assert (runs() > before) == (epoch == 0)
    assert len(ahead.kept) >= len(LENGTHS) and 0 < ahead.kept.bytes <= 1 << 20


def test_kept_results_are_bounded_and_known_by_contents():
    model = trained()
    one = PrefetchLoader(loader(), model, keep_bytes=2 * TOKENS * TOKENS * 4)
    for _ in range(2):
        for batch in one:
            assert torch.equal(model(**batch), Model()(**batch))
        assert one.kept.bytes <= one.kept.most_bytes and len(one.kept) >= 1
    nothing = PrefetchLoader(loader(), model, keep_bytes=1)
    assert len(list(nothing)) == 4 and nothing.kept.bytes == 0


def test_writing_to_a_batch_after_it_was_kept_changes_no_later_result():
    model = trained()
    ahead = PrefetchLoader(loader(), model, keep_bytes=1 << 20)
    for _ in range(2):
        for batch in ahead:
            assert torch.equal(model(**batch), Model()(**batch))
            batch["lengths"].copy_(batch["lengths"].flip(0))
            assert torch.equal(model(**batch), Model()(**batch))


def test_wrong_arguments():
    with pytest.raises(TypeError, match="loader is a int"):
        PrefetchLoader(3, Model())
    with pytest.raises(ValueError, match="keep_bytes is -1"):
        PrefetchLoader(loader(), Model(), keep_bytes=-1)


@pytest.mark.slow
def test_workers():
    model = trained()
    plain = loader(num_workers=2, persistent_workers=True)
    for _ in range(2):
        for batch in PrefetchLoader(plain, model):
            assert host_reads(lambda batch=batch: model(**batch)) == 0
            assert torch.equal(model(**batch), Model()(**batch))
