"""The screen that FXPASSES_SUMMARY=1 prints when a process ends."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from traceback import FrameSummary
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import fxpasses.inspect
from fxpasses.inspect import dynamo_history, end_of_run
from fxpasses.inspect.guard_words import cause
from tests.support import compiled

ROOT = Path(__file__).parents[2]

PROGRAM = """
import torch
import fxpasses


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x, lengths, factor=2):
        for _ in range(2):
            x = self.linear(x)[: lengths.sum().item()]
        return x * factor


model = torch.compile(Model(), backend="fastpack", options={"fastpack.lowering": "eager"})
lengths = torch.tensor([1, 2])
for rows in (3, 5, 6):
    model(torch.randn(rows, 4), lengths).sum().backward()
for factor in (3, 4.0):
    model(torch.randn(3, 4), lengths, factor=factor)
with torch.no_grad():
    model(torch.randn(3, 4), lengths)


@torch.compile(backend="fastpack", options={"fastpack.lowering": "eager"})
def talks(x):
    x = x + 1
    print("in between")
    return x * 2


talks(torch.ones(3))
"""


def summary(tmp_path: Path, program: str, **environment: str) -> str:
    script = tmp_path / "program.py"
    script.write_text(program)
    given = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=200, env=given)
    assert done.returncode == 0, done.stderr
    return done.stderr.partition("fxpasses: summary of")[2]


def test_one_screen_says_what_was_compiled_and_why_and_what_to_change(tmp_path: Path) -> None:
    text = summary(tmp_path, PROGRAM, FXPASSES_SUMMARY="1")
    for line in (
        "program.py (torch",
        "in forward (Model)",
        "size 0 of x: 3 became 5",
        "a mode of the process: grad_mode",
        "factor, no longer 2",
        "the type of factor",
        "hoist_metadata: 2 host reads became 1, once per batch",
        "the graph breaks at program.py:30: Dynamo does not know how to trace builtin operator `print`",
        "Take what breaks the graph out of the compiled model",
    ):
        assert line in text, text
    assert "Sizes that go on changing" not in text  # once is what a dynamic size costs
    assert len(text.splitlines()) <= 30 and max(map(len, text.splitlines())) <= 100


def test_what_breaks_by_design_in_pytorchs_own_frames_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """DDP's `forward`, and the context managers around it; a break in the program stays."""
    files = torch.nn.parallel.distributed.__file__, contextlib.__file__, __file__
    broken = [SimpleNamespace(reason="a\n  Explanation: b", user_stack=[FrameSummary(f, 7, "f")]) for f in files]
    monkeypatch.setattr(torch._dynamo.utils, "graph_break_reasons", broken)
    assert list(dynamo_history.breaks()) == [dynamo_history.Break("test_end_of_run.py:7", "b")]


@pytest.mark.slow
def test_nobody_asked(tmp_path: Path) -> None:
    assert summary(tmp_path, PROGRAM.split("with torch")[0]) == ""


@pytest.mark.slow
def test_a_backend_that_compiled_nothing_says_so_and_other_ranks_are_silent(tmp_path: Path) -> None:
    program = "import torch; torch.compile(torch.sin, backend='fastpack')"
    assert "No graph was compiled with fastpack" in summary(tmp_path, program, FXPASSES_SUMMARY="1", RANK="0")
    assert summary(tmp_path, program, FXPASSES_SUMMARY="1", RANK="1") == ""


@pytest.mark.all_cases
@pytest.mark.parametrize(
    ("guard", "text", "advice"),
    [
        ("tensor 'input_ids' size mismatch at index 1. expected 8, actual 9", "size 1 of input_ids: 8 became 9", "pad"),
        ("tensor 'x' requires_grad mismatch. expected requires_grad=1", "whether x requires a gradient", ""),
        ("GLOBAL_STATE changed: grad_mode ", "a mode of the process: grad_mode", ""),
        ("len(self.embed_tokens._forward_hooks) == 2    # if self._forward_hooks:", "the hooks of a module", "Hooks"),
        ("___fxpasses_batch(n)  # n.max() <= 5, at a.py:1", "an answer of the batch, no longer n.max() <= 5, at a.py:1",
         "branches on its batch"),
        ("IndexError: index 2", "a batch that lacks what a guard reads (IndexError: index 2)",
         "Python object"),
        ("k == 2               # return x*k", "k, no longer 2", "Python number"),
        ("len(s.ls) == 1       # return len(s.ls)", "the length of s.ls, no longer 1", "Python object"),
        ("past_key_values is None", "the cache of keys and values", "generat"),
        ("self.training", "train() or eval()", ""),
        ("___check_obj_id(L['f'], 139)", "a condition that no longer holds: ___check_obj_id(L['f'], 139)", "object"),
    ],
)  # fmt: skip
def test_a_guard_in_words(guard: str, text: str, advice: str) -> None:
    found = cause(guard)
    assert found.text == text
    assert advice in found.advice if advice else found.advice == ""


def test_rows_that_are_returned_can_be_left_out_under_an_option() -> None:
    embedding, head = torch.nn.Embedding(9, 4), torch.nn.Linear(4, 9)

    def step(ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = head(embedding(ids).tanh())
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits

    labels = torch.tensor([[-100, 1, 2, 3], [-100, 2, -100, -100]])
    with fxpasses.inspect.record() as record:
        loss, _ = compiled(step)(labels.clamp_min(0), labels)
    loss.backward()
    advice = "\n".join(end_of_run._advice(record.graphs))
    assert 'options={"fastpack.outputs": "lazy"}' in advice, advice
