"""A run of TRL's trainers with checkpointing: nothing is compiled after the third step, and all is as in eager mode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fxpasses.inspect
from tests.integrations.tiny import model, text, tokenizer

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
transformers = pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.usefixtures("capture_flags"),
    pytest.mark.filterwarnings("ignore"),
]
GRAPHS = 2 * 3  # for the first sizes and for any: the model, and two parts of TRL's fused head, which breaks the graph
OPTIONS = {"fastpack.lowering": "aot_eager", "fastpack.strict": True}


class Compiled(transformers.TrainerCallback):
    """How many graphs there are after each step."""

    def __init__(self) -> None:
        self.record: Any = None
        self.counts: list[int] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.counts.append(len(self.record.graphs))


def arguments(folder: Path, steps: int) -> dict[str, Any]:
    return {
        "output_dir": str(folder), "max_steps": steps, "per_device_train_batch_size": 4, "report_to": [],
        "use_cpu": True, "save_strategy": "no", "logging_steps": 1, "disable_tqdm": True, "learning_rate": 1e-3,
        "bf16": False, "gradient_checkpointing": True,
    }  # fmt: skip


def dpo(folder: Path) -> Any:
    rows = [
        {"prompt": text(3 + n % 7, n), "chosen": " " + text(3 + n % 11, n + 99), "rejected": " " + text(4 + n % 5, n)}
        for n in range(40)
    ]
    config = trl.DPOConfig(max_length=64, **arguments(folder, steps=10))  # beyond Dynamo's limit of recompilations
    data = datasets.Dataset.from_list(rows)
    return trl.DPOTrainer(model(), ref_model=model(), args=config, train_dataset=data, processing_class=tokenizer())


def grpo(folder: Path) -> Any:
    """Its two prompts differ in length: without padding, eager mode has another attention kernel."""

    def distinct(completions: list[str], **_: Any) -> list[float]:
        return [float(len(set(completion.split()))) for completion in completions]

    config = trl.GRPOConfig(max_completion_length=6, num_generations=2, **arguments(folder, steps=20))
    data = datasets.Dataset.from_list([{"prompt": text(n, n)} for n in range(3, 23)])
    return trl.GRPOTrainer(
        model(), reward_funcs=distinct, args=config, train_dataset=data, processing_class=tokenizer()
    )


def trained(trainer: Any) -> tuple[list[float], list[torch.Tensor], list[int]]:
    """Losses, weights, and how many graphs there are after each step."""
    counter = Compiled()
    trainer.add_callback(counter)
    with fxpasses.inspect.record() as record:
        counter.record = record
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, [parameter.detach() for parameter in trainer.model.parameters()], counter.counts


@pytest.mark.parametrize("make", [dpo, grpo])
def test_nothing_is_compiled_after_the_third_step_and_all_is_as_in_eager_mode(make: Any, tmp_path: Path) -> None:
    losses, weights, _ = trained(make(tmp_path))
    trainer = make(tmp_path)
    trainer.model.compile(backend="fastpack", options=OPTIONS)
    found = trained(trainer)
    assert found[0] == losses and any(losses)
    assert all(torch.equal(own, eager) for own, eager in zip(found[1], weights, strict=True))
    counts = found[2]
    assert 0 < counts[-1] == counts[2] <= GRAPHS, counts
