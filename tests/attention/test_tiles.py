"""Plans of masks: what the tiles cover, what they cost, and how little they hold."""

import itertools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fxpasses.attention.runtime import cost, masks, operators, tiles
from fxpasses.attention.runtime import plan as plans
from fxpasses.attention.runtime.intervals import intervals_of
from fxpasses.attention.runtime.plan import Kind
from tests.attention.mask_patterns import attention_masks, causal, documents, to_additive, window

SOME = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
MANY = settings(SOME, max_examples=500)


@pytest.fixture(autouse=True)
def calls_are_free(monkeypatch):
    """At these sizes nearly every plan would be dense, or one tile."""
    monkeypatch.setattr(cost, "CALL", 50.0)
    monkeypatch.setattr(cost, "COLUMN", 0.0)
    monkeypatch.setattr(cost, "CAUSAL_ROWS", 30)


def covered(plan, mask):
    """What a plan's tiles let attend, bool in the mask's shape; how often each pair lies in a tile."""
    view = plans.read(plan)
    allowed = torch.zeros(mask.shape, dtype=torch.bool)
    times = torch.zeros(mask.shape, dtype=torch.int)
    for tile in view.tiles:
        place = (slice(tile.b0, tile.b1), slice(tile.h0, tile.h1), slice(tile.start, tile.stop))
        place += (slice(tile.left, tile.right),)
        times[place] += 1
        if tile.kind == Kind.FULL:
            allowed[place] = True
        elif tile.kind == Kind.CAUSAL:
            allowed[place] = causal(tile.stop - tile.start)
        elif tile.kind == Kind.INTERVALS:
            allowed[place] = masks.prepared(plan).of_intervals(tile, torch.float32) == 0
        else:
            said = masks.values(plan, tile, None if view.bits is not None else mask)
            allowed[place] = said if said.dtype == torch.bool else said != float("-inf")
    return allowed, times


def assert_covers(plan, mask, allowed):
    if plans.read(plan).is_dense:
        return
    actual, times = covered(plan, mask)
    assert torch.equal(actual, allowed)
    rows = times.amax(-1)
    assert int(rows.max()) <= 1, "a row lies in two tiles"
    assert ((rows == 1) | ~allowed.any(-1)).all(), "a row that sees something lies in no tile"


def check_exact_cover(mask):
    assert_covers(operators.attention_plan(mask, 8), mask, mask)
    shape = tuple(mask.shape)
    in_blocks = operators.plan_in_blocks(lambda start, stop: mask[:, :, start:stop], shape, 8)
    assert not plans.read(in_blocks).is_dense
    assert_covers(in_blocks, mask, mask)
    for least in (float("-inf"), torch.finfo(torch.float32).min):
        additive = to_additive(mask, least)
        # Where a row rules everything out by finite values, its weights come from the scores again.
        blind = ~mask.any(-1, keepdim=True) if least > float("-inf") else torch.zeros((), dtype=torch.bool)
        plan = operators.attention_plan(additive, 8)
        actual, _ = covered(plan, additive)
        if not plans.read(plan).is_dense:
            expected = mask | blind
            inside_values = actual & ~expected  # tiles that carry the mask's own values rule out by these
            assert torch.equal(actual | inside_values, expected | inside_values)
            assert (additive[inside_values] == least).all()


@SOME
@given(attention_masks())
def test_tiles_cover_what_is_allowed(mask):
    check_exact_cover(mask)


@pytest.mark.slow
@MANY
@given(attention_masks())
def test_tiles_cover_what_is_allowed_in_500_masks(mask):
    check_exact_cover(mask)


@SOME
@given(attention_masks(), st.integers(1, 200))
def test_a_plan_has_a_size_of_its_mask_alone(mask, heads):
    plan = operators.attention_plan(mask, heads)
    assert plan.numel() == plans.plan_size(*mask.shape)
    with torch._subclasses.FakeTensorMode():
        fake = operators.attention_plan(torch.empty(mask.shape, dtype=torch.bool), heads)
    assert fake.shape == plan.shape and fake.dtype == plan.dtype


