"""Whole training steps: host reads and masks counted at run time, numbers against eager mode."""

from __future__ import annotations

import copy
import dataclasses
import functools

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import fxpasses
from tests.support import assert_same, compiled, events, host_reads, reports_of, results

TOKENS, WIDTH, HEADS = 16, 16, 2
LENGTHS = ([5, 8, 3], [1, 14, 1], [4, 4, 8])


class Attention(nn.Module):
    """Packed attention as in the wild: every layer asks for the longest length and all lengths, and makes a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, lengths):
        tokens = x.shape[0]
        q, k, v = self.qkv(x).view(tokens, 3, HEADS, WIDTH // HEADS).permute(1, 2, 0, 3)
        torch._check(int(lengths.sum()) == tokens)
        mask = torch.full((tokens, tokens), float("-inf"), dtype=x.dtype, device=x.device)
        position, start = torch.arange(tokens, device=x.device), 0
        for length in lengths.tolist():
            inside = (position >= start) & (position < start + length)
            mask[inside[:, None] & inside[None] & (position[:, None] >= position[None])] = 0
            start += length
        attention = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return x + self.out(attention.transpose(0, 1).reshape(tokens, WIDTH)) * (1 + lengths.max().item() / tokens)


class Decoder(nn.Module):
    def __init__(self, layers: int, checkpointed: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attention() for _ in range(layers))
        self.checkpointed = checkpointed

    def forward(self, x, lengths):
        for layer in self.layers:
            x = checkpoint(layer, x, lengths, use_reentrant=False) if self.checkpointed else layer(x, lengths)
        return x


class Simple(nn.Module):
    """The layer of a program that Inductor was seen to train: a scalar read in each layer, times an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x, lengths):
        longest = lengths.max().item()
        position = torch.arange(longest).float().mean()
        return x + self.b(F.gelu(self.a(x))) * longest + position


class SimpleDecoder(Decoder):
    def __init__(self, layers: int) -> None:
        super().__init__(layers)
        self.layers = nn.ModuleList(Simple() for _ in range(layers))


def batches():
    return [(torch.randn(TOKENS, WIDTH, requires_grad=True), torch.tensor(lengths)) for lengths in LENGTHS]


def warm_step(model, batch):
    x, lengths = batch
    model(x, lengths.clone()).square().mean().backward()  # compiles
    return lambda: model(x, lengths.clone()).square().mean().backward()


@pytest.mark.parametrize("decoder", [Decoder, SimpleDecoder])
def test_host_reads_do_not_depend_on_the_number_of_layers(decoder):
    reads = {
        layers: host_reads(warm_step(compiled(decoder(layers), "aot_eager"), batches()[0])) for layers in (1, 2, 6)
    }
    assert reads[1] == reads[2] == reads[6] > 0
    eager = {layers: host_reads(warm_step(decoder(layers), batches()[0])) for layers in (1, 6)}
    assert eager[6] == 6 * eager[1] > 0


def test_each_mask_is_built_once_a_batch_and_not_in_backward():
    step = warm_step(compiled(Decoder(4), "aot_eager"), batches()[0])
    assert events(step)["aten::full"] == 1
    assert events(warm_step(Decoder(4), batches()[0]))["aten::full"] == 2 * 4


@pytest.mark.parametrize("lowering", ["eager", "aot_eager"])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_numbers_equal_eager_mode_bit_for_bit(lowering, checkpointed):
    record = assert_same(Decoder(3, checkpointed), batches(), lowering)
    assert len(record.graphs) == 1


@pytest.mark.slow
def test_numbers_equal_eager_mode_with_inductor():
    assert_same(Decoder(2), batches(), "inductor", tolerance=1e-5)


