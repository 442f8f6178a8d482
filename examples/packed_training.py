"""Train a small Hugging Face decoder on packed text, in eager mode and with `backend="fastpack"`, side by side.

    make demo                                        # or: python examples/packed_training.py
    make demo ARGS="--peer none --layers 12"         # without the column of stock Inductor
    make demo ARGS="--attention flash"               # Hugging Face's own flash-attention path
    make demo ARGS=--padded                          # padded texts that begin with a prompt
    make demo ARGS=--offload                         # with a column whose activations wait for backward on disk
    make demo ARGS="--device cuda --tokens 4096"

The text is the source of the installed Python's standard library, one token per byte, several documents packed into
each batch. The attention does in every layer what packed attention does in many code bases: it asks for the longest
document (`.item()`) and for all lengths (`.tolist()`), checks that the lengths cover the batch, and builds a
block-causal mask. With checkpointed layers, eager mode does all of this twice per layer and step: in forward, and again
in backward. `fastpack` does it once per batch, without a change to the model, and attention computes only the pairs of
tokens that the mask allows.

`--attention flash` takes the model as Hugging Face ships it, and batches in which `position_ids` alone say where
documents begin. The model's flash-attention path asks in every layer whether the batch is packed (`if tensor:`), where
documents begin (`nonzero`), and how long the longest document is (`.item()`). Stock `torch.compile` breaks the graph
there, and compiles no layer. No batch here is a single document: such a batch takes the other branch of `if tensor:`,
for which `fastpack` compiles a second graph.

`--padded` takes the model as Hugging Face ships it, and batches as instruction tuning has them: texts of different
lengths, padded, whose first half is a prompt without labels. `fastpack` computes the tokens that can reach the loss.

All columns start from the same weights and see the same batches. The exit code is 1 if their losses disagree.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import math
import os
import random
import re
import statistics
import sys
import sysconfig
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # or the profiler's messages tear the progress bar apart
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that spin on a busy machine cost ten times the step

import torch
import torch.nn.functional as F
import varlen_attention
from peak_memory import PeakMemory, return_memory_at_once
from tabulate import tabulate
from torch._dynamo.utils import counters
from torch.profiler import ProfilerActivity
from tqdm import tqdm
from transformers import AttentionInterface, DataCollatorWithFlattening, LlamaConfig, LlamaForCausalLM

import fxpasses.inspect
from fxpasses.attention.runtime.stats import AttentionStats
from fxpasses.data import bucket_lengths
from fxpasses.offload.runtime.stats import OffloadStats
from fxpasses.rows.row_stats import RowStats

SEQUENCES = 8  # entries of `lengths`, padded with zeros: `.tolist()` is unrolled, so another number is another graph
# Of losses: sums are taken in another order, and some tens of steps of AdamW amplify the difference.
RELATIVE_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 3e-2}
WARM_UP = 1  # the first step compiles

# How host reads appear in the profiler. An eager `.tolist()` of a CPU tensor does not, so eager mode's count is low.
HOST_READS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::unique2", "aten::masked_select")
DEVICE_COPY = "Memcpy DtoH"  # prefix of the names of device-to-host copies; an eager `.tolist()` on CUDA is one
MASK_BUILT = "aten::logical_and_"  # `block_causal_mask` calls it once, and nothing else calls it

OFFLOAD = "fastpack, offload"

Batch = dict[str, torch.Tensor]


# The model: any decoder of transformers, with its own flash attention or with `packed_attention`


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    lengths: torch.Tensor,
    scaling: float,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention within each document of a packed batch; q, k, v are [1, heads, tokens, width], lengths [SEQUENCES].

    transformers passes an argument that `model(...)` does not know to this function by name: so `lengths` gets here.
    """
    mask = block_causal_mask(lengths, query.shape[2])
    output = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)
    return output.transpose(1, 2), None


def block_causal_mask(lengths: torch.Tensor, tokens: int) -> torch.Tensor:
    """True where a query (row) may attend to a key (column): one in the same document that is not later."""
    torch._check(int(lengths.sum()) == tokens)
    longest = lengths.max().item()
    position = torch.arange(tokens, device=lengths.device)
    mask = torch.zeros(tokens, tokens, dtype=torch.bool, device=lengths.device)
    start = 0
    for length in lengths.tolist():
        document = (position >= start) & (position < start + length)
        mask |= document[:, None] & document
        start += length
    distance = position[:, None] - position
    return mask.logical_and_((distance >= 0) & (distance < longest))


