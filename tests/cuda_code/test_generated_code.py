"""Inductor's code for CUDA, and each of its kernels in PTX for sm_90: for models as the passes leave them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

import fxpasses.inspect
from fxpasses.attention.runtime import operators
from fxpasses.experts.runtime import grouped_triton
from fxpasses.loss import region, row_program
from fxpasses.metadata import draft as building
from fxpasses.report import Reason
from tests.cuda_code.absent_device import AbsentDevice, absent_device
from tests.cuda_code.generating import Code, collecting, generate
from tests.end_to_end.test_training_step import Decoder, batches
from tests.experts.models import HIDDEN, Moe
from tests.experts.spellings import SPELLINGS
from tests.loss.heads import COLUMNS, Head, batch, mean
from tests.support import HOST_READS, reports_of

EXAMPLES = Path(__file__).parents[2] / "examples"
LENGTHS = [100, 60, 96]
TOKENS, WIDTH, HEADS = sum(LENGTHS), 64, 2
LEAST_SHARED_MEMORY = 99 << 10  # bytes that a program may use on an sm_86 or sm_89; other supported GPUs have more
RECORDED = {"triton.cudagraphs": True}  # as mode="reduce-overhead"


@pytest.fixture(scope="module")
def device() -> Iterator[AbsentDevice]:
    with absent_device() as found:
        yield found


@pytest.fixture(autouse=True)
def flags_are_on(capture_flags: None) -> None:
    pass


def check(code: Code) -> None:
    """Nothing in the wrapper waits for the device or is on the host; each kernel is compiled for the device."""
    body = code.wrapper[code.wrapper.rindex("async_compile.wait(") :]
    body = body[: body.index("def get_args")] if "def get_args" in body else body
    reads = [name.removeprefix("aten::") for name in HOST_READS]
    assert not re.findall(rf"\.item\(|\.tolist\(|\.cpu\(|_cpu\(|synchronize|{'|'.join(reads)}", body)
    assert code.ptx and all(".target sm_90" in ptx for ptx in code.ptx.values())


def recorded_pieces(code: Code) -> int:
    found = re.search(r"^runner = Runner\(partitions=\[(.*)\]\)", code.wrapper, re.MULTILINE)
    assert found is not None
    return len([name for name in found[1].split(",") if name.strip()])


class Packed(nn.Module):
    def __init__(self, attention: Callable[..., Any]) -> None:
        super().__init__()
        AttentionInterface.register("packed", attention)
        config = LlamaConfig(
            vocab_size=64,
            hidden_size=WIDTH,
            intermediate_size=96,
            num_attention_heads=HEADS,
            num_key_value_heads=HEADS,
            num_hidden_layers=2,
            use_cache=False,
            attn_implementation="packed",
        )
        self.model = LlamaForCausalLM(config).train()

    def forward(self, ids: Tensor, positions: Tensor, lengths: Tensor) -> Tensor:
        return self.model(input_ids=ids, position_ids=positions, lengths=lengths).logits.square().sum()


def test_a_packed_decoder(device: AbsentDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prologue, forward and backward; each is recorded as one CUDA graph but the prologue, whose results live on."""
    monkeypatch.setattr(building, "WORTH_COMPILING", 1)
    monkeypatch.setattr(building, "_LARGE", 1)
    monkeypatch.syspath_prepend(EXAMPLES)
    from packed_training import packed_attention

    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    with fxpasses.inspect.record() as record:
        model, ids = Packed(packed_attention), torch.zeros(1, TOKENS, dtype=torch.int64)
        codes = generate(device, model, ids, positions, torch.tensor(LENGTHS), **RECORDED)
    (graph,) = record.graphs
    assert graph.outcome == "rewritten"
    assert any(change.startswith("attention_plan") for report in reports_of(record) for change in report.changes)
    assert all(found.whole and not found.numbers for found in graph.cuda_graphs.values())
    for code in codes:
        check(code)
    prologue, forward, backward = codes
    assert [code.is_backward for code in codes] == [False, False, True]
    assert [recorded_pieces(code) for code in codes] == [0, 1, 1]
    assert all(any("flex_attention" in name for name in code.ptx) for code in (forward, backward))
    assert not any("flex_attention" in name for name in prologue.ptx)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_grouped_mixture(device: AbsentDevice, dtype: torch.dtype) -> None:
    """No product waits for its offsets: the operators are called with those on the device."""
    model = Moe(SPELLINGS["where_pairs"], SPELLINGS["where_pairs"].experts[0]).to(dtype)
    forward, backward = generate(device, model, torch.randn(10, HIDDEN, dtype=dtype, requires_grad=True), **RECORDED)
    for code in (forward, backward):
        check(code)
        assert "offsets_on_host" not in code.wrapper and recorded_pieces(code) == 1
    assert forward.wrapper.count("fxpasses.grouped_mm.default(") == 2
    assert backward.wrapper.count("fxpasses.grouped_outer.default(") == 2


@pytest.mark.parametrize("recorded", [False, True], ids=["called", "replayed"])
def test_moved_activations(device: AbsentDevice, recorded: bool) -> None:
    """They wait in host memory, unless a CUDA graph records the step: a replay would not wait for their copies."""
    options = {"fastpack.offload": "host", "fastpack.offload.min_bytes": 1, "triton.cudagraphs": recorded}
    with fxpasses.inspect.record() as record:
        forward, backward = generate(device, Decoder(2, checkpointed=False), *batches()[0], **options)
    (report,) = reports_of(record, "offload_activations")
    moves = [code.wrapper.count("fxpasses.offload.default(") for code in (forward, backward)]
    assert moves == [len(report.transfers), 0] and bool(report.transfers) is not recorded
    assert (Reason.REPLAYED in {refusal.reason for refusal in report.refusals}) is recorded


