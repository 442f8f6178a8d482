"""A training program starts again from a file: nothing is traced and nothing compiled, and its steps are the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.skipif(torch.__version__ < "2.13", reason="traces are kept from torch 2.13 on")
_PROGRAM = """
import json, sys
import torch
from torch._dynamo.utils import counters
import fxpasses
from tests.fold.programs import Plan, Stack

path, width = sys.argv[1], int(sys.argv[2])
found = fxpasses.load_caches(path, missing_ok=True)

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.stack, self.head = Stack(Plan(("attention", "block") * 4)), torch.nn.Linear(12, width)

    def forward(self, tokens, lengths):
        logits = self.stack(tokens)[0]
        seen = torch.arange(tokens.shape[1]) < lengths[:, None]
        return self.head(logits * seen[..., None] * lengths.max().item()).square().mean()


torch.manual_seed(0)
model = Model()
program = torch.compile(model, backend="fastpack", options={"fastpack.strict": True})
losses = []
for size in (6, 6, 5, 4):
    batch = torch.arange(2 * size).view(2, size) % 12, torch.tensor([size - 1, 2])
    expected, actual = model(*batch), program(*batch)
    ours, eager = (torch.autograd.grad(loss, model.parameters()) for loss in (actual, expected))
    torch.testing.assert_close([actual, *ours], [expected, *eager], rtol=1e-4, atol=1e-5)
    losses.append(actual.item())
fxpasses.save_caches(path)
print(json.dumps([found, counters["stats"]["unique_graphs"], counters["inductor"]["fxgraph_cache_miss"], losses]))
"""


_TRAINER = """
import json, sys
import torch
from torch._dynamo.utils import counters
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from fxpasses import FastpackCallback

folder, steps = sys.argv[1], int(sys.argv[2])
torch.manual_seed(0)
sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=50)
model = LlamaForCausalLM(LlamaConfig(num_key_value_heads=1, max_position_embeddings=64, **sizes))


class Texts(torch.utils.data.Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, at):
        ids = torch.randint(1, 50, (16,), generator=torch.Generator().manual_seed(at))
        seen = (torch.arange(16) < 4 + at % 12).long()
        return {"input_ids": ids, "attention_mask": seen, "labels": ids.masked_fill(seen == 0, -100)}


given = TrainingArguments(
    folder, per_device_train_batch_size=4, max_steps=steps, save_steps=2, logging_steps=1, report_to=[], use_cpu=True,
    disable_tqdm=True,
)
trainer = Trainer(model=model, args=given, train_dataset=Texts(), callbacks=[FastpackCallback(keep_caches=True)])
trainer.train(resume_from_checkpoint=steps > 2)
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
print(json.dumps([counters["stats"]["unique_graphs"], counters["inductor"]["fxgraph_cache_miss"], losses]))
"""


def run(folder: Path, path: Path, *arguments: object, program: str = _PROGRAM) -> Any:
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(folder), "PYTHONPATH": os.getcwd()}
    script = folder.parent / "program.py"
    if not script.exists():  # a file that was written to after the process began may not be what is in memory
        script.write_text(program)
    command = [sys.executable, str(script), str(path), *map(str, arguments or (5,))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_a_process_with_the_file_traces_and_compiles_nothing(tmp_path: Path) -> None:
    path = tmp_path / "compiled.zip"
    found, traced, missed, losses = run(tmp_path / "first", path)
    assert not found and traced == 2 and missed > 0
    for name in ("second", "third"):  # each saves what it has
        assert run(tmp_path / name, path) == [True, 0, 0, losses]
    found, traced, missed, _ = run(tmp_path / "other", path, 7)
    assert found and traced == 2 and missed > 0
    assert run(tmp_path / "fourth", path, 7)[:3] == [True, 0, 0]


@pytest.mark.slow
def test_training_that_trainer_resumes_traces_and_compiles_nothing(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    traced, missed, first = run(tmp_path / "first", tmp_path / "out", 2, program=_TRAINER)
    assert traced == 1 and missed > 0 and len(first) == 2
    traced, missed, losses = run(tmp_path / "second", tmp_path / "out", 4, program=_TRAINER)
    assert (traced, missed) == (0, 0) and losses[:2] == first and len(losses) == 4
