"""A run of TRL's trainers with checkpointing: nothing is compiled after the third step, and all is as in eager mode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fxpasses
import fxpasses.inspect
from tests.integrations.tiny import model, text, tokenizer

trl = pytest.importorskip("trl")
peft = pytest.importorskip("peft")
datasets = pytest.importorskip("datasets")
transformers = pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.usefixtures("capture_flags"),
    pytest.mark.filterwarnings("ignore"),
]
GRAPHS = 2  # for the first sizes and for any
READS = ("aten::_local_scalar_dense", "aten::nonzero")
WARM = 6  # the step whose reads are counted
OPTIONS = {"fastpack.lowering": "aot_eager", "fastpack.strict": True}


class Observer(transformers.TrainerCallback):
    """How many graphs there are after each step, and the host reads of a warm one."""

    def __init__(self) -> None:
        self.record: Any = None
        self.counts: list[int] = []
        self.reads = -1

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == WARM:
            self.profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
            self.profile.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.counts.append(len(self.record.graphs))
        if state.global_step == WARM + 1:
            self.profile.stop()
            self.reads = sum(event.count for event in self.profile.key_averages() if event.key in READS)


def arguments(folder: Path, steps: int) -> dict[str, Any]:
    return {
        "output_dir": str(folder), "max_steps": steps, "per_device_train_batch_size": 4, "report_to": [],
        "use_cpu": True, "save_strategy": "no", "logging_steps": 1, "disable_tqdm": True, "learning_rate": 1e-3,
        "bf16": False, "gradient_checkpointing": True,
    }  # fmt: skip


def sft(folder: Path, **more: Any) -> Any:
    data = datasets.Dataset.from_list([{"text": text(3 + n % 13, n)} for n in range(64)])
    config = trl.SFTConfig(max_length=32, packing=True, **arguments(folder, steps=20))
    return trl.SFTTrainer(model(), args=config, train_dataset=data, processing_class=tokenizer(), **more)


def dpo(folder: Path, **more: Any) -> Any:
    rows = [
        {"prompt": text(3 + n % 7, n), "chosen": " " + text(3 + n % 11, n + 99), "rejected": " " + text(4 + n % 5, n)}
        for n in range(40)
    ]
    config = trl.DPOConfig(max_length=64, **arguments(folder, steps=20))
    data = datasets.Dataset.from_list(rows)
    reference = None if more else model()  # with LoRA it is the model without
    return trl.DPOTrainer(model(), reference, config, train_dataset=data, processing_class=tokenizer(), **more)


def grpo(folder: Path, **more: Any) -> Any:
    """Its two prompts differ in length: without padding, eager mode has another attention kernel."""

    def distinct(completions: list[str], **_: Any) -> list[float]:
        return [float(len(set(completion.split()))) for completion in completions]

    config = trl.GRPOConfig(max_completion_length=6, num_generations=2, **arguments(folder, steps=20))
    data = datasets.Dataset.from_list([{"prompt": text(n, n)} for n in range(3, 23)])
    return trl.GRPOTrainer(
        model(), reward_funcs=distinct, args=config, train_dataset=data, processing_class=tokenizer(), **more
    )


def trained(trainer: Any) -> tuple[list[float], list[torch.Tensor], Observer]:
    """Losses, weights, and what was observed."""
    observer = Observer()
    trainer.add_callback(observer)
    with fxpasses.inspect.record() as record:
        observer.record = record
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, [parameter.detach() for parameter in trainer.model.parameters()], observer


def lora() -> dict[str, Any]:
    return {"peft_config": peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")}


def cases() -> list[Any]:
    slow = pytest.mark.slow
    found = [(sft, False), (sft, True), (dpo, False), (dpo, True), (grpo, False), (grpo, True)]
    return [
        pytest.param(
            make, how, id=f"{make.__name__}{', LoRA' * how}", marks=() if (make, how) == (grpo, False) else slow
        )
        for make, how in found
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("make", "with_lora"), cases())
def test_nothing_is_compiled_after_the_third_step_and_all_is_as_in_eager_mode(
    make: Any, with_lora: bool, tmp_path: Path
) -> None:
    losses, weights, eager = trained(make(tmp_path, **(lora() if with_lora else {})))
    trainer = make(tmp_path, **(lora() if with_lora else {}))
    trainer.add_callback(fxpasses.FastpackCallback(options=OPTIONS))
    found = trained(trainer)
    # Some products of a graph without breaks are other calls than eager mode's.
    torch.testing.assert_close(found[0], losses, rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(found[1], weights, rtol=1e-4, atol=1e-6)
    assert any(losses)
    # DPO's reference is the same model with its LoRA switched off, and without gradients.
    most = GRAPHS * 2 if make is dpo and with_lora else GRAPHS
    counts = found[2].counts
    assert 0 < counts[-1] == counts[2] <= most, counts
    assert 0 <= found[2].reads <= eager.reads
