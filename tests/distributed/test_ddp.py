"""DistributedDataParallel with several buckets: the passes see the whole graph, and DDP's cuts come after them.

One process is enough for what is compiled; two see that gradients are averaged and overlap backward. Everything is
compared with eager mode under the same arrangement, bit for bit where nothing else is said.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import fxpasses
import fxpasses.compiler.backend
import fxpasses.inspect
from fxpasses.inspect import Record
from tests.distributed.ranks import run_on_ranks
from tests.end_to_end.test_training_step import Attention, Decoder, batches
from tests.support import HOST_READS, events, reports_of

OPTIONS = {"fastpack.lowering": "aot_eager", "fastpack.strict": True}
LAYERS = 2
WIDTH = 16
BUCKET = 1024  # bytes: less than any layer has

Model = Callable[[], nn.Module]
Wrap = Callable[[nn.Module], nn.Module]
Numbers = list[torch.Tensor]


@pytest.fixture
def process_group(single_process_group: None) -> Iterator[None]:
    with small_first_bucket():
        yield


pytestmark = pytest.mark.usefixtures("process_group")


@contextlib.contextmanager
def small_first_bucket() -> Iterator[None]:
    """DDP's own, and DDPOptimizer's: 1 MiB otherwise, more than a small model has."""
    default, dist._DEFAULT_FIRST_BUCKET_BYTES = dist._DEFAULT_FIRST_BUCKET_BYTES, BUCKET
    counters.clear()
    try:
        yield
    finally:
        dist._DEFAULT_FIRST_BUCKET_BYTES = default


def ddp(model: nn.Module, **options: Any) -> nn.Module:
    return DistributedDataParallel(model, **{"bucket_cap_mb": 2 * BUCKET / 2**20, **options})


def compiled(model: nn.Module, **options: Any) -> Any:
    return torch.compile(model, backend="fastpack", options={**OPTIONS, **options})


def in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="fastpack", options=OPTIONS)
    return model


def by_layer(model: nn.Module) -> nn.Module:
    for layer in model.layers:  # type: ignore[union-attr]
        layer.compile(backend="fastpack", options=OPTIONS)
    return model


# Training


def steps(model: nn.Module, data: list[Any], optimizer_step: Wrap | None = None, accumulate: int = 1) -> Numbers:
    """Losses, the gradients before each optimizer step, and the final weights."""
    # A power of two: torch 2.11 traces `add_(gradient, alpha=-rate)` as a product and a sum, which then round alike.
    optimizer = torch.optim.SGD(model.parameters(), 0.125, foreach=False)
    step = optimizer.step if optimizer_step is None else optimizer_step(optimizer.step)
    numbers: Numbers = []
    for number, (x, lengths) in enumerate(data, start=1):
        is_last = number % accumulate == 0
        with contextlib.nullcontext() if is_last else model.no_sync():
            loss = model(x, lengths.clone()).square().mean() / accumulate
            loss.backward()
        numbers.append(loss.detach())
        if is_last:
            numbers += [p.grad.clone() for p in model.parameters() if p.grad is not None]
            step()
            optimizer.zero_grad()
    return numbers + [p.detach().clone() for p in model.parameters()]


def seeded(make: Model, wrap: Wrap) -> nn.Module:
    torch.manual_seed(0)
    return wrap(make())


def assert_equals_eager(make: Model, wrap: Wrap, eager: Wrap = ddp, train: Callable[..., Numbers] = steps) -> Record:
    data = batches()
    torch.manual_seed(1)
    expected = train(seeded(make, eager), data)
    with fxpasses.inspect.record() as record:
        torch.manual_seed(1)
        actual = train(seeded(make, wrap), data)
    assert len(expected) == len(actual)
    for wanted, found in zip(expected, actual, strict=True):
        assert torch.equal(wanted, found)
    return record


def pieces_of(record: Record) -> list[int]:
    return [report.figures["pieces"] for report in reports_of(record, "ddp_buckets")]


# The first table of docs/sharding.md


@dataclass(frozen=True)
class Arrangement:
    """How to wrap and train, and what comes of it: graphs, pieces of each, and breaks in PyTorch's own code."""

    wrap: Wrap
    eager: Wrap = ddp
    train: Callable[..., Numbers] = steps
    graphs: int = 1
    pieces: int = LAYERS  # a checkpoint is one operator, and is not cut
    breaks: int = 0