@SOME
@given(attention_masks(), st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
def test_intervals_of_rows(mask, dtype):
    for given_mask in (mask, to_additive(mask, float("-inf"), dtype), to_additive(mask, torch.finfo(dtype).min, dtype)):
        seen = intervals_of(given_mask)
        for place in itertools.product(*map(range, mask.shape[:3])):
            columns = mask[place].nonzero().flatten().tolist()
            blind = not columns and given_mask.dtype != torch.bool and float(given_mask[place][0]) > float("-inf")
            columns = range(mask.shape[3]) if blind else columns
            bounds = (min(columns, default=0), max(columns, default=-1) + 1)
            assert (int(seen.first[place]), int(seen.last[place])) == bounds
            assert bool(seen.irregular[place]) == (blind or len(columns) != bounds[1] - bounds[0])


def test_values_that_do_not_surely_rule_out_are_kept():
    seen = intervals_of(torch.tensor([[0.0, -1e4, -1e9], [-0.5, 0.0, float("-inf")], [0.0, 0.0, -1e9]]))
    assert seen.last.tolist() == [2, 2, 2]
    assert seen.irregular.tolist() == [True, True, False]
    assert intervals_of(torch.tensor([[float("nan"), 0.0]])).irregular.tolist() == [True]


def test_documents_windows_padding_and_prefixes(monkeypatch):
    """What the tiles of usual masks are. A tile: rows, columns, kind."""

    monkeypatch.undo()

    def shapes(mask, heads=8):
        view = plans.read(operators.attention_plan(mask, heads))
        return {tuple(t)[:4] + (t.start, t.stop, t.left, t.right, Kind(t.kind).name) for t in view.tiles}

    together = shapes(documents([512, 512, 1024], with_causal=False))
    assert together == {
        (0, 1, 0, 1, 0, 512, 0, 512, "FULL"),
        (0, 1, 0, 1, 512, 1024, 512, 1024, "FULL"),
        (0, 1, 0, 1, 1024, 2048, 1024, 2048, "FULL"),
    }
    padding = torch.ones(2, 1, 512, 512, dtype=torch.bool)
    padding[0, :, :, 300:] = False
    assert shapes(padding) == {(0, 1, 0, 1, 0, 512, 0, 300, "FULL"), (1, 2, 0, 1, 0, 512, 0, 512, "FULL")}
    prefix = causal(1024)[None, None] | (torch.arange(1024) < 400)
    for *_, stop, left, right, kind in shapes(prefix):
        assert left == 0 and right == max(400, stop)
        assert kind == ("FULL" if stop <= 400 else "INTERVALS")
    for *_, start, stop, left, right, kind in shapes(window(2048, 256)):
        assert (left, right, kind) == (max(0, start - 255), stop, "INTERVALS")


def test_equal_elements_and_heads_share_tiles(monkeypatch):
    monkeypatch.undo()
    mask = documents([512, 512])
    alike = mask.repeat(3, 4, 1, 1)
    alike[2] = documents([200, 824])
    view = plans.read(operators.attention_plan(alike, 1))
    assert {tile[:4] for tile in view.tiles} == {(0, 2, 0, 4), (2, 3, 0, 4)}
    alike[2, 1:3] = mask
    view = plans.read(operators.attention_plan(alike, 1))
    apart = {(0, 1, 0, 4), (1, 2, 0, 4), (2, 3, 0, 1), (2, 3, 1, 3), (2, 3, 3, 4)}
    assert {tile[:4] for tile in view.tiles} == apart
    expanded = mask.expand(3, 4, -1, -1)
    assert {tile[:4] for tile in plans.read(operators.attention_plan(expanded, 1)).tiles} == {(0, 3, 0, 4)}


def test_a_plan_that_saves_less_than_a_tenth_is_dense(monkeypatch):
    monkeypatch.undo()
    mostly = torch.ones(1, 1, 1024, 1024, dtype=torch.bool)
    mostly[..., 980:] = False
    assert plans.read(operators.attention_plan(mostly, 8)).is_dense
    mostly[..., 700:] = False
    assert not plans.read(operators.attention_plan(mostly, 8)).is_dense
    short = causal(24)[None, None]  # a call costs more than its pairs
    assert plans.read(operators.attention_plan(short, 8)).is_dense
    assert not plans.read(operators.attention_plan(mostly.float().log(), 8)).is_dense


def test_tiny_documents_share_tiles(monkeypatch):
    monkeypatch.undo()
    mask = documents([4] * 512)
    view = plans.read(operators.attention_plan(mask, 8))
    assert len(view.tiles) <= 64
    assert sum(tile.pairs(1, 1) for tile in view.tiles) < 0.05 * mask.numel()


def test_bands_of_a_document_share_one_mask(monkeypatch):
    monkeypatch.undo()
    plan = operators.attention_plan(causal(2047)[None, None], 8)
    prepared = masks.prepared(plan)
    for tile in prepared.plan.tiles:
        prepared.of_intervals(tile, torch.float32)
    assert len(prepared.plan.tiles) >= 8
    assert prepared.bytes_kept <= 3 * 256 * 2048 * 4
    assert masks.prepared(plan) is prepared


def test_masks_go_with_their_plan():
    import gc

    plan = operators.attention_plan(causal(64)[None, None], 8)
    masks.prepared(plan)
    before = len(masks._prepared)
    del plan
    gc.collect()
    assert len(masks._prepared) == before - 1


def test_more_masks_than_fit_are_made_anew(monkeypatch):
    monkeypatch.setattr(masks, "KEPT_BYTES", 100)
    plan = operators.attention_plan(window(128, 40), 8)
    prepared = masks.prepared(plan)
    for tile in prepared.plan.tiles * 2:
        expected = window(128, 40)[0, 0, tile.start : tile.stop, tile.left : tile.right]
        assert torch.equal(prepared.of_intervals(tile, torch.float32) == 0, expected)
    assert prepared.bytes_kept <= 100


@pytest.mark.parametrize("columns", [1, 31, 32, 33, 100])
def test_bits_are_packed_and_unpacked(columns):
    block = torch.rand(2, 5, columns) < 0.5
    bits = plans.pack(block)
    assert bits.shape == (2, 5, (columns + 31) // 32)
    for left, right in [(0, columns), (columns // 3, columns), (columns // 2, columns // 2 + 1)]:
        assert torch.equal(plans.unpack(bits, left, right), block[..., left:right])


def test_candidates_leave_room_for_all_tiles():
    for lengths in ([1] * 100, [15] * 20, [16] * 20, [17, 1, 1, 300], [5], [1000]):
        mask = documents(lengths)[0, 0]
        seen = intervals_of(mask)
        assert len(tiles.cut(seen.first.tolist(), seen.last.tolist(), 1e6)) <= tiles.most_tiles(mask.shape[0])
