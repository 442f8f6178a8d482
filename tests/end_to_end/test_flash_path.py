"""Hugging Face's own flash-attention path: what it asks of the batch in every layer is asked once, in one graph.

transformers asks in every layer whether the batch is packed (`if tensor:`), where its sequences start (`nonzero`) and
how long the longest is (`.item()`); with a padding mask, whether there is padding, and where. The kernel at the end of
the path is the operator of examples/varlen_attention.py.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import fxpasses.inspect
from examples.varlen_attention import install
from tests.support import HOST_READS, compiled, events, host_reads, thorough

TOKENS, VOCABULARY, WINDOW = 32, 64, 8
MODELS: dict[str, tuple[type[PreTrainedModel], type[Any], dict[str, Any]]] = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 8}),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": WINDOW}),
}
Batch = dict[str, Any]

both_kinds = pytest.mark.parametrize("checkpointed", [False, True], ids=["plain", "checkpointed"])


def new_model(name: str = "llama", layers: int = 4, checkpointed: bool = False) -> PreTrainedModel:
    kind, config, more = MODELS[name]
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": layers}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = kind(config(**sizes, **heads, **more, attn_implementation=install())).train()
    if checkpointed:
        model.activation_checkpointing_enable({"use_reentrant": False})
    return model


def packed(lengths: list[int]) -> Batch:
    """Sequences one after the other; only `position_ids` says where they begin."""
    tokens = torch.randint(VOCABULARY, (1, sum(lengths)))
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    return {"input_ids": tokens, "labels": tokens.clone(), "position_ids": positions, "use_cache": False}


def padded(lengths: list[int], left: bool = False) -> Batch:
    mask = (torch.arange(12) < torch.tensor(lengths)[:, None]).long()
    mask = mask.flip(1) if left else mask
    tokens = torch.randint(VOCABULARY, mask.shape)
    labels = tokens.masked_fill(mask == 0, -100)
    return {"input_ids": tokens, "labels": labels, "attention_mask": mask, "use_cache": False}


def random_packing(generator: random.Random) -> list[int]:
    """At least two sequences: a batch of one is not packed."""
    cuts = sorted(generator.sample(range(1, TOKENS), generator.randint(1, 7)))
    return [end - start for start, end in zip([0, *cuts], [*cuts, TOKENS], strict=True)]


def loss_and_gradients(program: Callable[..., Any], model: PreTrainedModel, batch: Batch) -> dict[str, Tensor]:
    model.zero_grad()
    loss = program(**batch).loss
    loss.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    return {"loss": loss.detach(), **gradients}


def assert_trains_as_eager(
    program: Callable[..., Any], model: PreTrainedModel, batches: list[Batch], tolerance: float = 0.0
) -> None:
    """Loss and every gradient, bit for bit where no tolerance is given."""
    for batch in batches:
        actual = loss_and_gradients(program, model, batch)
        torch.testing.assert_close(actual, loss_and_gradients(model, model, batch), rtol=tolerance, atol=tolerance)


def graphs_of_stock(model: PreTrainedModel, batches: list[Batch]) -> int:
    torch._dynamo.reset()
    counters.clear()
    with torch._dynamo.config.patch(capture_scalar_outputs=False, capture_dynamic_output_shape_ops=False):
        program = torch.compile(model, backend="eager")
        for batch in batches:
            program(**batch).loss.backward()
    return counters["stats"]["unique_graphs"]


# Packed, with `position_ids` alone


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("name", "checkpointed"),
    [
        pytest.param(name, kind == "checkpointed", id=f"{name}-{kind}", marks=pytest.mark.slow if is_slow else ())
        for name in MODELS
        for kind in ("plain", "checkpointed")
        for is_slow in [(name, kind) not in (("llama", "plain"), ("qwen3", "checkpointed"))]
    ],
)
def test_one_graph_for_all_packings_of_as_many_tokens(name, checkpointed):
    model, generator = new_model(name, checkpointed=checkpointed), random.Random(0)
    packings = [[10, 14, 8], [1] * TOKENS, [1, TOKENS - 1], *(random_packing(generator) for _ in range(20))]
    assert len({len(packing) for packing in packings}) > 5
    counters.clear()
    with fxpasses.inspect.record() as record:
        assert_trains_as_eager(compiled(model, "aot_eager"), model, [packed(packing) for packing in packings])
    assert counters["stats"]["unique_graphs"] == len(record.graphs) == 1
    assert not counters["graph_break"]


@pytest.mark.slow
@both_kinds
def test_one_graph_with_inductor(checkpointed):
    model = new_model(layers=2, checkpointed=checkpointed)
    with fxpasses.inspect.record() as record:
        program = compiled(model, "inductor")  # strict: fails where the rewritten graph does not compile
        batches = [packed([10, 14, 8]), packed([30, 2]), packed([1] * TOKENS)]
        assert_trains_as_eager(program, model, batches, tolerance=1e-5)
    assert len(record.graphs) == 1


@thorough
@pytest.mark.slow
def test_a_batch_of_one_sequence_is_one_more_graph():
    model = new_model(layers=2)
    with fxpasses.inspect.record() as record:
        batches = [packed([20, 12]), packed([TOKENS]), packed([3, 29]), packed([TOKENS])]
        assert_trains_as_eager(compiled(model, "aot_eager"), model, batches)
    assert len(record.graphs) == 2


@pytest.mark.slow
def test_another_number_of_tokens_is_one_more_graph():
    model = new_model(layers=2)
    with fxpasses.inspect.record() as record:
        batches = [packed(lengths) for lengths in ([20, 12], [20, 16], [7, 9, 8], [11, 13, 5])]
        assert_trains_as_eager(compiled(model, "aot_eager"), model, batches)
    assert len(record.graphs) == 2


def test_one_graph_under_autocast():
    model = new_model(layers=2)
    with fxpasses.inspect.record() as record, torch.autocast("cpu", dtype=torch.bfloat16):
        batches = [packed([10, 14, 8]), packed([30, 2])]
        assert_trains_as_eager(compiled(model, "eager"), model, batches)
    assert len(record.graphs) == 1


@pytest.mark.slow
@both_kinds
def test_host_reads_do_not_depend_on_the_number_of_layers(checkpointed):
    reads, eager = {}, {}
    for layers in (2, 6):
        model = new_model(layers=layers, checkpointed=checkpointed)
        program = compiled(model, "aot_eager")
        loss_and_gradients(program, model, packed([10, 14, 8]))  # compiles
        reads[layers] = host_reads(lambda: loss_and_gradients(program, model, packed([20, 12])))  # noqa: B023
        eager[layers] = host_reads(lambda: loss_and_gradients(model, model, packed([20, 12])))  # noqa: B023
    assert reads[2] == reads[6] > 0
    assert eager[6] > 2 * eager[2]


@pytest.mark.slow
@both_kinds
def test_a_step_reads_all_that_it_needs_before_its_first_layer(checkpointed):
    """So it is one transfer where the batch lies on a device: nothing else waits for the device until the step ends."""
    model = new_model(checkpointed=checkpointed)
    program = compiled(model, "aot_eager")
    loss_and_gradients(program, model, packed([10, 14, 8]))
    batch = packed([20, 12])
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        program(**batch).loss.backward()
    started = {name: [e.time_range.start for e in profile.events() if e.name == name] for name in HOST_READS}
    embedded = min(event.time_range.start for event in profile.events() if event.name == "aten::embedding")
    assert 0 < max(time for times in started.values() for time in times) < embedded


@pytest.mark.gpu
@both_kinds
def test_on_a_device_a_step_has_one_transfer_to_the_host(checkpointed):
    model = new_model(checkpointed=checkpointed).to("cuda", torch.bfloat16)
    program = compiled(model, "aot_eager")

    def step(lengths: list[int]) -> None:
        batch = packed(lengths)
        on_device = {name: value.cuda() if isinstance(value, Tensor) else value for name, value in batch.items()}
        program(**on_device).loss.backward()

    step([10, 14, 8])
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        step([20, 12])
    assert len([event for event in profile.events() if "Memcpy DtoH" in event.name]) == 1


# Padded, with a 2-D mask


@thorough
@pytest.mark.slow
@both_kinds
def test_a_padded_batch_makes_no_more_graphs_than_stock(checkpointed):
    model = new_model(checkpointed=checkpointed)
    batches = [padded([10, 12, 8]), padded([12, 3, 5]), padded([1, 2, 3]), padded([4, 12, 12], left=True)]
    counters.clear()
    with fxpasses.inspect.record() as record:
        assert_trains_as_eager(compiled(model, "aot_eager"), model, batches)
    ours = counters["stats"]["unique_graphs"]
    assert ours == len(record.graphs) <= graphs_of_stock(model, batches)


@thorough
@pytest.mark.slow
def test_a_mask_without_padding_is_one_more_graph():
    model = new_model(layers=2)
    with fxpasses.inspect.record() as record:
        batches = [padded([10, 12, 8]), padded([12, 12, 12]), padded([3, 12, 5])]
        assert_trains_as_eager(compiled(model, "aot_eager"), model, batches)
    assert len(record.graphs) == 2


@thorough
@pytest.mark.slow
@both_kinds
def test_host_reads_of_a_padded_batch_do_not_depend_on_the_number_of_layers(checkpointed):
    counts = {}
    for layers in (2, 6):
        model = new_model(layers=layers, checkpointed=checkpointed)
        program = compiled(model, "aot_eager", rows="all")  # whose count is one more
        loss_and_gradients(program, model, padded([10, 12, 8]))
        counts[layers] = events(lambda: loss_and_gradients(program, model, padded([12, 3, 5])))  # noqa: B023
    assert [counts[2][name] for name in HOST_READS] == [counts[6][name] for name in HOST_READS]
    assert counts[2]["aten::nonzero"] == 1