def with_(**options: Any) -> dict[str, Wrap]:
    return {"wrap": lambda m: ddp(compiled(m), **options), "eager": lambda m: ddp(m, **options)}


def accumulated(model: nn.Module, data: list[Any]) -> Numbers:
    return steps(model, 2 * data, accumulate=len(data))


def compiled_optimizer(model: nn.Module, data: list[Any]) -> Numbers:
    wrap = compiled if isinstance(getattr(model, "module", None), torch._dynamo.OptimizedModule) else None
    return steps(model, data, wrap)


ARRANGEMENTS = {
    "DDP(torch.compile(model))": Arrangement(lambda m: ddp(compiled(m))),
    "torch.compile(DDP(model))": Arrangement(lambda m: compiled(ddp(m)), breaks=3),
    "ddp.compile()": Arrangement(lambda m: in_place(ddp(m)), breaks=2 if torch.__version__ < "2.15" else 3),
    "layer.compile(), DDP(model)": Arrangement(lambda m: ddp(by_layer(m)), pieces=2),
    "fxpasses.compile": Arrangement(lambda m: ddp(fxpasses.compile(m, options=OPTIONS))),
    "static_graph": Arrangement(**with_(static_graph=True)),
    "find_unused_parameters": Arrangement(**with_(find_unused_parameters=True)),
    "gradient_as_bucket_view": Arrangement(**with_(gradient_as_bucket_view=True)),
    "no_sync": Arrangement(lambda m: ddp(compiled(m)), train=accumulated),
    "torch.compile(optimizer.step)": Arrangement(
        lambda m: ddp(compiled(m)), train=compiled_optimizer, graphs=2, breaks=1
    ),
}


@pytest.mark.parametrize("name", ARRANGEMENTS)
def test_an_arrangement_is_one_graph_equal_to_eager_mode(name: str) -> None:
    arrangement = ARRANGEMENTS[name]
    record = assert_equals_eager(lambda: Decoder(LAYERS), arrangement.wrap, arrangement.eager, arrangement.train)
    assert [graph.outcome for graph in record.graphs] == ["rewritten", "captured"][: arrangement.graphs]
    assert set(pieces_of(record)) == {arrangement.pieces}
    assert sum(counters["graph_break"].values()) == arrangement.breaks


COUNTS, EAGER_COUNTS = (8, 1), (27, 2 * 3)  # host reads and masks of a step, of 3 layers in eager mode


def test_reads_and_masks_are_those_of_one_layer() -> None:
    def counts(wrap: Wrap, layers: int) -> tuple[int, int]:
        model = seeded(lambda: Decoder(layers), wrap)
        (x, lengths), *_ = batches()
        model(x, lengths.clone()).square().mean().backward()
        found = events(lambda: model(x, lengths.clone()).square().mean().backward())
        return sum(found[name] for name in HOST_READS), found["aten::full"]

    # Torch 2.15 no longer reads the 0 of `mask[rows, columns] = 0`, of which a mask has three.
    zeros = 3 if torch.__version__ < "2.15" else 0
    (reads, masks), (eager_reads, eager_masks) = COUNTS, EAGER_COUNTS
    ours = (reads - (3 - zeros) * masks, masks)
    assert counts(lambda m: ddp(compiled(m)), 1) == counts(lambda m: ddp(compiled(m)), 3) == ours
    assert counts(ddp, 3) == (eager_reads - (3 - zeros) * eager_masks, eager_masks)


@pytest.mark.parametrize("optimized", [True, False])
def test_gradients_are_reduced_while_backward_runs(optimized: bool) -> None:
    def hook(state, bucket):
        with torch.profiler.record_function("reduction"):
            return allreduce_hook(None, bucket)

    with torch._dynamo.config.patch(optimize_ddp=optimized):
        model: Any = seeded(lambda: Decoder(LAYERS), lambda m: ddp(compiled(m)))
        model.register_comm_hook(None, hook)
        steps(model, batches()[:1])
        x, lengths = batches()[0]
        loss = model(x, lengths).square().mean()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        loss.backward()
    names = [event.name for event in sorted(profile.events(), key=lambda event: event.time_range.start)]
    assert ("aten::mm" in names[names.index("reduction") :]) is optimized