@pytest.mark.slow
def test_trains_where_stock_inductor_fails():
    """A graph that holds the same `.item()` twice: `For u0 + u1, expected [u1] to have been codegen-ed`."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(WIDTH, WIDTH))

        def forward(self, x, lengths):
            a = lengths[0].item()
            torch._check(a >= 0)
            torch._check(a <= x.shape[0])
            y = (x[:a] @ self.w).sin()
            b = lengths[0].item()
            torch._check(b >= 0)
            torch._check(b <= x.shape[0])
            z = (x[:b] @ self.w).cos()
            return torch.cat([y, z])

    assert_same(Twice(), batches(), "inductor", tolerance=1e-5)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("fullgraph", "dynamic"),
    [
        (False, None), (True, True), (True, False),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((True, None), (False, True), (False, False))),
    ],
)  # fmt: skip
def test_dynamic_and_fullgraph(dynamic, fullgraph):
    longer = torch.randn(20, WIDTH, requires_grad=True), torch.tensor([9, 9, 2])
    record = assert_same(Decoder(2), [*batches(), longer], "aot_eager", dynamic=dynamic, fullgraph=fullgraph)
    assert all(report.changed for report in reports_of(record))


def test_no_grad_eval_and_autocast():
    model = Decoder(2).eval()
    function = compiled(model, "aot_eager")
    x, lengths = batches()[0]
    with torch.no_grad():
        assert torch.equal(function(x, lengths), model(x, lengths))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(function(x, lengths), model(x, lengths), rtol=0, atol=0)
    assert torch.equal(function(x, lengths), model(x, lengths))


def compile_each_block(model):
    for block in model.layers:
        block.compile(backend=fxpasses.fastpack_backend, options={"fastpack.lowering": "aot_eager"})
    return model


def break_after_each_layer(model):
    for block in model.layers:
        block.register_forward_hook(lambda *_: torch._dynamo.graph_break())
    return compiled(model, "aot_eager")


@pytest.mark.parametrize("arrange", [compile_each_block, break_after_each_layer])
def test_the_graphs_of_one_step_share_the_batch(arrange):
    counts = {}
    for layers in (1, 4):
        torch._dynamo.reset()
        model = Decoder(layers, checkpointed=False)
        x, lengths = batches()[0]
        expected = model(x, lengths)
        with fxpasses.inspect.record() as record:
            function = arrange(model)
            assert torch.equal(function(x, lengths), expected)
        assert reports_of(record)[0].changed
        counts[layers] = events(lambda: function(x, lengths.clone()).sum().backward())  # noqa: B023
    assert counts[1]["aten::full"] == counts[4]["aten::full"] == 1
    assert counts[1]["aten::_local_scalar_dense"] == counts[4]["aten::_local_scalar_dense"]


@dataclasses.dataclass
class Batch:
    tokens: torch.Tensor
    lengths: torch.Tensor


@pytest.mark.parametrize("kind", ["dict", "dataclass", "buffer"])
def test_where_lengths_may_come_from(kind):
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = SimpleDecoder(2)
            self.register_buffer("lengths", torch.tensor(LENGTHS[0]))

        def forward(self, batch):
            if kind == "buffer":
                return self.inner(batch, self.lengths)
            if kind == "dict":
                return self.inner(batch["tokens"], batch["lengths"])
            return self.inner(batch.tokens, batch.lengths)

    model, (x, lengths) = Model(), batches()[0]
    batch = {"dict": {"tokens": x, "lengths": lengths}, "dataclass": Batch(x, lengths), "buffer": x}[kind]
    with fxpasses.inspect.record() as record:
        function = compiled(model)
        assert torch.equal(function(batch), model(batch))
        model.lengths.add_(1)
        assert torch.equal(function(batch), model(batch))
    assert record.figures("hoist_metadata")["host_reads_after"] == 1


def test_fxpasses_compile_needs_no_switch():
    model, (x, lengths) = Decoder(2), batches()[0]
    off = torch._dynamo.config.patch(capture_scalar_outputs=False, capture_dynamic_output_shape_ops=False)
    with off, fxpasses.inspect.record() as record:
        function = fxpasses.compile(model, options={"fastpack.lowering": "eager"})
        assert torch.equal(function(x, lengths), model(x, lengths))
        assert torch._dynamo.config.capture_scalar_outputs is False
    assert len(record.graphs) == 1 and reports_of(record)[0].changed


def test_what_fails_to_compile_runs_as_captured():
    def program(w, e):
        return w[e] * 2

    w, e = torch.randn(4, 3), torch.tensor(2)
    function = torch.compile(program, backend=fxpasses.fastpack_backend, options={"fastpack.lowering": "aot_eager"})
    assert torch.equal(function(w, e), program(w, e))


def test_a_compiled_layer_in_a_selective_checkpoint_of_eager_mode():
    """The checkpoint counts operators: what is computed once per batch is none of the layer's."""

    class Selective(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Attention() for _ in range(2))

        def forward(self, x, lengths):
            for layer in self.layers:
                contexts = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
                x = checkpoint(layer, x, lengths, use_reentrant=False, context_fn=contexts)
            return x

    expected = Selective()
    actual = copy.deepcopy(expected)
    for layer in actual.layers:
        layer.compile(backend="fastpack", options={"fastpack.lowering": "aot_eager", "fastpack.strict": True})
    for batch in batches():
        torch.testing.assert_close(results(actual, batch), results(expected, batch), rtol=0, atol=0)
