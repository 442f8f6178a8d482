"""`FastpackCallback` in Hugging Face's Trainer, with and without PEFT."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import fxpasses
import fxpasses.inspect
from fxpasses import FastpackCallback
from fxpasses.integrations import trainer as trainer_module
from fxpasses.integrations.trainer import Batch, _Collate
from fxpasses.loss import region
from fxpasses.loss.lazy_tensor import Source
from fxpasses.metadata.runtime.batch_cache import batch_cache
from fxpasses.metadata.runtime.transfers import to_host

VOCABULARY = 32
OPTIONS = {"fastpack.lowering": "aot_eager", "fastpack.strict": True}
SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_hidden_layers": 2}


def trained(
    folder: Path, callbacks: list[Any], lora: bool = False, **arguments: Any
) -> tuple[list[float], list[Tensor], Trainer]:
    """The loss of each of 4 steps, the parameters after them, and the trainer."""
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **SIZES))
    if lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    texts = [{"input_ids": (ids := torch.randint(VOCABULARY, (6,)).tolist()), "labels": ids} for _ in range(8)]
    given = TrainingArguments(
        str(folder), max_steps=4, per_device_train_batch_size=2, logging_steps=1, save_strategy="no", report_to=[],
        use_cpu=True, disable_tqdm=True, **arguments,
    )  # fmt: skip
    trainer = Trainer(model, given, collate, texts, callbacks=callbacks)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, [parameter.detach().clone() for parameter in model.parameters()], trainer


def collate(features: list[dict[str, Any]]) -> dict[str, Tensor]:
    return {name: torch.tensor([feature[name] for feature in features]) for name in features[0]}


@pytest.mark.slow
@pytest.mark.parametrize("lora", [pytest.param(False, marks=pytest.mark.slow), True])
def test_the_model_is_compiled_as_it_is_trained(lora: bool, tmp_path: Path) -> None:
    """PEFT's model calls the base model's `forward`: compiled before PEFT has wrapped it, nothing would be compiled."""
    if lora:
        pytest.importorskip("peft")
    expected = trained(tmp_path, [], lora)
    with fxpasses.inspect.record() as record:
        losses, parameters, trainer = trained(tmp_path, [FastpackCallback(OPTIONS)], lora)
        first = len(record.graphs)
        trainer.train()  # a second time compiles nothing
    assert losses == expected[0] and len(losses) == 4
    assert all(map(torch.equal, parameters, expected[1]))
    assert 0 < first <= 2 and len(record.graphs) == first
    assert not any("_orig_mod" in name for name in trainer.model.state_dict())


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "more", [{}, {"bf16": True}, {"gradient_checkpointing": True}, {"gradient_accumulation_steps": 2}]
)
def test_logits_that_no_trainer_reads_are_not_computed(
    more: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("LEAST_COLUMNS", VOCABULARY), ("LEAST_BYTES", 0)):
        monkeypatch.setattr(region, name, value)
    reads: list[int] = []
    monkeypatch.setattr(Source, "value", lambda self, at: reads.append(at))
    losses, parameters, _ = trained(tmp_path, [], **more)
    with fxpasses.inspect.record() as record:
        found, own, _ = trained(tmp_path, [FastpackCallback(OPTIONS)], **more)
    reports = [report for graph in record.graphs for report in graph.reports]
    changed = {report.pass_name for report in reports if report.changed}
    assert not reads and {"lazy_outputs", "chunk_loss"} <= changed
    tolerance = 1e-2 if more.get("bf16") else 1e-5
    torch.testing.assert_close(found, losses, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(own, parameters, rtol=tolerance, atol=tolerance)


def test_a_trainer_that_compiles_by_itself_is_left_so(tmp_path: Path) -> None:
    arguments = TrainingArguments(str(tmp_path), torch_compile_backend="eager", use_cpu=True)
    model = nn.Linear(2, 2)
    with pytest.warns(UserWarning, match="Trainer compiles the model with 'eager' itself"):
        FastpackCallback(OPTIONS).on_train_begin(arguments, None, None, model=model)
    arguments.torch_compile_backend = "fastpack"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        FastpackCallback(OPTIONS).on_train_begin(arguments, None, None, model=model)
    assert model._compiled_call_impl is None


def test_wrong_options_fail_where_they_are_given() -> None:
    with pytest.raises(ValueError, match=r"did you mean 'fastpack\.lowering'"):
        FastpackCallback({"fastpack.lowring": "eager"})
    with pytest.raises(ValueError, match=r"unknown option 'mode': .*did you mean 'fastpack\.mode'"):
        FastpackCallback({"mode": "default"})
    with pytest.raises(ValueError, match="buckets are 3; pass numbers of sequences"):
        FastpackCallback(buckets=3)  # type: ignore[arg-type]


def test_lengths_are_bucketed() -> None:
    batch = {"lengths": torch.tensor([3, 2, 4]), "cu_seq_lens_q": torch.tensor([0, 3, 5, 9]), "max_length_q": 4}
    bucketed = _Collate(lambda features: batch, buckets=None, host_copies=True)([])
    assert bucketed["lengths"].tolist() == [3, 2, 4, 0]
    assert bucketed["cu_seq_lens_q"].tolist() == [0, 3, 5, 9, 9]
    assert bucketed["max_length_q"] == 4 and type(bucketed) is Batch
    assert _Collate(lambda features: batch, buckets=[8], host_copies=True)([])["lengths"].shape == (8,)
    assert _Collate(lambda features: batch, buckets=False, host_copies=False)([]) is batch


def test_a_batch_that_moves_stays_a_batch() -> None:
    batch = Batch(ids=torch.tensor([1, 2]), scores=torch.ones(2), name="first")
    moved = batch.to("cpu", non_blocking=True)
    assert type(moved) is Batch and moved["name"] == "first"
    assert moved["ids"] is batch["ids"] and moved["scores"] is batch["scores"]


def test_the_host_knows_what_it_moved_to_a_device() -> None:
    """Prologues read integers alone; the collator may fill its memory anew, and the program may write to the batch."""
    batch = Batch(ids=torch.tensor([1, 2]), scores=torch.ones(2))
    moved = batch.to("meta")  # stands for a device from which nothing could be copied
    batch["ids"].zero_()
    assert to_host([moved["ids"]], batch_cache)[0].tolist() == [1, 2]
    assert batch_cache.get("to_host", [moved["scores"]]) is None
    moved["ids"].zero_()
    assert batch_cache.get("to_host", [moved["ids"]]) is None


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


@pytest.mark.usefixtures("one_rank")
def test_of_a_model_that_fsdp2_shards_the_blocks_are_compiled() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Block(), Block())
    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    for block in (model[1], model[2], model):
        fully_shard(block, mesh=mesh)
    FastpackCallback(OPTIONS).on_train_begin(TrainingArguments(use_cpu=True), None, None, model=model)
    assert [module._compiled_call_impl is not None for module in (model, *model)] == [False, False, True, True]
    with fxpasses.inspect.record() as record:
        result = model(torch.ones(2, 4))
    assert len(record.graphs) == 1  # blocks of one class are one frame
    assert torch.equal(result, torch.compiler.disable(model.forward)(torch.ones(2, 4)))


def test_compiled_code_is_kept_in_checkpoints_if_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, Path]] = []
    monkeypatch.setattr(trainer_module, "save_caches", lambda path: calls.append(("save", path)))
    monkeypatch.setattr(trainer_module, "load_caches", lambda path, missing_ok: calls.append(("load", path)))
    arguments = SimpleNamespace(output_dir=str(tmp_path), process_index=1)
    start, saved = SimpleNamespace(global_step=0), SimpleNamespace(global_step=7)
    file = tmp_path / "checkpoint-7" / "fxpasses_caches_1.zip"
    none = tmp_path / "checkpoint-0" / file.name
    for keeps, expected in ((False, []), (True, [("load", none), ("save", file), ("load", file)])):
        callback = FastpackCallback(keep_caches=keeps)
        callback.on_train_begin(arguments, start, None)
        callback.on_save(arguments, saved, None)
        file.parent.mkdir(exist_ok=True)
        file.touch()
        callback.on_train_begin(arguments, saved, None)
        assert calls == expected