def test_compiled_autograd_sees_the_reductions_of_the_python_reducer() -> None:
    def train(model: nn.Module, data: list[Any]) -> Numbers:
        if config.optimize_ddp is True:
            return steps(model, data)
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="fastpack", options=OPTIONS)):
            return steps(model, data)

    def wrap(model: nn.Module) -> nn.Module:
        config.optimize_ddp = "python_reducer"
        return ddp(compiled(model))

    config: Any = torch._dynamo.config
    with config.patch(optimize_ddp=True):
        record = assert_equals_eager(lambda: Decoder(1), wrap, train=train)
    assert [graph.outcome for graph in record.graphs] == ["rewritten", "captured"]  # forward, and backward
    assert not pieces_of(record)


# What cuts go through


class Experts(nn.Module):
    """A loop over experts that adds to one tensor. `chained`: no two experts can run at a time, so none are grouped."""

    def __init__(self, chained: bool) -> None:
        super().__init__()
        self.router, self.chained = nn.Linear(WIDTH, 3), chained
        self.up = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.down = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x, lengths):
        scores, chosen = torch.topk(self.router(x).softmax(-1), 2)
        total = torch.zeros_like(x)
        for e in range(3):
            token, slot = torch.where(chosen == e)
            y = self.down[e](F.relu(self.up[e](x[token]))) * scores[token, slot, None]
            total.index_add_(0, token, y * total.sum().sigmoid() if self.chained else y)
        return x + total * lengths.max().item()


def decoder(*layers: nn.Module) -> nn.Module:
    model = Decoder(0, checkpointed=False)
    model.layers.extend(layers)
    return model


def mixture(chained: bool) -> nn.Module:
    return decoder(Attention(), Experts(chained))


def test_a_loop_that_writes_to_an_input_of_a_piece_equals_eager_mode() -> None:
    record = assert_equals_eager(lambda: mixture(chained=True), lambda m: ddp(compiled(m)))
    assert len(record.graphs) == 1
    assert pieces_of(record) == [5]  # the loop is cut


def test_a_loop_is_grouped_before_it_is_cut() -> None:
    """Grouped products add up in another order than eager mode; pieces make no difference to them."""
    data = batches()

    def train(optimize: bool) -> tuple[Numbers, Record]:
        torch._dynamo.reset()
        with torch._dynamo.config.patch(optimize_ddp=optimize), fxpasses.inspect.record() as record:
            return steps(seeded(lambda: mixture(chained=False), lambda m: ddp(compiled(m))), data), record

    (whole, _), (pieces, record) = train(False), train(True)
    assert all(map(torch.equal, whole, pieces))
    assert reports_of(record, "group_experts")[0].summary == "1 loop over experts became grouped programs"
    assert pieces_of(record) == [3]  # 2 if parameters in lists were not counted
    torch.testing.assert_close(whole[0], steps(seeded(lambda: mixture(chained=False), ddp), data)[0])


class Numbered(nn.Module):
    """Numbers of the batch that later pieces use: a float, what is made of integers, a size."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x, lengths):
        longest, mean = lengths.max().item(), lengths.float().mean().item()
        factor, share = longest * 2 + 1, longest / 7
        y = self.b(self.a(x[:longest]) * factor * mean).tanh() * share
        return F.pad(self.c(y).tanh() * factor * share * mean, (0, 0, 0, x.shape[0] - longest))


def test_numbers_do_not_cross_cuts() -> None:
    record = assert_equals_eager(lambda: decoder(Numbered(), Numbered()), lambda m: ddp(compiled(m)))
    assert pieces_of(record) == [4]


class Written(nn.Module):
    """The bias takes nothing of the second layer, but is added to memory that it wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.bias = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x, lengths):
        memory = self.a(x) * 2
        y = self.b(x)
        memory.add_(y)
        return (memory + self.bias) * 2 + self.c(y)


def test_pieces_keep_their_order() -> None:
    """Under PyTorch's DDPOptimizer the bias is added before the second layer has written: the loss is another one."""
    small = {"bucket_cap_mb": BUCKET / 2**20}
    record = assert_equals_eager(Written, lambda m: ddp(compiled(m), **small), lambda m: ddp(m, **small))
    assert pieces_of(record) == [4]


# Where the graph is not cut, or not by us