def new_model(arguments: argparse.Namespace) -> LlamaForCausalLM:
    """A randomly initialised decoder with 1.2M parameters per layer, every layer checkpointed."""
    torch.manual_seed(arguments.seed)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=320,
        intermediate_size=864,
        num_attention_heads=5,
        num_key_value_heads=5,
        num_hidden_layers=arguments.layers,
        use_cache=False,  # or transformers makes no mask from position_ids, and the texts attend to each other
        attn_implementation=attention_of(arguments),
    )
    model = LlamaForCausalLM(config).to(arguments.device, dtype(arguments)).train()
    model.activation_checkpointing_enable({"use_reentrant": False})
    return model


def attention_of(arguments: argparse.Namespace) -> str:
    """What transformers calls it."""
    if arguments.padded:
        return "sdpa"
    return varlen_attention.install() if arguments.attention == "flash" else "packed"


def dtype(arguments: argparse.Namespace) -> torch.dtype:
    """Flash attention on CUDA has no float32."""
    return torch.bfloat16 if arguments.attention == "flash" and arguments.device == "cuda" else torch.float32


# The data: documents of very different lengths, packed to the same number of tokens


def documents(smallest: int, seed: int) -> Iterator[bytes]:
    """Runs of whole paragraphs of the standard library's source, of at least `smallest` bytes; never ends."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(folder.glob("*.py"))
    if not files:
        sys.exit(f"no Python source files in {folder}")
    random.Random(seed).shuffle(files)
    while True:
        for file in files:
            document = b""
            for paragraph in re.split(rb"(?<=\n)\n+", file.read_bytes()):
                document += paragraph
                if len(document) >= smallest:
                    yield document
                    document = b""


def packed_batches(arguments: argparse.Namespace) -> list[Batch]:
    """One batch per step: `tokens` tokens of up to SEQUENCES documents, the last document cut to fit.

    input_ids, labels, position_ids: int64 [1, tokens]; for `packed_attention` also lengths: int64 [SEQUENCES], zeros at
    the end.
    """
    collate = DataCollatorWithFlattening(return_tensors="pt")
    source = documents(math.ceil(arguments.tokens / SEQUENCES), arguments.seed)
    longest = arguments.tokens // 2 if arguments.attention == "flash" else arguments.tokens
    batches = []
    for _ in range(arguments.steps):
        lengths: list[int] = []
        features = []
        while (room := arguments.tokens - sum(lengths)) > 0:
            document = next(source)[: min(room, longest)]
            lengths.append(len(document))
            features.append({"input_ids": list(document)})
        batch = dict(collate(features))
        if arguments.attention == "mask":
            batch["lengths"] = bucket_lengths(lengths, [SEQUENCES])
        batches.append({name: value.to(arguments.device) for name, value in batch.items()})
    return batches


def padded_batches(arguments: argparse.Namespace) -> list[Batch]:
    """One batch per step: SEQUENCES texts, padded to a quarter of `tokens`, of which the first half has no labels.

    input_ids, labels, attention_mask: int64 [SEQUENCES, tokens / 4].
    """
    longest, lengths = arguments.tokens // 4, random.Random(arguments.seed)
    source = documents(longest, arguments.seed)
    batches = []
    for _ in range(arguments.steps):
        ids, labels = torch.zeros(2, SEQUENCES, longest, dtype=torch.int64, device=arguments.device)
        labels.fill_(-100)
        for text, label in zip(ids, labels, strict=True):
            length = lengths.randint(longest // 4, longest)
            text[:length] = torch.tensor(list(next(source)[:length]))
            label[length // 2 : length] = text[length // 2 : length]
        batches.append({"input_ids": ids, "labels": labels, "attention_mask": (ids != 0).long()})
    return batches


# The run: the columns of the table take their training steps in turns


@dataclass
class Run:
    """The figures of one column. `failure` says why a peer has none."""

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    events: Counter[str] = field(default_factory=Counter)
    graphs: int = 0
    graph_breaks: int = 0
    offloaded: OffloadStats | None = None
    attention: AttentionStats | None = None
    rows: RowStats | None = None
    peak_bytes: int = 0
    failure: str = ""

    @property
    def step_seconds(self) -> float:
        """The median of the warm steps, without the last step, which ran under the profiler."""
        return statistics.median(self.seconds[WARM_UP:-1])

    @property
    def compile_seconds(self) -> float:
        return max(0.0, self.seconds[0] - self.step_seconds)


class Column:
    """A fresh model, trained in eager mode, with `fastpack`, or with a peer, whose failure is shown and not raised."""

    def __init__(self, name: str, arguments: argparse.Namespace, batches: list[Batch]) -> None:
        self.run = Run()
        self.ours, self.offloads, self.is_peer = name.startswith("fastpack"), name == OFFLOAD, name.startswith("stock")
        # Each column has tensors of its own, because results that are kept for a batch are kept with its tensors.
        self.batches = [{name: value.clone() for name, value in batch.items()} for batch in batches]
        self.model = new_model(arguments)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.memory = PeakMemory(self.model.device)
        self.loss_of: Callable[..., torch.Tensor] = self.loss
        if self.ours:
            options: dict[str, Any] = {"fastpack.lowering": arguments.lowering}
            if self.offloads:
                # The model's activations are small: with the default limit all of them would be kept.
                options |= {"fastpack.offload": "disk", "fastpack.offload.min_bytes": 0}
            self.loss_of = torch.compile(self.loss, backend="fastpack", options=options)
        elif self.is_peer:
            self.loss_of = torch.compile(self.loss, backend=arguments.peer)

    def loss(self, **batch: torch.Tensor) -> torch.Tensor:
        """Compiled as a whole: logits that the graph returns would be needed for every token."""
        return self.model(**batch).loss

    def step(self, number: int) -> None:
        """Forward, backward and optimizer on a batch; of the last batch, forward and backward are profiled."""
        if self.run.failure:
            return
        graphs, breaks = counted_graphs()
        try:
            with stock_flags() if self.is_peer else contextlib.nullcontext():
                self._train(self.batches[number], last=number == len(self.batches) - 1)
        except Exception as error:
            if not self.is_peer:
                raise
            self.run = Run(failure=f"failed: {type(error).__name__}: {str(error).strip().splitlines()[0]:.60}")
        self.run.graphs += counted_graphs()[0] - graphs
        self.run.graph_breaks += counted_graphs()[1] - breaks
        if self.ours:
            self.run.attention = fxpasses.attention_stats(reset=True)
            self.run.rows = fxpasses.row_stats(reset=True)
        if self.offloads:
            self.run.offloaded = fxpasses.offload_stats()

    def _train(self, batch: Batch, last: bool) -> None:
        self.memory.reset()
        started = time.perf_counter()
        with counted(self.run.events) if last else contextlib.nullcontext():
            loss = self.loss_of(**batch)
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.run.losses.append(loss.item())  # waits for the device, so the time includes all of the step
        self.run.seconds.append(time.perf_counter() - started)
        if len(self.run.losses) > WARM_UP:
            self.run.peak_bytes = max(self.run.peak_bytes, self.memory.peak())


def run_columns(names: list[str], arguments: argparse.Namespace, batches: list[Batch], bar: tqdm) -> dict[str, Run]:
    """The columns take turns, one step each, so that other work on the machine slows all of them alike."""
    # Where stock PyTorch breaks the graph in every layer, Dynamo says so at length.
    torch._logging.set_logs(dynamo=logging.ERROR)
    torch._dynamo.reset()
    fxpasses.offload_stats(reset=True)
    fxpasses.attention_stats(reset=True)
    columns = {name: Column(name, arguments, batches) for name in names}
    for number in range(len(batches)):
        for name, column in columns.items():
            bar.set_description(name)
            column.step(number)
            bar.update()
    return {name: column.run for name, column in columns.items()}


def prepare_inductor(device: str) -> None:
    """Inductor's first use on a machine tests the compiler: its time, which is no column's own, ends here."""
    torch.compile(torch.sin)(torch.ones(64, device=device))


def stock_flags() -> contextlib.AbstractContextManager[None]:
    """PyTorch's defaults: without the flags that `fastpack` switches on, every layer breaks the graph."""
    return torch._dynamo.config.patch(capture_scalar_outputs=False, capture_dynamic_output_shape_ops=False)


