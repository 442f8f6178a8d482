"""Sets of rows, as operators of a prologue. A *row* is a token of the batch, b * T + t.

| operator | result |
|---|---|
| `live_rows(live, share, multiple)` | the rows of a set, in order |
| `visible_pairs(mask, hides, exact)` | an additive mask as a bool one |
| `earlier_pairs(like, tokens)` | the mask of attention that is causal and has none |
| `attended_rows(seed, masks, batch, exact)` | the rows that a set sees over any number of layers |
| `rows_attended_from(live, mask, batch, exact)` | the rows of another text that a set sees |
| `plan_of_rows(mask, queries, keys, batch, heads)` | the plan of attention between the rows of two sets |

Sets are found on the host, from the CPU's copy of the batch; a plan is made on the device that attends.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import custom_op

from fxpasses.attention.runtime import cuda
from fxpasses.attention.runtime import plan as plans
from fxpasses.base import sample

# Sets are padded to a multiple of this, with copies of row 0 that nothing reads. So no set is empty, or has one row,
# which would be broadcast. FlexAttention asks whether there are fewer than 128 queries, unknown while compiling.
MULTIPLES = {"cpu": 16, "cuda": cuda.BLOCK}
_PAIRS = 1 << 22  # pairs of a mask that are looked at together
_MOST_PAIRS = 1 << 28  # pairs of a mask that is made: 256 MiB


@custom_op("fxpasses::live_rows", mutates_args=())
def live_rows(live: Tensor, share: float, multiple: int) -> Tensor:
    """The positions, int64 [N], of the True elements of bool [B * T], in order; -1 up to a `multiple`.

    share: the share of the step's products that is computed for these rows; `choice.py` reads it.
    """
    found = live.nonzero().view(-1)
    padding = -len(found) % multiple if len(found) else multiple
    return torch.nn.functional.pad(found, (0, padding), value=-1)


class NotPacked(RuntimeError):  # where a compiled graph raises it, the captured one runs
    """The rows of a batch cannot be packed; the text says why."""


@custom_op("fxpasses::visible_pairs", mutates_args=())
def visible_pairs(mask: Tensor, hides: float, exact: bool) -> Tensor:
    """An additive mask, of any shape, as bool: False where it is `hides` or less.

    exact: raise `NotPacked` if a value is neither 0 nor hides, such as a bias by distance; otherwise only if a value is
    so large that it could reveal what another hides.
    """
    visible = ~(mask <= hides)
    if not exact and mask.numel() and bool(mask.amax() > -hides / 1e10):
        raise NotPacked("an additive mask has values that undo another's")
    if exact and not torch.equal(visible, mask == 0):  # NaN is neither as well
        raise NotPacked("an additive mask has values besides 0 and the least")
    return visible


@custom_op("fxpasses::earlier_pairs", mutates_args=())
def earlier_pairs(like: Tensor, tokens: int) -> Tensor:
    """bool [1, 1, T, T], True where a key is not later than the query; on the device of `like`.

    Raises `NotPacked` for more than 2^28 pairs: the program itself does not keep such a mask.
    """
    if tokens * tokens > _MOST_PAIRS:
        raise NotPacked(f"a causal mask of {tokens} x {tokens} tokens is too large")
    return torch.ones(1, 1, tokens, tokens, dtype=torch.bool, device=like.device).tril()


@custom_op("fxpasses::attended_rows", mutates_args=())
def attended_rows(seed: Tensor, masks: list[Tensor], batch: int, exact: list[bool]) -> Tensor:
    """bool [B * T]: the rows of `seed`, bool [B * T], and all that those see under any of the masks, repeatedly.

    masks: bool [B or 1, H or 1, T, T], True where the query of a row sees a key. batch: B. exact: for each mask,
    whether attention by a plan gives the program's result in rows that see nothing. Raises `NotPacked` if it does not,
    and there is such a row.
    """
    live = seed.view(batch, -1).clone()
    while not live.all():
        before = live.clone()
        for mask in masks:
            _add_seen(live, mask)
        if torch.equal(before, live):
            break
    sample.take_texts(seed.view(batch, -1), live)
    for mask, is_exact in zip(masks, exact, strict=True):
        _check_blind(live, mask, is_exact)
    return live.reshape(-1)


@custom_op("fxpasses::rows_attended_from", mutates_args=())
def rows_attended_from(live: Tensor, mask: Tensor, batch: int, exact: bool) -> Tensor:
    """bool [B * Tk]: the rows of another text that the rows `live`, bool [B * Tq], see.

    mask: bool [B or 1, H or 1, Tq, Tk]. batch: B. exact: as for `attended_rows`.
    """
    queries = live.view(batch, -1)
    seen = live.new_zeros(batch, mask.shape[-1])
    _check_blind(queries, mask, exact)
    for b in range(batch):
        seen[b] = _seen_by(queries[b], mask[min(b, len(mask) - 1)])
    return seen.reshape(-1)


def _add_seen(live: Tensor, mask: Tensor) -> None:
    for b, own in enumerate(live):
        own |= _seen_by(own, mask[min(b, len(mask) - 1)])


def _seen_by(live: Tensor, mask: Tensor) -> Tensor:
    """bool [Tk]: the keys that some live query of one sequence sees. live: bool [Tq]. mask: bool [H or 1, Tq, Tk]."""
    if mask.stride(1) == 0:  # one row stands for all
        return mask[:, 0].any(0) & live.any()
    heads, _, keys = mask.shape
    step = max(1, _PAIRS // (heads * keys))
    parts = live.nonzero().view(-1).split(step)
    seen = [_any(mask[:, rows].flatten(0, 1), 0) for rows in parts]
    return _any(torch.stack(seen), 0)


def _any(flags: Tensor, dim: int) -> Tensor:
    """`flags.any(dim)` of bools, for which PyTorch's own takes fifty times as long on a CPU."""
    return flags.view(torch.uint8).amax(dim).view(torch.bool) if flags.shape[dim] else flags.any(dim)


