"""Step times with activations moved away: no offload, one buffer, two buffers, beside the model.

    python -m bench.offload                    # the disk tier on the CPU, over several ratios of copy to compute
    python -m bench.offload --plot times.png   # and a picture: points are measured, lines are the model
    python -m bench.offload --cuda             # a 24-layer decoder on a GPU, and what PyTorch has for the same end

On the CPU a copy through the page cache takes the processor that compute needs, and how long it takes is up to the
machine. So `--bandwidth` slows copies down to that of a bus: each takes bytes / bandwidth, most of it asleep. 0 leaves
them as they are. The model is that of `fxpasses.passes.offload.schedule`, from the compute times of the run without
offload: backward of L equal layers takes L·(c + g) with one buffer and c + (L-1)·max(c, g) + g with two.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxpasses
from fxpasses.passes.offload.schedule import backward_time, forward_time
from fxpasses.runtime.offload.disk import UnlinkedFile

LAYERS, TOKENS, WIDTH = 12, 2048, 256  # activations of 2 MiB
OFFLOAD = {"fastpack.offload": "disk", "fastpack.offload.min_bytes": 0, "fastpack.offload.keep_last": 0}


class Work(nn.Module):
    """A checkpointed layer of `products` matrix products: how long it computes is what the sweep changes."""

    def __init__(self, products: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(WIDTH, WIDTH) / WIDTH for _ in range(products))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = x + x @ weight
        return x


class Stack(nn.Module):
    def __init__(self, products: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Work(products) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1.0  # computed, so that the first layer's input can be moved like the others'
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x.sum()


@dataclass(frozen=True)
class Point:
    """Seconds of forward and backward at one ratio c/g, by number of buffers (0: no offload); c and g of one layer."""

    copy: float
    forward_compute: float
    backward_compute: float
    measured: dict[int, float]

    @property
    def ratio(self) -> float:
        return self.copy / self.backward_compute

    def model(self, buffers: int) -> float:
        """Seconds of a step, as the schedule predicts."""
        base = self.measured[0]
        if buffers == 0:
            return base
        copies = [self.copy] * LAYERS
        forward = forward_time(copies, [self.forward_compute] * LAYERS, buffers) - LAYERS * self.forward_compute
        backward = backward_time(copies, [self.backward_compute] * LAYERS, buffers) - LAYERS * self.backward_compute
        return base + forward + backward


@contextlib.contextmanager
def slowed(bandwidth: float) -> Iterator[None]:
    """Reads and writes that last at least as long as at `bandwidth` bytes a second."""

    def wrapped(move: Callable[[UnlinkedFile, Tensor], None]) -> Callable[[UnlinkedFile, Tensor], None]:
        def slow(self: UnlinkedFile, data: Tensor) -> None:
            started = time.perf_counter()
            move(self, data)
            time.sleep(max(0.0, data.numel() / bandwidth - (time.perf_counter() - started)))

        return slow

    if not bandwidth:
        yield
        return
    with (
        mock.patch.object(UnlinkedFile, "write", wrapped(UnlinkedFile.write)),
        mock.patch.object(UnlinkedFile, "read", wrapped(UnlinkedFile.read)),
    ):
        yield


def step_seconds(program: Any, x: Tensor, repeats: int) -> tuple[float, float]:
    """Medians of forward and backward; the first step compiles and does not count."""
    forward, backward = [], []
    for number in range(repeats + 1):
        started = time.perf_counter()
        loss = program(x)
        middle = time.perf_counter()
        loss.backward()
        if number:
            forward.append(middle - started)
            backward.append(time.perf_counter() - middle)
    return statistics.median(forward), statistics.median(backward)


def measure(products: int, bandwidth: float, repeats: int, buffers: Sequence[int] = (0, 1, 2)) -> Point:
    """One ratio c/g, all settings in this process, on the same weights and input."""
    model, x = Stack(products), torch.randn(TOKENS, WIDTH)
    size = x.numel() * x.element_size()
    found: dict[int, tuple[float, float]] = {}
    with slowed(bandwidth):
        for number in buffers:
            torch._dynamo.reset()
            options: dict[str, Any] = {"fastpack.lowering": "aot_eager", "fastpack.strict": True}
            if number:
                options |= OFFLOAD | {"fastpack.offload.buffers": number}
            fxpasses.offload_stats(reset=True)
            found[number] = step_seconds(torch.compile(model, backend="fastpack", options=options), x, repeats)
            moved = fxpasses.offload_stats()
            if number and moved.tensors_out != LAYERS * (repeats + 1):
                raise RuntimeError(f"{moved.tensors_out} tensors were moved, not one a layer and step")
    copy = size / bandwidth if bandwidth else _copy_seconds(size)
    forward, backward = found[0]
    return Point(copy, forward / LAYERS, backward / LAYERS, {n: sum(times) for n, times in found.items()})


def _copy_seconds(size: int) -> float:
    data, seconds = torch.ones(size, dtype=torch.uint8), []
    for _ in range(5):
        file, _ = UnlinkedFile.create(tempfile.gettempdir(), size)
        started = time.perf_counter()
        file.write(data)
        file.read(data)
        seconds.append((time.perf_counter() - started) / 2)
    return statistics.median(seconds)


def table(points: Sequence[Point]) -> str:
    rows = [
        [
            f"{point.ratio:.2f}",
            f"{1e3 * point.copy:.1f}",
            *(f"{1e3 * point.measured[n]:.0f} / {1e3 * point.model(n):.0f}" for n in (0, 1, 2)),
            f"{point.measured[0] / point.measured[1]:.0%}",
            f"{point.measured[0] / point.measured[2]:.0%}",
        ]
        for point in points
    ]
    headers = ["c/g", "c, ms", "no offload", "1 buffer", "2 buffers", "rate, 1", "rate, 2"]
    return tabulate(rows, headers, disable_numparse=True) + "\n(milliseconds of a step: measured / model)"


def plot(points: Sequence[Point], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for color, buffers, label in (("0.5", 0, "no offload"), ("C3", 1, "1 buffer"), ("C0", 2, "2 buffers")):
        ratios = [point.ratio for point in points]
        scale = [point.measured[0] for point in points]
        measured = [point.measured[buffers] / base for point, base in zip(points, scale, strict=True)]
        model = [point.model(buffers) / base for point, base in zip(points, scale, strict=True)]
        axes.plot(ratios, measured, "o", color=color, label=f"{label}, measured")
        axes.plot(ratios, model, "-", color=color, label=f"{label}, model")
    axes.set(xlabel="copy time / backward time of a layer", ylabel="step time / that without offload", xscale="log")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=150)


# On a GPU, beside what PyTorch has


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // 128
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Decoder(nn.Module):
    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x.float().square().mean()


def _mark_for_pytorch(graph: torch.fx.GraphModule, inputs: object) -> torch.fx.GraphModule:
    """PyTorch's own pass moves what carries this mark: here, what a checkpoint begins with."""
    for node in graph.graph.nodes:
        if getattr(node.meta.get("recompute"), "name", "") == "MUST_SAVE":
            node.meta["should_offload"] = True
    return graph