def counted_graphs() -> tuple[int, int]:
    """Graphs compiled and graph breaks so far."""
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


@contextlib.contextmanager
def counted(events: Counter[str]) -> Iterator[None]:
    """Count the operators that run inside. (A `TorchDispatchMode` would switch compilation off.)"""
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    with torch.profiler.profile(activities=activities) as profile:
        yield
    events.update({event.key: event.count for event in profile.key_averages()})


# What is shown


def table(runs: dict[str, Run], arguments: argparse.Namespace) -> str:
    """One column per run; a failed run says why in its first row."""
    rows: dict[str, Callable[[Run], str]] = {
        "loss, first step": lambda run: f"{run.losses[0]:.5f}",
        "loss, last step": lambda run: f"{run.losses[-1]:.5f}",
        "host reads per step": lambda run: str(sum(run.events[name] for name in HOST_READS)),
        "masks built per step": lambda run: str(run.events[MASK_BUILT]),
        "pairs of tokens computed": pairs_computed,
        "tokens computed": lambda run: f"{100 * run.rows.live / run.rows.steps:.0f} %" if run.rows else "100 %",
        "graph breaks": lambda run: str(run.graph_breaks),
        "graphs compiled": lambda run: str(run.graphs),
        "compile time": lambda run: f"{run.compile_seconds:.1f} s" if run.graphs else "–",
        "step time, median": lambda run: f"{1000 * run.step_seconds:.0f} ms",
    }
    unused = ["graph breaks", "tokens computed"]
    if arguments.attention == "flash":
        unused = ["masks built per step", "pairs of tokens computed", "tokens computed"]
    elif arguments.padded:
        unused = ["host reads per step", "graph breaks", "masks built per step", "pairs of tokens computed"]
    for name in unused:
        del rows[name]
    if arguments.device == "cuda":
        rows["device-to-host copies per step"] = lambda run: str(
            sum(count for name, count in run.events.items() if name.startswith(DEVICE_COPY))
        )
    if arguments.offload:
        rows["bytes moved per step"] = lambda run: (
            f"{run.offloaded.bytes_out / len(run.losses) / 2**20:.2f} MiB" if run.offloaded else "–"
        )
        rows["time exposed per step"] = lambda run: (
            f"{1000 * run.offloaded.seconds_exposed / len(run.losses):.1f} ms" if run.offloaded else "–"
        )
        rows["memory of a step, peak"] = lambda run: f"{run.peak_bytes / 2**20:.1f} MiB"
    cells = [[label, *("" if run.failure else show(run) for run in runs.values())] for label, show in rows.items()]
    for column, run in enumerate(runs.values(), start=1):
        cells[0][column] = run.failure or cells[0][column]
    return tabulate(cells, headers=["", *runs], colalign=("left", *["right"] * len(runs)), disable_numparse=True)


