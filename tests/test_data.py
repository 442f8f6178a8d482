"""Lengths in buckets: what they look like, and that a model is compiled once for each."""

from __future__ import annotations

import random
import warnings

import pytest
import torch

import fxpasses.inspect
from fxpasses.data import BucketCollator, bucket_lengths
from tests.support import compiled

TOKENS = 128


@pytest.mark.parametrize(
    ("lengths", "buckets", "expected"),
    [
        ([3, 4, 5], None, [3, 4, 5, 0]),
        ([3], None, [3]),
        ([1, 1], None, [1, 1]),
        ([], None, [0]),
        ([3, 4, 5], [8, 2, 6], [3, 4, 5, 0, 0, 0]),
        (torch.tensor([3, 4, 5], dtype=torch.int32), [5], [3, 4, 5, 0, 0]),
    ],
)
def test_lengths_are_padded_to_the_next_bucket(lengths, buckets, expected):
    padded = bucket_lengths(lengths, buckets)
    assert padded.tolist() == expected
    assert padded.dtype == (lengths.dtype if isinstance(lengths, torch.Tensor) else torch.int64)


@pytest.mark.parametrize(
    ("lengths", "buckets", "error", "words"),
    [
        ([1, 2, 3], [2], ValueError, r"3 sequences.*\[2\]"),
        ([1, -2], None, ValueError, "-2"),
        ([1], "yes", ValueError, "buckets are 'yes'"),
        ([1], [8, 0], ValueError, r"\[8, 0\].*from 1 on"),
        ([1], [], ValueError, r"buckets are \[\]"),
        ([1.5], None, TypeError, "float32"),
        (torch.ones(2, 2, dtype=torch.int64), None, ValueError, r"\[2, 2\]"),
    ],
)
def test_wrong_lengths_say_what_is_wrong(lengths, buckets, error, words):
    with pytest.raises(error, match=words):
        bucket_lengths(lengths, buckets)


def test_the_collator_adds_lengths_to_a_packed_batch():
    batch = BucketCollator(buckets=[4])([{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}])
    assert batch["lengths"].tolist() == [3, 2, 0, 0]
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4, 5]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1]]


def layer(x, lengths):
    position, start = torch.arange(TOKENS), 0
    segment = torch.zeros(TOKENS, dtype=torch.int64)
    for number, length in enumerate(lengths.tolist()):
        segment += number * ((position >= start) & (position < start + length))
        start += length
    return torch.where(segment[:, None] == segment, 0.0, -1e4).softmax(-1) @ x


def unrolled_layer(x, lengths):
    position, start = torch.arange(TOKENS), 0
    segment = torch.zeros(TOKENS, dtype=torch.int64)
    for number, length in enumerate(lengths.tolist()):  # each turn takes what the one before has made
        segment = torch.where((position >= start) & (position < start + length), number, segment)
        start += length
    return torch.where(segment[:, None] == segment, 0.0, -1e4).softmax(-1) @ x


def program(x, lengths):
    return layer(layer(x, lengths), lengths)


def unrolled_program(x, lengths):
    return unrolled_layer(unrolled_layer(x, lengths), lengths)


def batches(count, most):
    generator = random.Random(0)
    for _ in range(count):
        cuts = sorted(generator.sample(range(1, TOKENS), generator.randint(1, most) - 1))
        yield torch.randn(TOKENS, 4), [b - a for a, b in zip([0, *cuts], [*cuts, TOKENS], strict=True)]


@pytest.mark.slow
def test_one_compile_for_each_bucket_over_60_batches_of_1_to_64_sequences():
    with fxpasses.inspect.record() as record, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        function = compiled(unrolled_program)
        used = set()
        for x, lengths in batches(60, 64):
            padded = bucket_lengths(lengths, [8, 32, 64])
            used.add(len(padded))
            torch.testing.assert_close(function(x, padded), program(x, torch.tensor(lengths)), rtol=0, atol=0)
    assert len(record.graphs) == len(used) == 3


@pytest.mark.slow
def test_three_graphs_over_60_batches_of_1_to_64_sequences_without_buckets():
    with fxpasses.inspect.record() as record, warnings.catch_warnings():
        warnings.simplefilter("error")
        function = compiled(program)
        for x, lengths in batches(60, 64):
            given = x, torch.tensor(lengths)
            torch.testing.assert_close(function(*given), program(*given), rtol=0, atol=0)
    assert len(record.graphs) <= 3  # the first batch, one of a single sequence, and all others


def test_without_buckets_a_warning_says_what_to_do():
    function = compiled(unrolled_program)
    with pytest.warns(UserWarning, match=r"4th size of L\['lengths'\] \(1, 2, 3, 4\).*bucket_lengths") as caught:
        for count in (1, 2, 3, 4, 5):
            function(torch.randn(TOKENS, 4), torch.tensor([TOKENS // count] * count))
    assert sum("bucket_lengths" in str(warning.message) for warning in caught) == 1