def _check_blind(live: Tensor, mask: Tensor, exact: bool) -> None:
    """Raise `NotPacked` if a live query, bool [B, Tq], sees nothing, unless a plan is exact for it."""
    if not exact:
        sees = _any(mask[:, :, :1] if mask.stride(2) == 0 else mask, -1).all(1)
        if bool((live & ~sees).any()):
            raise NotPacked("a row that is needed attends to nothing")


@custom_op("fxpasses::plan_of_rows", mutates_args=())
def plan_of_rows(mask: Tensor, queries: Tensor, keys: Tensor, batch: int, heads: int) -> Tensor:
    """The plan of attention between rows, as one sequence; see `attention/runtime/plan.py`.

    mask: bool [B or 1, H or 1, Tq, Tk]. queries, keys: sets of rows by `live_rows`. batch: B. heads: how many heads of
    queries share one head of the mask. No mask of all pairs is made. Padding sees the last key: a program may divide by
    the result.
    """
    shape = (1, mask.shape[1], len(queries), len(keys))
    if mask.device.type == "cpu":
        return plans.plan_in_blocks(_pairs_by_sequence(mask, queries, keys, batch), shape, heads)
    return cuda.plan_in_blocks(_pairs(mask, queries, keys), shape)


def _pairs_by_sequence(mask: Tensor, queries: Tensor, keys: Tensor, batch: int) -> plans.Rows:
    """Which keys some queries see, bool [1, H, stop - start, Nk]; looks only at pairs within a sequence."""
    own_heads, q_tokens, k_tokens = mask.shape[1:]
    q_ends = _ends(queries, batch, q_tokens)
    k_ends = _ends(keys, batch, k_tokens)

    def block(start: int, stop: int) -> Tensor:
        found = torch.zeros(1, own_heads, stop - start, len(keys), dtype=torch.bool)
        found[:, :, max(0, q_ends[batch] - start) :, -1] = True
        for b in range(batch):
            q0, q1 = max(q_ends[b], start), min(q_ends[b + 1], stop)
            k0, k1 = k_ends[b], k_ends[b + 1]
            if q0 < q1 and k0 < k1:
                own = mask[min(b, len(mask) - 1)][:, queries[q0:q1] - b * q_tokens]
                found[0, :, q0 - start : q1 - start, k0:k1] = own[:, :, keys[k0:k1] - b * k_tokens]
        return found

    return block


def _pairs(mask: Tensor, queries: Tensor, keys: Tensor) -> plans.Rows:
    """The same on a device, where asking which pairs are within a sequence would wait."""
    (b, q_tokens, k_tokens), own = (mask.shape[0], *mask.shape[2:]), mask.movedim(1, -1)
    k_sequence, k_token, is_last = keys // k_tokens, keys % k_tokens, torch.arange(len(keys), device=keys.device)
    is_last = is_last == len(keys) - 1

    def block(start: int, stop: int) -> Tensor:
        rows = queries[start:stop, None]
        sequence = rows // q_tokens
        seen = own[sequence.clamp(0, b - 1), rows % q_tokens, k_token]
        seen = seen & ((sequence == k_sequence) & (rows >= 0))[..., None]
        return (seen | ((rows < 0) & is_last)[..., None]).movedim(-1, 0)[None]

    return block


def _ends(rows: Tensor, batch: int, tokens: int) -> list[int]:
    """Where the rows of each sequence begin, and where the last sequence's rows end."""
    edges = torch.arange(batch + 1) * tokens
    last = rows.masked_fill(rows < 0, batch * tokens)  # padding is at the end
    found: list[int] = torch.searchsorted(last, edges).tolist()
    return found


@live_rows.register_fake
def _(live: Tensor, share: float, multiple: int) -> Tensor:
    return live.new_empty(torch.library.get_ctx().new_dynamic_size(min=multiple), dtype=torch.int64)


@visible_pairs.register_fake
def _(mask: Tensor, hides: float, exact: bool) -> Tensor:
    return torch.empty_like(mask, dtype=torch.bool)


@earlier_pairs.register_fake
def _(like: Tensor, tokens: int) -> Tensor:
    return like.new_empty(1, 1, tokens, tokens, dtype=torch.bool)


@attended_rows.register_fake
def _(seed: Tensor, masks: list[Tensor], batch: int, exact: list[bool]) -> Tensor:
    return torch.empty_like(seed)


@rows_attended_from.register_fake
def _(live: Tensor, mask: Tensor, batch: int, exact: bool) -> Tensor:
    return live.new_empty(batch * mask.shape[-1])


@plan_of_rows.register_fake
def _(mask: Tensor, queries: Tensor, keys: Tensor, batch: int, heads: int) -> Tensor:
    sizes = mask.shape[1], queries.shape[0], keys.shape[0]
    if mask.device.type == "cpu":
        return mask.new_empty(plans.plan_size(1, *sizes, in_blocks=True), dtype=torch.int32)
    return mask.new_empty(1, sizes[0], cuda.plan_size_in_blocks(*sizes[1:]), dtype=torch.int32)