def pairs_computed(run: Run) -> str:
    """The share of all pairs of a query and a key that attention computed: 100 % without a plan."""
    planned = run.attention is not None and run.attention.pairs > 0
    return f"{100 * run.attention.pairs_computed / run.attention.pairs:.0f} %" if planned else "100 %"


def notes(runs: dict[str, Run], arguments: argparse.Namespace) -> list[str]:
    """What the reader has to know beside the table's figures."""
    lines = []
    if arguments.device == "cpu" and arguments.attention == "mask" and not arguments.padded:
        lines.append("(The profiler sees no `.tolist()` of a CPU tensor: eager mode reads more than is counted.)")
    if "stock eager" in runs:
        lines.append(
            "(Stock eager is `torch.compile(model, backend='eager')`: the graphs that Inductor would get, run as they"
        )
        lines.append(" are. Its times say nothing about compiled code.)")
    if arguments.offload:
        lines.append("(Memory falls by what is moved if activations make the peak: try --tokens 4096. In a short step")
        lines.append(" gradients do.)")
    if arguments.attention == "flash" or (arguments.peer and not arguments.padded):
        lines.append("(Stock's graphs hold no decoder layer, and so take less time to compile: PyTorch skips a")
        lines.append(" checkpointed layer that breaks the graph.)")
    if arguments.padded:
        lines.append("(fastpack compiles more: what finds the rows of a batch, and attention between them.)")
    return lines