class Varlen(nn.Module):
    """Layers that ask for the longest sequence of the batch, and pass it to a flash kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2))

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        for layer in self.layers:
            ends = F.pad(lengths.cumsum(0), (1, 0)).int()
            longest = lengths.max().item()
            query, key, value = layer(x).unflatten(-1, (3, HEADS, WIDTH // HEADS)).unbind(1)
            # Not `varlen_attn`, which asks whether the longest is short: fake tensors have no answer.
            attention = torch.ops.aten._flash_attention_forward(
                query, key, value, ends, ends, longest, longest, 0.0, True, False
            )
            x = x + attention[0].flatten(1)
        return x


def test_flash_attention_of_packed_sequences(device: AbsentDevice) -> None:
    """The longest is a number that the kernel takes: each of its values is recorded, and each time the whole graph."""
    x = torch.zeros(TOKENS, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    with fxpasses.inspect.record() as record:
        codes = generate(device, Varlen().bfloat16(), x, torch.tensor(LENGTHS), **RECORDED)
    for found in record.graphs[0].cuda_graphs.values():
        assert found.whole and [(number.kind, number.sizes) for number in found.numbers] == [("int", False)]
    assert [code.is_backward for code in codes] == [False, True]
    for code in codes:
        check(code)
        assert recorded_pieces(code) == 1


# Attention by plans, with FlexAttention's operator


def in_blocks(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    shape = (*mask.shape[:-2], query.shape[-2], key.shape[-2])
    plan = operators.plan_in_blocks(lambda start, stop: mask[..., start:stop, :], shape, device=mask.device)
    return torch.ops.fxpasses.sparse_attention(query, key, value, None, plan)


def by_mask(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    plan = torch.ops.fxpasses.attention_plan(mask, HEADS)
    return torch.ops.fxpasses.sparse_attention(query, key, value, mask, plan)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("attention", "shape", "additive"),
    [
        (by_mask, (1, 1), False),
        (by_mask, (2, 1), True),
        (by_mask, (2, 2 * HEADS), False),
        (in_blocks, (1, 1), False),
        (in_blocks, (2, 2 * HEADS), False),
    ],
    ids=["mask", "additive_for_each_element", "mask_for_each_head", "bits", "bits_for_each_head"],
)
def test_attention_by_plans(
    device: AbsentDevice, attention: Callable[..., Tensor], shape: tuple[int, int], additive: bool, dtype: torch.dtype
) -> None:
    """Two queries for each head of keys; rows and columns that fill no block of 128."""
    query = torch.zeros(2, 2 * HEADS, 200, 32, dtype=dtype, requires_grad=True)
    key, value = (torch.zeros(2, HEADS, 150, 32, dtype=dtype, requires_grad=True) for _ in range(2))
    mask = torch.zeros(*shape, 200, 150, dtype=dtype if additive else torch.bool)
    codes = generate(device, attention, query, key, value, mask, **{"fastpack.passes": []})
    assert [code.is_backward for code in codes] == [False, True]
    for code in codes:
        check(code)
        assert any("flex_attention" in name for name in code.ptx)


# The kernels of grouped products


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("listed", [False, True], ids=["stacked", "listed"])
def test_grouped_products(
    device: AbsentDevice, listed: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled and not launched: Triton asks tensors for their types and addresses alone, so they may be on the CPU."""
    from triton.runtime.jit import JITFunction

    compiled: list[Any] = []
    run = JITFunction.run

    def warm_up(self: Any, *args: Any, warmup: bool, **kwargs: Any) -> None:
        compiled.append(run(self, *args, warmup=True, **kwargs))

    monkeypatch.setattr(JITFunction, "run", warm_up)
    rows, offsets, bias = torch.zeros(40, 48, dtype=dtype), torch.tensor([10, 40, 40]), torch.zeros(3, 64, dtype=dtype)
    weights: Any = torch.zeros(3, 64, 48, dtype=dtype)
    weights = list(weights.unbind()) if listed else weights
    grouped_triton.matmul(rows, weights, offsets, bias, True)
    (grouped_triton.outer_list if listed else grouped_triton.outer)(rows, torch.zeros(40, 64, dtype=dtype), offsets)
    grouped_triton.total(rows, offsets)
    assert [kernel.name for kernel in compiled] == ["_matmul", "_outer", "_total"]
    assert all(".target sm_90" in kernel.asm["ptx"] for kernel in compiled)
    assert all(kernel.metadata.shared <= LEAST_SHARED_MEMORY for kernel in compiled)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loss_in_chunks_of_rows(device: AbsentDevice, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step has the operator, and the program of rows, with its gradient, is a few kernels."""
    monkeypatch.setattr(region, "LEAST_COLUMNS", 16)
    monkeypatch.setattr(region, "LEAST_BYTES", 0)
    monkeypatch.setattr(row_program, "_programs", {})
    inputs = batch(4, 96)
    first, _ = generate(device, Head(mean).to(dtype), *inputs, **{"fastpack.loss": "chunks"})
    assert "loss_in_chunks" in first.wrapper and all(".target sm_90" in ptx for ptx in first.ptx.values())
    (program,) = row_program._programs.values()
    rows = [torch.empty(256, COLUMNS, dtype=dtype), torch.empty(256, dtype=torch.int64), torch.empty(256)]
    operands = [rows[0], rows[1], torch.empty(COLUMNS, dtype=dtype), rows[2].to(program.results[0].dtype)]
    with collecting() as codes:
        program._compile(device.tensors(operands), row_program.Wanted(False, (True, False, True)))
    (code,) = codes
    assert 0 < len(code.ptx) <= 4 and all(".target sm_90" in ptx for ptx in code.ptx.values())
