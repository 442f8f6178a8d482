"""A 24-layer decoder on a GPU, hidden size 4096, 4096 tokens, whose activations wait for backward on the host.

    python -m bench.offload_decoder

Contenders: no offload, fastpack with one and two buffers, `save_on_cpu`, and PyTorch's own activation offloading. Peak
memory and step time are measured in one process, one contender after the other, on the same weights: several copies of
the model do not fit.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn
from torch.utils.benchmark import Timer
from torch.utils.checkpoint import checkpoint


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
    """Mark each checkpoint's first tensor: PyTorch's own pass moves the tensors that carry the mark."""
    for node in graph.graph.nodes:
        if getattr(node.meta.get("recompute"), "name", "") == "MUST_SAVE":
            node.meta["should_offload"] = True
    return graph


def on_cuda(layers: int, width: int, sequence: int, repeats: int) -> str:
    """Peak memory and step time of each contender, in one process, one after the other."""
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
        "save_on_cpu, eager": (None, torch.autograd.graph.save_on_cpu(pin_memory=True)),
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

        def step(program: Any = program) -> None:
            program(x).backward()
            model.zero_grad()

        try:
            with context:
                timer = Timer("step()", globals={"step": step})
                timer.timeit(2)  # compiles
                median = statistics.median(timer.timeit(1).median for _ in range(repeats))
        except Exception as error:  # a peer that fails is a row of the table
            rows.append([name, f"failed: {type(error).__name__}: {str(error).splitlines()[0]:.60}", "", ""])
            continue
        first = first or median
        peak = torch.cuda.max_memory_allocated() - before
        rows.append([name, f"{1e3 * median:.1f} ms", f"{peak / 2**30:.2f} GiB", f"{first / median:.1%}"])
    return tabulate(rows, ["", "step", "memory above the model's", "step rate"], disable_numparse=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("this needs a CUDA device, and PyTorch finds none", file=sys.stderr)
        return 2
    print(on_cuda(given.layers, given.width, given.sequence, given.repeats))
    return 0


if __name__ == "__main__":
    sys.exit(main())