def test_a_graph_with_a_piece_that_fails_is_compiled_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = []

    def fails_once(*args: Any, **kwargs: Any) -> Any:
        attempts.append(args)
        if len(attempts) == 2:
            raise KeyError("u0")
        return lower(*args, **kwargs)

    lower = fxpasses.compiler.backend.lower
    monkeypatch.setattr(fxpasses.compiler.backend, "lower", fails_once)
    with pytest.warns(UserWarning, match=r"at DDP's buckets, failed (?s:.*)compiled whole"):
        record = assert_equals_eager(lambda: Decoder(2), lambda m: ddp(compiled(m, **{"fastpack.strict": False})))
    assert len(attempts) == 3  # the first piece, the second, and the whole graph
    assert [graph.outcome for graph in record.graphs] == ["rewritten"]
    assert not pieces_of(record)


def test_a_torch_that_cuts_in_another_way_has_graphs_compiled_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.backends import distributed

    def one_piece_after_all(self: Any, gm: Any, inputs: Any) -> Any:
        self.buckets = [None, None]
        return self.backend_compile_fn(gm, inputs)

    monkeypatch.setattr(distributed.DDPOptimizer, "compile_fn", one_piece_after_all)
    with pytest.warns(UserWarning, match=r"does not cut by `split_module`(?s:.*)compiled whole"):
        record = assert_equals_eager(lambda: Decoder(2), lambda m: ddp(compiled(m, **{"fastpack.strict": False})))
    assert [graph.outcome for graph in record.graphs] == ["rewritten"]


def test_a_backend_of_the_users_around_ours_is_run_on_fake_tensors() -> None:
    """DDPOptimizer cannot be moved inside what it cannot see, and each piece is a graph with a prologue."""

    def around(gm: Any, inputs: Any) -> Any:
        return fxpasses.fastpack_backend(gm, inputs, options=OPTIONS)

    record = assert_equals_eager(lambda: mixture(chained=True), lambda m: ddp(torch.compile(m, backend=around)))
    assert len(record.graphs) > 1


def test_an_eager_lowering_needs_no_pieces() -> None:
    record = assert_equals_eager(lambda: Decoder(2), lambda m: ddp(compiled(m, **{"fastpack.lowering": "eager"})))
    assert len(record.graphs) == 1 and not pieces_of(record)


# Layers that are compiled once: each layer's gradients come as its backward is done, and there are no cuts

FOLD = {"fastpack.fold": "on"}


@pytest.mark.parametrize(
    "wrap",
    [lambda m: ddp(compiled(m, **FOLD)), lambda m: compiled(ddp(m), **FOLD), lambda m: ddp(by_layer(m))],
    ids=["DDP(torch.compile(model))", "torch.compile(DDP(model))", "layer.compile(), nothing to fold"],
)
def test_folded_layers(wrap: Wrap, request: pytest.FixtureRequest) -> None:
    record = assert_equals_eager(lambda: Decoder(LAYERS), wrap)
    folded = sum(report.figures.get("layers", 0) for report in reports_of(record, "fold_layers"))
    assert folded == (0 if "nothing" in request.node.name else LAYERS)
    assert bool(pieces_of(record)) == (not folded)


# On several processes


def numbers_of(rank: int, folded: bool = False) -> list[Numbers]:
    """Losses, gradients and weights in eager mode, and compiled; each rank has other lengths."""
    data = batches()
    first = rank % len(data)
    data = data[first:] + data[:first]
    with small_first_bucket():
        wraps = [ddp, lambda m: ddp(compiled(m)), *[lambda m: ddp(compiled(m, **FOLD))] * folded]
        return [steps(seeded(lambda: Decoder(LAYERS + 1), wrap), data) for wrap in wraps]


def assert_equal_weights(ranks: list[list[Numbers]]) -> None:
    first, *others = ([numbers[-4 * (LAYERS + 1) :] for numbers in ways] for ways in ranks)
    for other in others:
        assert all(all(map(torch.equal, *pair)) for pair in zip(first, other, strict=True))


def test_two_ranks_with_other_batches_equal_eager_mode() -> None:
    ranks = run_on_ranks(numbers_of, args=(True,))
    for eager, *others in ranks:
        assert all(all(map(torch.equal, eager, found)) for found in others)
    assert_equal_weights(ranks)


@pytest.mark.slow
def test_four_ranks_equal_eager_mode_within_rounding() -> None:
    """Buckets are filled in another order, and so the ranks' numbers are added up in another order."""
    ranks = run_on_ranks(numbers_of, world=4)
    for eager, found in ranks:
        torch.testing.assert_close(found, eager)
    assert_equal_weights(ranks)
