"""What the package holds does not grow with the number of batches and of their sizes."""

from __future__ import annotations

import functools
import gc
import sys
import weakref
from collections import Counter, deque
from collections.abc import Mapping

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxpasses
from fxpasses.attention.runtime import masks, operators
from fxpasses.data import PrefetchLoader
from fxpasses.metadata.runtime.batch_cache import BatchCache, State, batch_cache
from tests.support import compiled


@pytest.fixture
def few_entries(monkeypatch):
    batch_cache.clear()
    monkeypatch.setattr(batch_cache, "most_entries", 4, raising=False)


class Biased(nn.Module):
    """A bias by relative positions, of a buffer: nothing of it goes with the batch."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("positions", torch.arange(512))

    def forward(self, x, lengths):
        for _ in range(2):
            p = self.positions[: x.shape[1]]
            d = p[:, None] - p[None]
            bias = torch.where((d >= 0) & (d < 64), 0.0, float("-inf"))
            x = x + self.layer(torch.softmax(x @ x.transpose(1, 2) + bias, -1) @ x)
        return x


class Documents(nn.Module):
    """Attention in documents, of which each batch has a plan; a branch, whose answer is guarded."""

    def forward(self, x, lengths):
        document = torch.repeat_interleave(lengths, output_size=x.shape[1])
        mask = (document[:, None] == document) & torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        x = F.scaled_dot_product_attention(x, x, x, attn_mask=mask)
        return -x if lengths.max() > 1000 else x * lengths.max().item()


def batch(number):
    """Each is smaller than the one before, so that as many results take less memory."""
    lengths = torch.tensor([60 - number, 30])
    return torch.randn(1, int(lengths.sum()), 4, requires_grad=True), lengths


def held():
    """How many elements the containers of the package's modules hold, by the path to them."""
    seen, found = set(), Counter()

    def follow(value, path):
        value = value() if isinstance(value, weakref.ref) else value
        if id(value) in seen or isinstance(value, (type, type(None))):
            return
        seen.add(id(value))
        if isinstance(value, functools._lru_cache_wrapper):
            found[path] += value.cache_info().currsize
        elif isinstance(value, Mapping):
            found[path] += len(value)
            for key, item in list(value.items()):
                follow(item, f"{path}.{key}" if isinstance(key, str) and key.isidentifier() else path)
        elif isinstance(value, (list, tuple, set, frozenset, deque, weakref.WeakSet)):
            found[path] += len(value)
            for item in list(value):
                follow(item, path)
        elif type(value).__module__.startswith("fxpasses"):
            follow(getattr(value, "__dict__", None), path)

    for name, module in sorted(sys.modules.items()):
        if name.startswith("fxpasses"):
            follow(vars(module), name)
    follow(torch._dynamo.convert_frame.trace_frame, "trace_frame")
    return found


def tensor_bytes():
    gc.collect()
    tensors = [found for found in gc.get_objects() if type(found) in (torch.Tensor, nn.Parameter)]
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors if not tensor.is_meta)


@pytest.mark.quick(1)
@pytest.mark.usefixtures("few_entries")
@pytest.mark.parametrize(("kind", "keeps_batches"), [(Biased, False), (Documents, True)])
def test_nothing_grows_with_the_sizes_that_came(kind, keeps_batches):
    model = kind()
    step = compiled(model, dynamic=True)
    batches = map(batch, range(18))
    loader = PrefetchLoader(list(batches) if keeps_batches else batches, step, keep_bytes=2048)
    found = []
    for number, (x, lengths) in enumerate(loader):
        assert torch.equal(step(x, lengths), model(x, lengths))
        step(x, lengths).sum().backward()
        x.grad = None
        if number % 6 == 4:
            del x, lengths
            found.append((tensor_bytes(), held()))
    (_, _), (bytes_before, before), (bytes_after, after) = found
    assert {path: (before[path], count) for path, count in after.items() if count > before[path] + 2} == {}
    assert bytes_after <= bytes_before


def tensors_and_cache(count, **bounds):
    return [torch.tensor([number]) for number in range(count)], BatchCache(**bounds)


def put(cache, what, tensor, result=None, sizes=()):
    cache.put(what, [tensor], State.of([tensor]), (result,), sizes)


def test_results_go_that_were_not_used_for_the_longest_time():
    (root,), cache = tensors_and_cache(1, most_bytes=1 << 30, most_entries=3)
    for size in range(5):  # the last two do not count
        put(cache, "what", root, sizes=(size,))
    assert cache.get("what", [root], (0,)) is not None
    for size in (5, 6):
        put(cache, "what", root, sizes=(size,))
    assert [size for size in range(7) if cache.get("what", [root], (size,))] == [0, 3, 4, 5, 6]


def test_results_are_bounded_in_bytes():
    (root,), cache = tensors_and_cache(1, most_bytes=3000)
    for size in range(9):
        put(cache, "what", root, torch.zeros(250), (size,))
    assert len(cache) == 4 and cache.nbytes == 4 * 1008


def test_what_a_step_needs_again_stays_however_large():
    roots, cache = tensors_and_cache(3, most_bytes=100)
    for what in ("first layer's", "second layer's", "mask"):
        for root in roots:
            put(cache, what, root, torch.zeros(1000))
    for what in ("first layer's", "second layer's", "mask"):
        assert [cache.get(what, [root]) is not None for root in roots] == [False, True, True]


def test_what_is_used_no_more_counts():
    (root,), cache = tensors_and_cache(1, most_bytes=100)
    put(cache, "an older graph's", root, torch.zeros(1000))
    put(cache, "what", root)
    for _ in range(2000):
        assert cache.get("what", [root]) is not None
    put(cache, "what", root, sizes=(1,))
    assert cache.get("an older graph's", [root]) is None and len(cache) == 2


def test_kept_results_without_tensors_are_bounded():
    def program(x, lengths):
        return x * lengths.max().item()

    loader = PrefetchLoader([(torch.ones(2), torch.tensor([n])) for n in range(64)], compiled(program), keep_bytes=2048)
    loader.model(torch.ones(2), torch.tensor([3]))
    assert len(list(loader)) == 64
    assert 0 < len(loader.kept) <= 8 and loader.kept.bytes <= 2048


def test_plans_that_are_used_no_more_keep_no_masks():
    causal = torch.ones(1, 1, 64, 64, dtype=torch.bool).tril()
    alive = [operators.attention_plan(causal, 8) for _ in range(9)]
    for plan in alive:
        masks.prepared(plan)
    assert len(masks._prepared) <= 4
    last = masks.prepared(alive[-1])
    assert masks.prepared(alive[0]) is not last and masks.prepared(alive[-1]) is last


def test_the_statistics_of_attention_are_numbers():
    assert all(isinstance(value, int) for value in vars(fxpasses.attention_stats()).values())
