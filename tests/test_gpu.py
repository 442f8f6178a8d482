"""On a CUDA device, under Inductor: every pass against eager mode there, on models of transformers.

`tests/device` runs programs on a simulated device; here are the kernels that only a real one runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpasses
import fxpasses.inspect
from tests.support import reports_of

transformers = pytest.importorskip("transformers")

pytestmark = [pytest.mark.gpu, pytest.mark.all_cases]

TOKENS, ROWS, VOCABULARY = 384, 4, 128
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 4e-2}
SIZES: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": VOCABULARY, "max_position_embeddings": 2048, "pad_token_id": 0,
    "use_cache": False,
}  # fmt: skip
Batch = dict[str, Tensor]
Program = Callable[..., Tensor]


def model_of(kind: str, dtype: torch.dtype, checkpointed: bool = False, **more: Any) -> nn.Module:
    made = getattr(transformers, kind)
    model = made(made.config_class(**{**SIZES, **more})).to("cuda", dtype).train()
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def padded(seed: int, left: bool = False, prompts: bool = True) -> Batch:
    """Rows of other lengths in each batch; the first half of each is a prompt, without labels."""
    random = torch.Generator().manual_seed(seed)
    place = torch.arange(TOKENS).expand(ROWS, -1)
    lengths = torch.randint(TOKENS // 6, TOKENS, (ROWS, 1), generator=random)
    seen = place >= TOKENS - lengths if left else place < lengths
    ids = torch.randint(1, VOCABULARY, (ROWS, TOKENS), generator=random) * seen
    first = (TOKENS - lengths if left else 0) + lengths // 2 * prompts
    labels = ids.masked_fill(~seen | (place < first), -100)
    return {"input_ids": ids, "attention_mask": seen.long(), "labels": labels}


def packed(seed: int) -> Batch:
    """Documents of random lengths in two rows, told by positions that start again."""
    random = torch.Generator().manual_seed(seed)
    cuts = torch.randperm(TOKENS - 1, generator=random)[: 3 + seed].add(1).sort().values
    lengths = torch.cat([cuts, torch.tensor([TOKENS])]).diff(prepend=torch.tensor([0])).tolist()
    positions = torch.cat([torch.arange(length) for length in lengths])[None].expand(2, -1).contiguous()
    ids = torch.randint(1, VOCABULARY, (2, TOKENS), generator=random)
    return {"input_ids": ids, "labels": ids.clone(), "position_ids": positions}


def on_inductor(program: Program, **options: Any) -> Program:
    given = {"fastpack.strict": True} | {f"fastpack.{name}": value for name, value in options.items()}
    return torch.compile(program, backend=fxpasses.fastpack_backend, options=given)


def results(model: nn.Module, program: Program, batch: Batch) -> dict[str, Tensor]:
    """The loss and all gradients, in float32."""
    model.zero_grad()
    loss = program(**{name: value.cuda() for name, value in batch.items()})
    loss.backward()
    found = {name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach().float(), **found}


def check(
    model: nn.Module, batches: list[Batch], loss: Program | None = None, tolerance: float = 0.0, **options: Any
) -> fxpasses.inspect.Record:
    """Each batch twice, so that caches, replays and buffers that are used again are seen."""
    program: Program = loss or (lambda **batch: model(**batch).loss)
    tolerance = tolerance or TOLERANCE[next(model.parameters()).dtype]
    with fxpasses.inspect.record() as record:
        function = on_inductor(program, **options)
        for batch in batches * 2:
            expected, actual = results(model, program, batch), results(model, function, batch)
            assert expected.keys() == actual.keys()
            for name, value in expected.items():
                apart = (actual[name] - value).norm() / value.norm().clamp(min=1e-6)
                assert apart <= tolerance, f"{name}: {apart}"
    assert len(record.graphs) == 1
    return record


def changed(record: fxpasses.inspect.Record, name: str) -> bool:
    return any(report.changed for report in reports_of(record, name))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_only_rows_that_reach_the_loss(attention: str, left: bool, dtype: torch.dtype) -> None:
    model = model_of("LlamaForCausalLM", dtype, attn_implementation=attention)
    record = check(model, [padded(seed, left) for seed in range(3)], rows="live")
    assert changed(record, "live_rows")


@pytest.mark.parametrize("kind", ["Qwen3ForCausalLM", "Gemma3ForCausalLM", "MixtralForCausalLM"])
def test_rows_of_other_models(kind: str) -> None:
    more = {"Gemma3ForCausalLM": {"sliding_window": 100, "head_dim": 32}, "Qwen3ForCausalLM": {"head_dim": 32}}
    record = check(
        model_of(kind, torch.float32, **more.get(kind, {})), [padded(seed) for seed in range(2)], rows="live"
    )
    assert changed(record, "live_rows")


def test_rows_in_checkpoints() -> None:
    record = check(
        model_of("LlamaForCausalLM", torch.float32, checkpointed=True), [padded(seed) for seed in range(2)], rows="live"
    )
    assert changed(record, "live_rows")


def test_rows_that_dropout_takes() -> None:
    """The draws are others than eager mode's, and backward's are forward's: what was dropped gets no gradient."""
    table = nn.Embedding(VOCABULARY, 64, device="cuda")

    def loss(input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Tensor:
        hidden = F.dropout(table(input_ids), 0.5)
        return F.cross_entropy(hidden.flatten(0, 1) @ table.weight.detach().mT, labels.flatten())

    batch = {name: value.cuda() for name, value in padded(0).items()}
    on_inductor(loss, rows="live")(**batch).backward()
    assert table.weight.grad is not None and table.weight.grad.isfinite().all()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("make", [packed, padded], ids=["packed", "padded"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_attention_by_flex_attention(attention: str, make: Callable[[int], Batch], dtype: torch.dtype) -> None:
    model = model_of("LlamaForCausalLM", dtype, attn_implementation=attention)
    record = check(model, [make(seed) for seed in range(3)], rows="all")
    assert changed(record, "sparsify_attention") is (attention == "sdpa")


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_bias_of_the_distance(dtype: torch.dtype) -> None:
    """ALiBi, as an additive mask of a batch that is padded."""
    w = nn.Linear(64, 192, device="cuda", dtype=dtype)

    def loss(x: Tensor, seen: Tensor) -> Tensor:
        place = torch.arange(x.shape[1], device=x.device)
        distance = (place - place[:, None]).to(dtype) * 0.01
        mask = distance.masked_fill((place > place[:, None]) | ~seen[:, None, None], float("-inf"))
        q, k, v = w(x).unflatten(-1, (3, 4, 16)).transpose(1, 3).unbind(2)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).float().square().mean()

    seen = torch.arange(300) < torch.tensor([[300], [120]])
    batches = [{"x": torch.randn(2, 300, 64, dtype=dtype), "seen": seen} for _ in range(2)]
    assert changed(check(w, batches, loss), "sparsify_attention")


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("experts", ["eager", "grouped_mm"])
def test_experts(experts: str, dtype: torch.dtype) -> None:
    model = model_of("Qwen3MoeForCausalLM", dtype, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64,
                     head_dim=32, experts_implementation=experts)  # fmt: skip
    tolerance = 0.0 if dtype is torch.float32 else 0.15  # a token that another rounding sends to another expert
    record = check(model, [padded(seed) for seed in range(2)], tolerance=tolerance, rows="all")
    assert changed(record, "group_experts") is (experts == "eager")


@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("checkpointed", [False, True], ids=["saved", "checkpointed"])
def test_activations_that_leave(tier: str, checkpointed: bool) -> None:
    model = model_of("LlamaForCausalLM", torch.bfloat16, checkpointed, num_hidden_layers=4)
    options = {"offload": tier, "offload.min_bytes": 1 << 12}
    record = check(model, [packed(seed) for seed in range(2)], **options)
    assert changed(record, "offload_activations")


def test_layers_that_are_compiled_once() -> None:
    model = model_of("LlamaForCausalLM", torch.float32, num_hidden_layers=8)
    assert changed(check(model, [packed(seed) for seed in range(2)], fold="on"), "fold_layers")


@pytest.mark.parametrize("rows", ["live", "all"])
@pytest.mark.parametrize("make", [packed, padded], ids=["packed", "padded"])
def test_cuda_graphs(make: Callable[[int], Batch], rows: str) -> None:
    check(model_of("LlamaForCausalLM", torch.float32), [make(seed) for seed in range(3)], rows=rows,
          mode="reduce-overhead")  # fmt: skip


@pytest.mark.parametrize("rows", ["live", "all"])
def test_a_batch_waits_for_the_device_once(rows: str) -> None:
    model = model_of("LlamaForCausalLM", torch.bfloat16)
    function = on_inductor(lambda **batch: model(**batch).loss, rows=rows)
    batches = [{name: value.cuda() for name, value in padded(seed).items()} for seed in range(3)]
    for batch in batches[:2]:
        function(**batch).backward()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        function(**batches[2]).backward()
    assert len([event for event in profile.events() if "Memcpy DtoH" in event.name]) <= 1
