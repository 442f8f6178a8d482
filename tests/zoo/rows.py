"""Which architectures have only their live rows computed, and losses in chunks: `python -m tests.zoo.rows [NAME ...]`.

Each architecture trains on a batch that is padded left and one that is padded right, of whose texts the last 40 % have
labels; the loss alone is returned. taken: "yes", if nothing takes all rows but the loss; "in part", if what comes after
the last operator that does is packed. In float64, where eager mode can, or float32, loss and gradients are compared
with eager mode's. Every batch is packed, also one with few dead rows. Writes rows.jsonl.
"""

from __future__ import annotations

import json
import random
import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from tabulate import tabulate
from torch import Tensor, nn

import fxpasses.inspect
from fxpasses.rows import choice
from tests.zoo import loss, media, tiny
from tests.zoo.architectures import Architecture, architectures
from tests.zoo.batches import IGNORED

FILE = Path(__file__).parent / "rows.jsonl"
TASKS = ("causal", "masked", "classification", "seq2seq")
LABELLED = 0.4
DTYPES = (torch.float64, torch.float32)
OPTIONS = {"fastpack.lowering": "aot_eager", "fastpack.rows": "auto", "fastpack.loss": "chunks"}


HEAD = """## Live rows

Padded left and then right, with labels on the last 40 % of each text; only the loss is returned. In part: what comes
after the last operator that takes all rows is packed. Computed in float64 where the model can be; losses are computed
in float32 by most models. Written by `python -m tests.zoo.rows`.

"""


def without_dropout(model: nn.Module) -> nn.Module:
    """Dropout takes all rows under this lowering."""
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
        for name in ("dropout", "attention_dropout", "activation_dropout", "layerdrop"):
            if isinstance(getattr(part, name, None), float):
                setattr(part, name, 0.0)
    return model.train()


def batches(task: str, model: nn.Module) -> Iterator[dict[str, Any]]:
    for number in (0, 1):
        batch = media.batch(task, model, "padded", number)
        labels, seen = batch.get("labels"), batch.get("attention_mask")
        if isinstance(labels, Tensor) and isinstance(seen, Tensor) and labels.shape == seen.shape:
            place = seen.cumsum(-1) / seen.sum(-1, keepdim=True)
            batch["labels"] = labels.masked_fill(place <= 1 - LABELLED, IGNORED)
        yield batch


def loss_of(model: nn.Module) -> Any:
    def step(**batch: Any) -> Tensor:
        found: Tensor = model(**batch).loss
        return found

    return step


def measure(architecture: Architecture) -> dict[str, Any]:
    """difference: to eager mode's, relative to each tensor's largest number. Raises what a program raises."""
    model, given = in_eager_mode(architecture)
    torch._dynamo.reset()
    compiled, worst = torch.compile(loss_of(model), backend="fastpack", options=OPTIONS), 0.0
    with fxpasses.inspect.record() as record, mock.patch.object(choice, "MOST_LIVE", 10.0), loss.of_any_size():
        for batch in given:
            expected, actual = (list(results(step, batch, model)) for step in (loss_of(model), compiled))
            worst = max([worst, *(differs(*pair) for pair in zip(expected, actual, strict=True))])
    reports = [report for graph in record.graphs for report in graph.reports if report.pass_name == "live_rows"]
    refusals = [refusal for report in reports for refusal in report.refusals]
    packed = any(report.changed for report in reports)
    taken = "no" if not packed else "in part" if refusals else "yes"
    found = {"taken": taken, "difference": worst, "dtype": str(model.dtype).removeprefix("torch.")}
    found["loss"] = loss.taken(record)
    if taken == "yes":
        return found
    return {**found, "why": refusals[0].text or refusals[0].reason.value if refusals else "no loss of rows in a graph"}


def in_eager_mode(architecture: Architecture) -> tuple[Any, list[dict[str, Any]]]:
    """A model in the first dtype in which it runs, and its batches."""
    for dtype in DTYPES:
        model = without_dropout(tiny.model(architecture)).to(dtype)
        given = list(batches(architecture.task, model))
        try:
            for batch in given:
                list(results(loss_of(model), batch, model))
        except Exception:
            if dtype is DTYPES[-1]:
                raise
        else:
            break
    return model, given


def results(step: Any, batch: dict[str, Any], model: nn.Module) -> Iterator[Tensor]:
    model.zero_grad()
    torch.manual_seed(0)
    value = step(**batch)
    value.backward()
    yield value.detach()
    for parameter in model.parameters():
        yield torch.zeros(()) if parameter.grad is None else parameter.grad.clone()


def differs(expected: Tensor, actual: Tensor) -> float:
    if not expected.numel():
        return 0.0
    return ((expected - actual).abs().max() / expected.abs().max().clamp(min=1.0)).item()


def section() -> str:
    """Of docs/supported.md; empty without results."""
    found = [json.loads(line) for line in FILE.read_text().splitlines()] if FILE.exists() else []
    if not found:
        return ""
    known = Counter(each.task for each in architectures())
    counts, reasons = [], defaultdict(list)
    for task in TASKS:
        own = [each for each in found if each["architecture"].startswith(f"{task}/")]
        ran = [each for each in own if "error" not in each]
        taken = Counter(each["taken"] for each in ran)
        worst = max((each["difference"] for each in ran), default=0.0)
        kinds = [taken[kind] for kind in ("yes", "in part", "no")]
        counts.append([task, known[task], len(ran), *kinds, f"{worst:.0e}"])
        for each in ran:
            if each["taken"] != "yes":
                reasons[each["why"].replace("|", "\\|"), each["taken"]].append(each["architecture"])
    heads = ["task", "there are", "compared", "taken", "in part", "not", "largest difference"]
    rows = [[*key, ", ".join(names)] for key, names in sorted(reasons.items(), key=lambda item: -len(item[1]))]
    tables = [tabulate(counts, heads, tablefmt="github")]
    tables.append(tabulate(rows, ["why not in whole", "taken", "architectures"], tablefmt="github"))
    return HEAD + "\n\n".join(tables) + "\n"


def of(architecture: Architecture) -> dict[str, Any]:
    try:
        return measure(architecture)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}".strip().splitlines()[0][:160]}


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    names = sys.argv[1:] or TASKS
    known = FILE.read_text().splitlines() if FILE.exists() else []
    lines = {line["architecture"]: line for line in map(json.loads, known)}
    todo = [each for each in architectures() if each.task in TASKS and (each.task in names or each.key in names)]
    random.Random(0).shuffle(todo)  # so that a part of the run says something of all
    for architecture in todo:
        lines[architecture.key] = {"architecture": architecture.key, **of(architecture)}
        print(lines[architecture.key], flush=True)
        FILE.write_text("".join(json.dumps(lines[key]) + "\n" for key in sorted(lines)))


if __name__ == "__main__":
    main()