def disagreement(expected: Run, actual: Run, tolerance: float) -> str:
    """The first step whose losses differ by more than rounding explains, in words; "" if there is none."""
    for step, (wanted, got) in enumerate(zip(expected.losses, actual.losses, strict=True)):
        if not math.isclose(wanted, got, rel_tol=tolerance):
            return f"the losses of step {step} disagree: eager {wanted:.6f}, fastpack {got:.6f}"
    return ""


def whole_number(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.lstrip("-").isdecimal() or not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {low} to {high}")
        return int(text)

    return parse


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train on packed text, in eager mode and with fastpack.")
    parser.add_argument("--layers", type=whole_number(1, 128), default=8, help="decoder layers (default 8)")
    parser.add_argument("--tokens", type=whole_number(16, 16384), default=512, help="tokens per batch (default 512)")
    parser.add_argument("--steps", type=whole_number(3, 1000), default=30, help="training steps (default 30)")
    parser.add_argument("--seed", type=whole_number(0, 2**31), default=0, help="seed of weights and data (default 0)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="default cpu")
    lowerings = ["inductor", "aot_eager", "eager"]
    parser.add_argument(
        "--lowering", choices=lowerings, default="inductor", help="fastpack's lowering (default inductor)"
    )
    attentions = {"choices": ["mask", "flash"], "default": "mask"}
    parser.add_argument("--attention", **attentions, help="a block-causal mask (default), or Hugging Face's flash path")
    padded = "padded texts that begin with a prompt, instead of packed ones"
    parser.add_argument("--padded", action="store_true", help=padded)
    offload = "add a column: fastpack with activations that wait for backward on disk"
    parser.add_argument("--offload", action="store_true", help=offload)
    peers = "add a column: stock torch.compile with this backend (default inductor; with --attention flash: eager)"
    parser.add_argument("--peer", choices=["inductor", "eager", "none"], help=peers)
    arguments = parser.parse_args()
    if arguments.peer is None:
        arguments.peer = "eager" if arguments.attention == "flash" else "inductor"
    if arguments.peer == "none":
        arguments.peer = None
    if arguments.padded and arguments.attention == "flash":
        parser.error("argument --padded: Hugging Face's flash path takes packed batches; leave --attention out")
    if arguments.offload and arguments.lowering == "eager":
        parser.error("argument --offload: the lowering eager has no backward graph; take inductor or aot_eager")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("argument --device: cuda was asked for, but PyTorch finds no CUDA device")
    return arguments


def main() -> int:
    arguments = parse_arguments()
    AttentionInterface.register("packed", packed_attention)
    batches = padded_batches(arguments) if arguments.padded else packed_batches(arguments)
    if arguments.offload and arguments.device == "cpu":
        return_memory_at_once()
    columns = (
        ["eager", "fastpack"] + [OFFLOAD] * arguments.offload + ([f"stock {arguments.peer}"] if arguments.peer else [])
    )
    if "inductor" in (arguments.lowering, arguments.peer):
        prepare_inductor(arguments.device)
    with tqdm(total=arguments.steps * len(columns), unit="step") as bar, fxpasses.inspect.record() as record:
        runs = run_columns(columns, arguments, batches, bar)
    print(table(runs, arguments))
    for line in notes(runs, arguments):
        print(line)
    reports = [report for graph in record.graphs for report in graph.reports if report.changed]
    # The table says what hoist_metadata did.
    found = dict.fromkeys(f"{r.pass_name}: {r.summary}" for r in reports if r.pass_name != "hoist_metadata")
    for line in found or ["nothing but what the table says"]:
        print("changed:", line)
    problem = disagreement(runs["eager"], runs["fastpack"], RELATIVE_TOLERANCE[dtype(arguments)])
    if arguments.offload and runs[OFFLOAD].losses != runs["fastpack"].losses:
        problem = "offloading changed the losses"
    if problem:
        print(problem, file=sys.stderr)
    return 1 if problem else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted")