def on_cuda(layers: int, width: int, sequence: int, repeats: int) -> str:
    """Peak memory and step time of each way, in one process, one after the other."""
    torch.manual_seed(0)
    device = torch.device("cuda")
    model = Decoder(layers, width).to(device, torch.bfloat16)
    x = torch.randn(1, sequence, width, device=device, dtype=torch.bfloat16)
    stock: Any = torch._functorch.config
    own = stock.patch(
        enable_activation_offloading=True, activation_offload_separate_stream=True, joint_custom_pass=_mark_for_pytorch
    )
    host = {"fastpack.offload": "host"}
    ways: dict[str, tuple[dict[str, Any] | None, Any]] = {
        "no offload": ({}, contextlib.nullcontext()),
        "host, 1 buffer": ({**host, "fastpack.offload.buffers": 1}, contextlib.nullcontext()),
        "host, 2 buffers": ({**host, "fastpack.offload.buffers": 2}, contextlib.nullcontext()),
        "save_on_cpu": (None, torch.autograd.graph.save_on_cpu(pin_memory=True)),
        "PyTorch's offloading": ({"peer": True}, own),
    }
    rows: list[list[str]] = []
    first = 0.0
    for name, (options, context) in ways.items():
        torch._dynamo.reset()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        program: Any = model
        if options is not None:
            peer = options.pop("peer", False)
            program = torch.compile(model, **({} if peer else {"backend": "fastpack", "options": options}))
        seconds = []
        try:
            with context:
                for _ in range(repeats + 2):
                    torch.cuda.synchronize()
                    started = time.perf_counter()
                    program(x).backward()
                    torch.cuda.synchronize()
                    seconds.append(time.perf_counter() - started)
                    model.zero_grad()
        except Exception as error:  # a peer that fails is a row of the table
            rows.append([name, f"failed: {type(error).__name__}: {str(error).splitlines()[0]:.60}", "", ""])
            continue
        median = statistics.median(seconds[2:])
        first = first or median
        peak = torch.cuda.max_memory_allocated() - before
        rows.append([name, f"{1e3 * median:.1f} ms", f"{peak / 2**30:.2f} GiB", f"{first / median:.1%}"])
    return tabulate(rows, ["", "step", "memory above the model's", "step rate"], disable_numparse=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--products", type=int, nargs="+", default=[1, 2, 4, 8, 16], help="of a layer: sets g")
    parser.add_argument("--bandwidth", type=float, default=2e8, help="bytes a second of a copy; 0 as it comes")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--plot", metavar="FILE", help="draw points and model")
    parser.add_argument("--cuda", action="store_true", help="the decoder on a GPU, and its peers")
    parser.add_argument("--layers", type=int, default=24, help="with --cuda")
    parser.add_argument("--width", type=int, default=4096, help="with --cuda")
    parser.add_argument("--sequence", type=int, default=4096, help="with --cuda")
    given = parser.parse_args(arguments)
    if given.cuda:
        if not torch.cuda.is_available():
            print("--cuda was asked for, but PyTorch finds no CUDA device", file=sys.stderr)
            return 2
        print(on_cuda(given.layers, given.width, given.sequence, given.repeats))
        return 0
    points = sorted((measure(n, given.bandwidth, given.repeats) for n in given.products), key=lambda p: p.ratio)
    print(table(points))
    if given.plot:
        plot(points, given.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
