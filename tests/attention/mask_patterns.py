"""Masks for tests of attention: the usual ones by name, and any by hypothesis."""

import torch
from hypothesis import strategies as st


def causal(rows, columns=None):
    columns = rows if columns is None else columns
    return torch.arange(rows)[:, None] >= torch.arange(columns)


def documents(lengths, with_causal=True):
    """bool [1, 1, T, T] of documents beside each other."""
    number = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    mask = number[:, None] == number
    return (mask & causal(len(number)) if with_causal else mask)[None, None]


def window(tokens, width):
    distance = torch.arange(tokens)[:, None] - torch.arange(tokens)
    return ((distance >= 0) & (distance < width))[None, None]


def to_additive(mask, least, dtype=torch.float32):
    return torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, least)


@st.composite
def _one(draw, rows, columns):
    """One mask, bool [rows, columns]."""
    row, column = torch.arange(rows)[:, None], torch.arange(columns)
    kind = draw(st.sampled_from(["documents", "window", "prefix", "left", "right", "arbitrary", "all"]))
    if kind == "documents":
        number = torch.tensor(draw(st.lists(st.booleans(), min_size=rows + columns, max_size=rows + columns))).cumsum(0)
        mask = number[:rows, None] == (number[:columns] if columns <= rows else number[-columns:])
    elif kind == "window":
        lower, upper = draw(st.integers(-columns, columns)), draw(st.integers(-columns, columns))
        mask = (column - row >= min(lower, upper)) & (column - row <= max(lower, upper))
    elif kind == "prefix":
        mask = (column <= row) | (column < draw(st.integers(0, columns)))
    elif kind in ("left", "right"):
        edge = draw(st.integers(0, columns))
        mask = ((column >= edge) if kind == "left" else (column < edge)).expand(rows, -1)
    elif kind == "arbitrary":
        generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
        mask = torch.rand(rows, columns, generator=generator) < draw(st.sampled_from([0.05, 0.5, 0.95]))
    else:
        mask = torch.ones(rows, columns, dtype=torch.bool)
    if draw(st.booleans()):
        mask = mask & (column <= row)
    mask = mask.clone()
    for _ in range(draw(st.integers(0, 2))):  # holes, and rows that see nothing
        r0, c0 = draw(st.integers(0, rows - 1)), draw(st.integers(0, columns - 1))
        mask[r0 : r0 + draw(st.integers(1, 4)), c0 : c0 + draw(st.integers(1, columns))] = False
    return mask


@st.composite
def attention_masks(draw, at_most=90, batch=2, heads=2):
    """bool [1 or batch, 1 or heads, rows, columns]: documents, windows, prefixes, padding, holes, empty rows, any."""
    rows = draw(st.integers(1, at_most))
    columns = draw(st.sampled_from([rows, rows, draw(st.integers(1, at_most))]))
    elements, kinds = draw(st.sampled_from([1, batch])), draw(st.sampled_from([1, heads]))
    one = _one(rows, columns)
    drawn = [draw(one)]
    for _ in range(elements * kinds - 1):
        drawn.append(draw(st.one_of(st.just(drawn[-1]), one)))
    return torch.stack(drawn).view(elements, kinds, rows, columns)
