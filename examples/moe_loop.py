"""A mixture of experts, written as a loop that skips experts without tokens; `fastpack` makes it one program."""

import os

os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler's messages

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import nn

import fxpasses.inspect

TOKENS, HIDDEN, EXPERTS, TOP_K = 256, 64, 8, 2


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.up = nn.ModuleList(nn.Linear(HIDDEN, 4 * HIDDEN) for _ in range(EXPERTS))
        self.down = nn.ModuleList(nn.Linear(4 * HIDDEN, HIDDEN) for _ in range(EXPERTS))

    def forward(self, x):
        scores, chosen = torch.topk(self.router(x).softmax(-1), TOP_K)
        out = torch.zeros_like(x)
        for expert in range(EXPERTS):
            token, slot = torch.where(chosen == expert)
            if token.numel() == 0:  # the host waits for the device, once for each expert
                continue
            hidden = F.gelu(self.up[expert](x[token]))
            out.index_add_(0, token, self.down[expert](hidden) * scores[token, slot, None])
        return out


def step(program, x):
    """The loss of one step, and how many queries the host made during it, forward and backward."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        loss = (program(x) - x).square().mean()
        loss.backward()
    return loss.item(), sum(event.count for event in profile.key_averages() if event.key == "aten::nonzero")


torch.manual_seed(0)
model, x = Experts(), torch.randn(TOKENS, HIDDEN)
with fxpasses.inspect.record() as record:
    compiled = torch.compile(model, backend="fastpack")
    step(compiled, x)  # compiles
(loss, queries), (same_loss, no_queries) = step(model, x), step(compiled, x)
graphs = sum(graph.outcome == "rewritten" for graph in record.graphs)
rows = [
    ["loss", f"{loss:.6f}", f"{same_loss:.6f}"],
    ["data-dependent queries a step", queries, no_queries],
    ["graphs", "-", graphs],
]
print(tabulate(rows, headers=["", "eager", "fastpack"], disable_numparse=True), record, sep="\n\n")
