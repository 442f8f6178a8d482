"""Sets of rows, as operators of a prologue. A *row* is a token of the batch, b * T + t.

| operator | result |
|---|---|
| `live_rows(live, share)` | the rows of a set, in order |
| `attended_rows(seed, masks, batch)` | the rows that a set sees over any number of layers |
| `plan_of_rows(mask, queries, keys, batch, heads)` | the plan of attention between the rows of two sets |

They run on the host, on the CPU's copy of the batch.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import custom_op

from fxpasses.runtime.attention import plan as plans

# Sets are padded to a multiple of this, with row 0, which nothing reads there: so none is empty, nor of one row, which
# would be broadcast.
MULTIPLE = 16


@custom_op("fxpasses::live_rows", mutates_args=())
def live_rows(live: Tensor, share: float) -> Tensor:
    """The positions, int64 [N], of the True elements of bool [B * T], in order; -1 up to a multiple of 16.

    share: the part of the step's products that is computed for these rows, for who counts them.
    """
    found = live.nonzero().view(-1)
    padding = -len(found) % MULTIPLE if len(found) else MULTIPLE
    return torch.nn.functional.pad(found, (0, padding), value=-1)


@custom_op("fxpasses::attended_rows", mutates_args=())
def attended_rows(seed: Tensor, masks: list[Tensor], batch: int) -> Tensor:
    """bool [B * T]: the rows of `seed`, bool [B * T], and all that those see under any of the masks, repeatedly.

    masks: bool [B or 1, H or 1, T, T], True where the query of a row sees a key. batch: B.
    """
    live = seed.view(batch, -1)
    seen_by = [mask.any(1).float() for mask in masks]
    while True:
        seen = live
        for pairs in seen_by:
            reached = torch.matmul(live.float().unsqueeze(1), pairs.expand(batch, -1, -1)).squeeze(1)
            seen = seen | (reached > 0)
        if torch.equal(seen, live):
            return seen.reshape(-1).clone()
        live = seen


@custom_op("fxpasses::plan_of_rows", mutates_args=())
def plan_of_rows(mask: Tensor, queries: Tensor, keys: Tensor, batch: int, heads: int) -> Tensor:
    """The plan of attention between rows, as one sequence; see `runtime/attention/plan.py`.

    mask: bool [B or 1, H or 1, Tq, Tk]. queries, keys: sets of rows by `live_rows`. batch: B. heads: of queries that
    share one head of the mask. No mask of all pairs is made.
    """
    own_heads, q_tokens, k_tokens = mask.shape[1:]
    q_ends = _ends(queries, batch, q_tokens)
    k_ends = _ends(keys, batch, k_tokens)

    def block(start: int, stop: int) -> Tensor:
        found = torch.zeros(1, own_heads, stop - start, len(keys), dtype=torch.bool)
        for b in range(batch):
            q0, q1 = max(q_ends[b], start), min(q_ends[b + 1], stop)
            k0, k1 = k_ends[b], k_ends[b + 1]
            if q0 < q1 and k0 < k1:
                own = mask[min(b, len(mask) - 1)][:, queries[q0:q1] - b * q_tokens]
                found[0, :, q0 - start : q1 - start, k0:k1] = own[:, :, keys[k0:k1] - b * k_tokens]
        return found

    return plans.plan_in_blocks(block, (1, own_heads, len(queries), len(keys)), heads)


def _ends(rows: Tensor, batch: int, tokens: int) -> list[int]:
    """Where the rows of each sequence begin, and the last one's end."""
    edges = torch.arange(batch + 1) * tokens
    found: list[int] = torch.searchsorted(rows[rows >= 0], edges).tolist()
    return found


@live_rows.register_fake
def _(live: Tensor, share: float) -> Tensor:
    return live.new_empty(torch.library.get_ctx().new_dynamic_size(min=MULTIPLE), dtype=torch.int64)


@attended_rows.register_fake
def _(seed: Tensor, masks: list[Tensor], batch: int) -> Tensor:
    return torch.empty_like(seed)


@plan_of_rows.register_fake
def _(mask: Tensor, queries: Tensor, keys: Tensor, batch: int, heads: int) -> Tensor:
    size = plans.plan_size(1, mask.shape[1], queries.shape[0], keys.shape[0], in_blocks=True)
    return mask.new_empty(size, dtype=torch.int32)
