"""How the branches of a loop over experts put their results together: where a sum is none, and lists of results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.experts.layer import EXPERTS, PAIRS, TOKENS, WIDTH, Layer, add_all, check, level_of, written
from tests.support import compiled, events

pytestmark = pytest.mark.usefixtures("capture_flags")


# A place that is met twice within an expert: `out[tok] += y` takes the last value, and is no sum.

Ids = Callable[[Tensor], Tensor]


def written_in_place(idx: Tensor) -> Tensor:
    idx[:, 1] = idx[:, 0]
    return idx


def written_through_a_copy_that_is_none(idx: Tensor) -> Tensor:
    idx.long()[:, 1] = idx[:, 0]
    return idx


def stacked(idx: Tensor) -> Tensor:
    return torch.stack([idx[:, 0], idx[:, 0]], 1)


def slots_as_tokens(idx: Tensor) -> Tensor:
    return idx.reshape(2, -1).t()


TWICE = [written_in_place, written_through_a_copy_that_is_none, stacked, slots_as_tokens]


WAYS = {
    "tokens": written(f"{PAIRS}; out[tok] += y"),
    "slots first": written(
        "slot, tok = torch.where(mask[e]); out[tok] += (x[tok] @ w[e]) * weights[tok, slot, None]",
        "mask = F.one_hot(idx, EXPERTS).permute(2, 1, 0)",
    ),
    "pairs": written(
        "pairs = torch.where(flat == e)[0]; tok = pairs // 2; out[tok] += (x[tok] @ w[e]) * scores[pairs, None]",
        "flat, scores = idx.flatten(), weights.flatten()",
    ),
    "a sum of one_hot": written(
        "tok = hot[:, e].nonzero().flatten(); out[tok] += (x[tok] @ w[e]) * hot[tok, e, None]",
        "hot = F.one_hot(idx, EXPERTS).sum(1)",
    ),
    "a sum as a mask": written(
        "own = hot[..., e]; out[own] += x[own] @ w[e] * weights[own].sum(-1, keepdim=True)",
        "hot = F.one_hot(idx, EXPERTS).sum(1).bool()",
    ),
    "any": written("mask = (idx == e).any(-1); out[mask] += (x[mask] @ w[e]) * weights[mask].sum(-1, keepdim=True)"),
    "masked_scatter": written(
        "mask = (idx == e).any(-1, keepdim=True); rows = torch.masked_select(x, mask).view(-1, WIDTH); "
        "out = out + torch.zeros_like(x).masked_scatter(mask, rows @ w[e])"
    ),
}


def of(ids: Ids, way: Callable[..., Tensor]) -> Any:
    return lambda layer, x, weights, idx: way(layer, x, weights, ids(idx))


@pytest.mark.parametrize("way", WAYS)
def test_each_token_once_in_an_expert(way: str) -> None:
    assert level_of(check(WAYS[way])) == 2


@pytest.mark.parametrize("ids", TWICE, ids=lambda ids: ids.__name__)
@pytest.mark.parametrize("way", WAYS)
def test_a_token_twice_in_an_expert(ids: Ids, way: str) -> None:
    assert level_of(check(of(ids, WAYS[way]), tolerance=1e-6)) < 2


def test_a_token_twice_in_an_expert_is_summed_by_index_add() -> None:
    assert level_of(check(of(stacked, add_all), tolerance=1e-6)) == 2


# Places that are made of a pair's coordinates, and do not tell the pair: the size of the sum, and how it is added to.
LOSING = {
    "two tokens in one": ("TOKENS, WIDTH", "out[tok // 2] += y"),
    "slots": ("2, WIDTH", "out[slot] += y"),
    "a table": ("TOKENS, WIDTH", "out[(torch.arange(TOKENS) // 3)[tok]] += y"),
    "the diagonal": ("TOKENS, TOKENS, WIDTH", "out[tok, tok] = y"),
    "tokens, overwritten": ("TOKENS, WIDTH", "out[tok] = y"),
    "a remainder": ("3, WIDTH", "out[(tok * 2 + slot) % 3] = y"),
}


@pytest.mark.parametrize("name", LOSING)
def test_places_that_are_met_twice(name: str) -> None:
    size, add = LOSING[name]
    assert level_of(check(written(f"{PAIRS}; {add}", start=f"torch.zeros({size})"))) == 1


@pytest.mark.parametrize("group", [1, 3, 4])
def test_pairs_divided_by_another_number_than_slots(group: int) -> None:
    loop = written(
        f"pairs = torch.where(idx.flatten() == e)[0]; out[pairs // {group}] += x[pairs // 2] @ w[e]",
        start="torch.zeros(2 * TOKENS, WIDTH)",
    )
    assert level_of(check(loop)) == 1


def test_all_coordinates_of_a_pair_tell_it() -> None:
    loop = written(
        "tok, slot = torch.where(idx == e); out[slot, tok] = x[tok] @ w[e]", start="torch.zeros(2, TOKENS, WIDTH)"
    )
    assert level_of(check(loop)) == 2


# Lists of results

Finish = Callable[..., Any]


def listed(finish: Finish) -> Any:
    """`finish(layer, x, weights, pairs, parts)` with the lists that the loop fills."""

    def loop(layer: Layer, x: Tensor, weights: Tensor, idx: Tensor) -> Any:
        pairs, parts = [], []
        for e in range(EXPERTS):
            own = torch.where(idx.flatten() == e)[0]
            parts.append(x[own // 2] @ layer.w[e])
            pairs.append(own)
        return finish(x, weights, pairs, parts)

    return loop


def unsorted_again(x: Tensor, weights: Tensor, pairs: list[Tensor], parts: list[Tensor]) -> Tensor:
    y = torch.cat(parts)[torch.cat(pairs).argsort()]
    return (y.view(TOKENS, 2, -1) * weights[..., None]).sum(1)


def added(x: Tensor, weights: Tensor, pairs: list[Tensor], parts: list[Tensor]) -> Tensor:
    order = torch.cat(pairs)
    scores = weights.flatten()[order]  # between the two lists
    return torch.zeros_like(x).index_add(0, order // 2, torch.cat(parts) * scores[:, None])


def put_back(x: Tensor, weights: Tensor, pairs: list[Tensor], parts: list[Tensor]) -> Tensor:
    y = x.new_empty(2 * TOKENS, WIDTH)
    y[torch.cat(pairs)] = torch.cat(parts)
    return (y.view(*weights.shape, -1) * weights[..., None]).sum(1)


def written_to(x: Tensor, weights: Tensor, pairs: list[Tensor], parts: list[Tensor]) -> Any:
    order, again, y = torch.cat(pairs), torch.cat(pairs), torch.cat(parts)
    order += 1
    y *= 2
    return y[again.argsort()], order


def width_of_view(x: Tensor, weights: Tensor, pairs: list[Tensor], parts: list[Tensor]) -> Tensor:
    y = torch.cat(parts)[torch.cat(pairs).argsort()].view(*weights.shape, -1)
    return F.layer_norm((y * weights[..., None]).sum(1), (y.shape[-1],)) + x


# What is done with the lists, and the level that it allows.
LISTS: dict[str, tuple[Finish, int]] = {
    "unsorted again": (unsorted_again, 2),
    "added": (added, 2),
    "put back": (put_back, 2),
    "written to": (written_to, 2),
    "width of a view": (width_of_view, 2),
    "reversed pairs": (lambda x, weights, pairs, parts: unsorted_again(x, weights, pairs[::-1], parts), 1),
    "one part twice": (lambda x, weights, pairs, parts: (torch.cat([parts[0], *parts]), torch.cat(pairs)), 1),
    "one part missing": (lambda x, weights, pairs, parts: (torch.cat(parts[1:]), torch.cat(pairs[1:])), 1),
    "not as many": (lambda x, weights, pairs, parts: (torch.cat(parts[:2]), torch.cat(pairs)), 1),
    "seen elsewhere": (lambda x, weights, pairs, parts: (torch.cat(parts), torch.cat(pairs), pairs[1].sum()), 1),
    "a stranger in front": (lambda x, weights, pairs, parts: (torch.cat([x, *parts]), torch.cat(pairs)), 1),
    "another kind": (lambda x, weights, pairs, parts: (torch.cat([parts[0].tanh(), *parts[1:]]), torch.cat(pairs)), 1),
}


@pytest.mark.parametrize("name", LISTS)
def test_lists(name: str) -> None:
    finish, level = LISTS[name]
    tolerance = 1e-5 if finish is width_of_view else 0.0  # a residual: gradients are summed in another order
    assert level_of(check(listed(finish), tolerance=tolerance)) == level


def test_two_layers_of_lists() -> None:
    """The width of the second layer's input is a size that only the first one's rows tell."""
    loop = listed(unsorted_again)

    def twice(layer: Layer, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
        x = x + loop(layer, x, weights, idx)
        weights, idx = layer.gate(x).softmax(-1).topk(2, dim=-1)
        return x + loop(layer, x, weights, idx)

    assert check(twice, tolerance=1e-4).figures("group_experts")["loops_grouped"] == 2


def test_a_list_that_leads_to_another() -> None:
    def loop(layer: Layer, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
        pairs = [torch.where(idx.flatten() == e)[0] for e in range(EXPERTS)]
        order = torch.cat(pairs)
        shift = order.sum() * 0.01
        y = torch.cat([(x[own // 2] + shift) @ layer.w[e] for e, own in enumerate(pairs)])
        return torch.zeros_like(x).index_add(0, order // 2, y)

    assert level_of(check(loop)) == 1


def test_a_part_of_the_rows_themselves() -> None:
    """`torch.cat` copies; the rows that were cut are written to later."""

    def loop(layer: Layer, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
        flat = idx.flatten()
        rows = x.detach()[flat.argsort(stable=True) // 2]
        y = torch.cat(rows.split(flat.bincount(minlength=EXPERTS).tolist()))
        rows.zero_()
        return y * x.sum()

    assert level_of(check(loop)) == 2


# masked_select and masked_scatter

Masked = Callable[..., Tensor]


def masked(mask_of: Callable[[Tensor], Tensor], merge: Masked, start: Any = torch.zeros_like) -> Any:
    def loop(layer: Layer, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
        out = start(x)
        for e in range(EXPERTS):
            mask = mask_of(idx == e)
            rows = torch.masked_select(x, mask).view(-1, WIDTH)
            y = (rows @ layer.w[e]) * torch.masked_select(weights, idx == e).unsqueeze(-1)
            out = merge(out, x, mask, y)
        return out

    return loop


def keepdim(chosen: Tensor) -> Tensor:
    return chosen.any(-1, keepdim=True)


def plain(out: Tensor, x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    return out + torch.zeros_like(x).masked_scatter(mask, y)


def in_place(out: Tensor, x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    out += x.new_zeros(x.shape).masked_scatter(mask, y)
    return out


MASKS: dict[str, Callable[[Tensor], Tensor]] = {
    "keepdim": keepdim,
    "unsqueeze": lambda chosen: chosen.any(-1).unsqueeze(-1),
    "None": lambda chosen: chosen.any(-1)[:, None],
    "expand": lambda chosen: chosen.any(-1)[..., None].expand(-1, WIDTH),
}
MERGES: dict[str, tuple[Masked, int]] = {
    "in place": (in_place, 2),
    "onto ones": (lambda out, x, mask, y: out + torch.ones_like(x).masked_scatter(mask, y), 1),
    "another mask": (lambda out, x, mask, y: out + torch.zeros_like(x).masked_scatter(mask.flip(0), y), 1),
    "twice as much": (lambda out, x, mask, y: torch.add(out, torch.zeros_like(x).masked_scatter(mask, y), alpha=2), 1),
    "from more rows": (lambda out, x, mask, y: out + torch.zeros_like(x).masked_scatter(mask, torch.cat([y, y])), 1),
    "from wider rows": (lambda out, x, mask, y: out + torch.zeros_like(x).masked_scatter(mask, y.repeat(1, 2)), 1),
    "the sum shrinks": (lambda out, x, mask, y: out * 0.5 + torch.zeros_like(x).masked_scatter(mask, y), 1),
    "broadcast": (lambda out, x, mask, y: out[:1] + torch.zeros_like(x).masked_scatter(mask, y), 1),
    "overwritten": (lambda out, x, mask, y: out.masked_scatter(mask, y), 1),
}  # fmt: skip


@pytest.mark.parametrize("name", MASKS)
def test_masks_over_features(name: str) -> None:
    assert level_of(check(masked(MASKS[name], plain))) == 2


@pytest.mark.parametrize("name", MERGES)
def test_merges_by_masked_scatter(name: str) -> None:
    merge, level = MERGES[name]
    assert level_of(check(masked(keepdim, merge))) == level


def test_a_sum_that_starts_from_something() -> None:
    assert level_of(check(masked(keepdim, plain, start=lambda x: x * 2), tolerance=1e-6)) == 2


def test_rows_of_another_width_than_were_selected() -> None:
    loop = written(
        "mask = (idx == e).any(-1, keepdim=True); "
        "halves = torch.masked_select(x, mask).view(-1, WIDTH // 2) @ w[e][: WIDTH // 2]; "
        "out = out + torch.zeros_like(x).masked_scatter(mask, halves)"
    )
    assert level_of(check(loop)) < 2


def test_assertions_about_elements_are_kept() -> None:
    """72 elements are nine rows, and there are ten tokens."""
    loop = written(
        "mask = (idx == e).any(-1, keepdim=True); selected = torch.masked_select(x, mask); "
        "torch._check(selected.numel() <= 72); "
        "out = out + torch.zeros_like(x).masked_scatter(mask, selected.view(-1, WIDTH) @ w[e])"
    )
    assert level_of(check(loop)) < 2


@pytest.mark.parametrize("loop", [listed(unsorted_again), masked(keepdim, plain)], ids=["lists", "masked"])
def test_nothing_is_asked_at_run_time(loop: Any) -> None:
    layer = Layer(loop)
    x = torch.randn(TOKENS, WIDTH, requires_grad=True)
    program = compiled(layer, "aot_eager")
    program(x).sum().backward()
    seen = events(lambda: program(x).sum().backward())
    assert seen["aten::nonzero"] == seen["aten::masked_select"] == seen["aten::_local_scalar_dense"] == 0
