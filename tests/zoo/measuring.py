"""One contender's steps: their numbers, and what they took."""

from __future__ import annotations

import logging
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch._dynamo
from torch._dynamo.utils import counters
from torch.utils import _pytree as pytree

from bench.counting import HOST_READS, counted

LOWERING = "aot_eager"
# Where kernels in Python take offsets to the host; transformers has one for what `F.grouped_mm` does not compile.
KERNELS = ("fxpasses.experts.runtime.grouped_kernels", "transformers.integrations.moe")
Numbers = dict[str, torch.Tensor]


def step(model: torch.nn.Module, program: Callable[..., Any], batch: Mapping[str, Any]) -> Numbers:
    """A forward and a backward run: loss, float outputs, and all gradients by name; none is zeros."""
    torch.manual_seed(0)
    model.zero_grad()
    outputs = program(**batch)
    leaves = [each for each in pytree.tree_leaves(dict(outputs)) if isinstance(each, torch.Tensor)]
    floats = [each for each in leaves if each.is_floating_point()]
    loss = outputs.get("loss")
    if loss is None:
        loss = torch.stack([each.square().mean() for each in floats if each.requires_grad]).sum()
    loss.sum().backward()
    gradients = {
        name: torch.zeros_like(each) if each.grad is None else each.grad.clone()
        for name, each in model.named_parameters()
    }
    return {"loss": loss.detach(), **{f"output {n}": each.detach() for n, each in enumerate(floats)}, **gradients}


def difference(actual: Numbers, expected: Numbers) -> tuple[float, str]:
    """The largest difference relative to a tensor's largest number, and where; gradients that are rounding errors of
    zero are taken relative to a thousandth of the largest gradient."""
    if actual.keys() != expected.keys():
        return float("inf"), "which outputs there are"
    largest = max((each.abs().max().item() for each in expected.values() if each.numel()), default=0.0)
    worst, where = 0.0, ""
    for name, wanted in expected.items():
        found = actual[name]
        if found.shape != wanted.shape:
            return float("inf"), f"the shape of {name}"
        if torch.equal(found, wanted):
            continue
        if not torch.equal(found.isnan(), wanted.isnan()):
            return float("inf"), f"nan in {name}"
        apart = (found - wanted).nan_to_num(0.0, 0.0, 0.0).abs().max().item()
        relative = apart / max(wanted.nan_to_num(0.0, 0.0, 0.0).abs().max().item(), 1e-3 * min(largest, 1.0), 1e-12)
        if relative > worst:
            worst, where = relative, name
    return worst, where


def host_reads(run: Callable[[], Any]) -> int:
    """How often a step makes the host wait for numbers.

    An eager `tolist` of a tensor on the CPU is not in a profile, so calls of it are counted. Where a kernel on the CPU
    takes offsets from the CPU's memory nothing waits: PyTorch's does so in C++, others in Python.
    """
    lists = Counter()

    def on_event(frame: Any, event: str, called: Any) -> None:
        in_kernel = frame.f_globals.get("__name__") in KERNELS
        if event == "c_call" and getattr(called, "__name__", "") == "tolist" and not in_kernel:
            lists["tolist"] += isinstance(getattr(called, "__self__", None), torch.Tensor)

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        sys.setprofile(on_event)
        try:
            run()
        finally:
            sys.setprofile(None)
    seen = counted(profile)
    return sum(seen[name] for name in HOST_READS) + lists["tolist"]


def first_line(error: BaseException) -> str:
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {text}"[:300]


@contextmanager
def warnings_of_ours() -> Iterator[list[str]]:
    """What this package warns of, with repetitions left out."""
    texts: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            text = record.getMessage().strip().splitlines()[0][:300]
            if text not in texts:
                texts.append(text)

    handler = Handler(logging.WARNING)
    logger = logging.getLogger("fxpasses")
    logger.addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            yield texts
    finally:
        logger.removeHandler(handler)
        texts += dict.fromkeys(str(each.message)[:300] for each in caught if "fxpasses" in each.filename)


def compiled(model: torch.nn.Module, contender: str) -> Callable[..., Any]:
    torch._dynamo.reset()
    counters.clear()
    if contender == "eager":
        return model
    if contender == "stock":
        return torch.compile(model, backend=LOWERING)
    return torch.compile(model, backend="fastpack", options={"fastpack.lowering": LOWERING})


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


def measure(
    model: torch.nn.Module, contender: str, batches: Sequence[Mapping[str, Any]], expected: list[Numbers]
) -> dict[str, Any]:
    """The figures of a contender, as plain data; `expected`, eager mode's numbers, is filled by eager mode itself.

    graphs, breaks: after the first batch; recompiled: graphs that the other batches add. compile_s: CPU seconds of the
    first step beyond those of a warm one. difference: see the function; reads: of the last batch, warm.
    """
    found: dict[str, Any] = {}
    program = compiled(model, contender)
    seconds = []
    numbers = []
    for number, batch in enumerate(batches):
        started = time.process_time()
        numbers.append(step(model, program, batch))
        if contender == "eager" and not numbers[-1]["loss"].isfinite().all():
            raise ValueError(f"the loss is {numbers[-1]['loss'].tolist()}: its gradients compare nothing")
        seconds.append(time.process_time() - started)
        if number == 0:
            found |= {"graphs": graphs(), "breaks": sum(counters["graph_break"].values())}
            reasons = [str(reason).strip().splitlines()[0][:160] for reason in counters["graph_break"]]
            found["reasons"] = reasons[:3]
    found["recompiled"] = graphs() - found["graphs"]
    started = time.process_time()
    again = step(model, program, batches[-1])
    warm = time.process_time() - started
    if contender == "eager":
        expected += numbers
        found["repeats"] = difference(again, numbers[-1])[0] == 0
    else:
        apart = [difference(*pair) for pair in zip(numbers, expected, strict=True)]
        found["difference"], found["where"] = max(apart)
        found["compile_s"] = round(max(0.0, seconds[0] - warm), 1)
    found["reads"] = host_reads(lambda: step(model, program, batches[-1]))
    return found
