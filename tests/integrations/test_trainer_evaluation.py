"""Which evaluations of Hugging Face's Trainer run compiled code, as docs/integrations.md says it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainingArguments

import fxpasses
import fxpasses.inspect
from fxpasses import FastpackCallback
from tests.integrations.tiny import model as tiny_model

ROWS = 4  # of the data for evaluation, two a batch


class Watching(Trainer):
    """Knows of each batch that it evaluated whether the model was compiled."""

    def prediction_step(self, model: Any, *arguments: Any, **named: Any) -> Any:
        wrapped = isinstance(model, torch._dynamo.OptimizedModule)
        self.__dict__.setdefault("compiled", []).append(wrapped or model._compiled_call_impl is not None)
        return super().prediction_step(model, *arguments, **named)

    def seen(self) -> list[bool]:
        """Of the batches since the last call."""
        return self.__dict__.pop("compiled", [])


@pytest.fixture
def default_options() -> Iterator[None]:
    """`torch_compile_backend` passes no options on."""
    fxpasses.set_default_options({"fastpack.lowering": "aot_eager", "fastpack.strict": True})
    yield
    fxpasses.set_default_options({})


@pytest.mark.quick(1)
@pytest.mark.usefixtures("default_options")
@pytest.mark.parametrize(
    ("callbacks", "backend", "graphs", "before", "during"),
    [
        pytest.param([], "fastpack", [1, 2], True, False, id="torch_compile_backend"),
        pytest.param([FastpackCallback()], None, [0, 2], False, True, id="FastpackCallback"),
    ],
)
def test_evaluation(
    callbacks: list[Any], backend: str | None, graphs: list[int], before: bool, during: bool, tmp_path: Path
) -> None:
    """graphs: after an evaluation before training, and in the end; before, during: which evaluations are compiled."""
    texts = [{"input_ids": (ids := torch.randint(32, (6,)).tolist()), "labels": ids} for _ in range(8)]
    arguments = TrainingArguments(
        str(tmp_path), max_steps=2, per_device_train_batch_size=2, per_device_eval_batch_size=2, eval_strategy="steps",
        eval_steps=1, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True, torch_compile_backend=backend,
    )  # fmt: skip
    trainer = Watching(tiny_model(), arguments, None, texts, texts[:ROWS], callbacks=callbacks)
    with fxpasses.inspect.record() as record:
        trainer.evaluate()
        assert trainer.seen() == [before] * (ROWS // 2) and len(record.graphs) == graphs[0]
        trainer.train()
        assert trainer.seen() == [during] * ROWS
        trainer.evaluate()
        assert trainer.seen() == [during] * (ROWS // 2)
    assert len(record.graphs) == graphs[1]
