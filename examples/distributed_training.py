"""Train a small decoder on packed text over several processes, in eager mode and with `backend="fastpack"`.

    torchrun --nproc-per-node 2 examples/distributed_training.py                    # DistributedDataParallel
    torchrun --nproc-per-node 2 examples/distributed_training.py --parallel fsdp    # fully_shard, layer by layer
    torchrun --nproc-per-node 2 examples/distributed_training.py --parallel tp      # tensor parallel
    torchrun --nproc-per-node 2 examples/distributed_training.py --parallel ep      # experts spread over the ranks

It runs on CPUs (gloo) or on one accelerator per process. The text is the source of Python's standard library, one token
per byte. Every layer is checkpointed, and asks its batch what packed attention asks in many code bases: whether the
documents cover the batch, and how long the longest is. Each rank has documents of its own, so the answers differ between
ranks; tensor parallel ranks share a batch. The exit code is 1 if the losses of the two runs differ on any rank
by more than rounding.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import random
import sys
import sysconfig
import time
from collections import Counter
from pathlib import Path
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler's messages

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tabulate import tabulate
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from fxpasses.data import bucket_lengths

WIDTH, HEADS, EXPERTS, TOP_K, DOCUMENTS = 128, 4, 8, 2, 8
HOST_READS = ("aten::_local_scalar_dense", "aten::nonzero")
MASKS = "aten::logical_and_"  # `block_causal_mask` calls it once, and nothing else calls it
TOLERANCE = 1e-4  # relative, of losses: DDP's buckets, attention by tiles and Inductor add up in other orders


# The model: checkpointed layers that ask the batch themselves


def block_causal_mask(lengths: torch.Tensor, tokens: int) -> torch.Tensor:
    """bool [tokens, tokens]: True where a token (row) sees a token of its own document (column) that is not later."""
    torch._check(int(lengths.sum()) == tokens)
    position = torch.arange(tokens, device=lengths.device)
    document = torch.bucketize(position, lengths.cumsum(0), right=True)
    distance = position[:, None] - position
    mask = document[:, None] == document
    return mask.logical_and_((distance >= 0) & (distance < lengths.max().item()))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        heads = (p(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(0, 1) for p in (self.query, self.key, self.value))
        query, key, value = (part[None] for part in heads)
        mask = block_causal_mask(lengths, x.shape[0])
        output = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return self.out(output[0].transpose(0, 1).flatten(1))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.up(x)))


class ExpertParallel(nn.Module):
    """A mixture whose experts are spread over the ranks: rows are sent to their experts and back."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(FeedForward() for _ in range(EXPERTS // dist.get_world_size()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(TOP_K)
        order = chosen.flatten().argsort(stable=True)
        counts = torch.histc(chosen.float(), bins=EXPERTS, min=0, max=EXPERTS).long()
        ranks, local = dist.get_world_size(), len(self.experts)
        theirs = all_to_all_single(counts, None, None, dist.group.WORLD).view(ranks, local)
        sent, received = counts.view(ranks, local).sum(1).tolist(), theirs.sum(1).tolist()
        rows = all_to_all_single_autograd(x[order // TOP_K], received, sent, dist.group.WORLD)
        expert_of_row = torch.arange(local, device=x.device).repeat(ranks)
        expert_of_row = expert_of_row.repeat_interleave(theirs.flatten(), output_size=rows.shape[0])
        by_expert = expert_of_row.argsort(stable=True)
        parts = rows[by_expert].split(theirs.sum(0).tolist())
        done = torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])
        done = torch.zeros_like(done).index_copy(0, by_expert, done)
        back = all_to_all_single_autograd(done, sent, received, dist.group.WORLD)
        return torch.zeros_like(x).index_add(0, order // TOP_K, back * weights.flatten()[order, None])


class Layer(nn.Module):
    def __init__(self, feed_forward: nn.Module) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.attention, self.feed_forward = Attention(), feed_forward

    def body(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norms[0](x), lengths)
        return x + self.feed_forward(self.norms[1](x))

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.body, x, lengths, use_reentrant=False)


class Decoder(nn.Module):
    def __init__(self, layers: int, feed_forward: type[nn.Module]) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(256, WIDTH), nn.Linear(WIDTH, 256, bias=False)
        self.layers = nn.ModuleList(Layer(feed_forward()) for _ in range(layers))

    def forward(self, tokens: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """The mean loss of the next token. tokens: int64 [T]; lengths: int64 [DOCUMENTS], zeros at the end."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, lengths)
        return F.cross_entropy(self.head(x[:-1]), tokens[1:])


# The arrangements: which modules are wrapped how, and which are compiled


COLUMNS = ("attention.query", "attention.key", "attention.value", "feed_forward.up")
ROWS = ("attention.out", "feed_forward.down")


def arrange(model: Decoder, parallel: str, mesh: DeviceMesh, compiled: dict[str, Any] | None) -> nn.Module:
    """compiled: the arguments of `compile`; None for eager mode."""
    if compiled is not None:
        for module in model.layers if parallel == "fsdp" else [model]:
            module.compile(**compiled)
    if parallel == "fsdp":
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    if parallel == "tp":
        plan = dict.fromkeys(COLUMNS, ColwiseParallel()) | dict.fromkeys(ROWS, RowwiseParallel())
        for layer in model.layers:
            parallelize_module(layer, mesh, plan)
        return model
    experts = [name for name, _ in model.named_parameters() if ".experts." in name]  # each rank has its own
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, experts)
    return DistributedDataParallel(model)


# The data: documents of very different lengths, packed to the same number of tokens


def packed_batches(arguments: argparse.Namespace, seed: int, device: torch.device) -> list[tuple[torch.Tensor, ...]]:
    """One batch per step: tokens int64 [T], lengths int64 [DOCUMENTS]."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    random.Random(seed).shuffle(files)
    text, batches = b"".join(file.read_bytes() for file in files[:20]), []
    for step in range(arguments.steps):
        start = step * arguments.tokens % (len(text) - arguments.tokens)
        tokens = torch.tensor(list(text[start : start + arguments.tokens]))
        ends = sorted(random.Random(f"{seed} {step}").sample(range(1, arguments.tokens), DOCUMENTS - 2))
        lengths = [b - a for a, b in zip([0, *ends], [*ends, arguments.tokens], strict=True)]
        batches.append((tokens.to(device), bucket_lengths(lengths, [DOCUMENTS]).to(device)))
    return batches


# The run


def train(arguments: argparse.Namespace, mesh: DeviceMesh, compiled: dict[str, Any] | None) -> dict[str, Any]:
    """Losses, the median time of a warm step, and the counts of the last step and of the compiler."""
    device = torch.device(mesh.device_type)
    torch.manual_seed(0 if arguments.parallel != "ep" else dist.get_rank())
    model = Decoder(arguments.layers, ExpertParallel if arguments.parallel == "ep" else FeedForward).to(device)
    wrapped = arrange(model, arguments.parallel, mesh, compiled)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    seed = 0 if arguments.parallel == "tp" else dist.get_rank()
    losses, seconds = [], []
    profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    for step, batch in enumerate(packed_batches(arguments, seed, device), start=1):
        started = time.perf_counter()
        with profile if step == arguments.steps else contextlib.nullcontext():
            loss = wrapped(*batch)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - started)
    events = Counter({event.key: event.count for event in profile.key_averages()})
    return {
        "losses": losses,
        "host reads per step": sum(events[name] for name in HOST_READS),
        "masks built per step": events[MASKS],
        "graphs compiled": counters["stats"]["unique_graphs"],
        "graph breaks": sum(counters["graph_break"].values()),
        "step time": f"{1000 * sorted(seconds)[len(seconds) // 2]:.0f} ms",
    }


def show(runs: dict[str, dict[str, Any]], arguments: argparse.Namespace) -> None:
    rows = [[name, *(run[name] for run in runs.values())] for name in runs["eager"] if name != "losses"]
    losses = [["loss, last step", *(f"{run['losses'][-1]:.5f}" for run in runs.values())]]
    print(f"{arguments.parallel} on {dist.get_world_size()} processes; rank 0:")
    print(tabulate(losses + rows, headers=["", *runs], disable_numparse=True))
    if arguments.parallel == "ep" and not torch.accelerator.is_available():
        print("(On a CPU each number of a captured `.tolist()` counts as a read; an eager `.tolist()` counts as none.)")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train on packed text over several processes. Start it with torchrun.")
    parser.add_argument("--parallel", choices=["ddp", "fsdp", "tp", "ep"], default="ddp", help="default ddp")
    parser.add_argument("--layers", type=int, default=4, help="decoder layers (default 4)")
    parser.add_argument("--tokens", type=int, default=256, help="tokens per batch (default 256)")
    parser.add_argument("--steps", type=int, default=10, help="training steps (default 10)")
    lowerings = ["inductor", "aot_eager", "eager"]
    parser.add_argument(
        "--lowering", choices=lowerings, default="inductor", help="fastpack's lowering (default inductor)"
    )
    arguments = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it with torchrun: torchrun --nproc-per-node 2 examples/distributed_training.py")
    for name, least in {"layers": 1, "tokens": 2 * DOCUMENTS, "steps": 2}.items():
        if getattr(arguments, name) < least:
            parser.error(f"argument --{name}: {getattr(arguments, name)} is less than {least}")
    divided, things = (HEADS, "heads") if arguments.parallel == "tp" else (EXPERTS, "experts")
    if arguments.parallel in ("tp", "ep") and divided % int(os.environ["WORLD_SIZE"]):
        parser.error(f"argument --parallel: {divided} {things} do not divide by {os.environ['WORLD_SIZE']} processes")
    return arguments


def main() -> int:
    arguments = parse_arguments()
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    mesh = init_device_mesh(accelerator.type if accelerator else "cpu", (int(os.environ["WORLD_SIZE"]),))
    compiled = {"backend": "fastpack", "options": {"fastpack.lowering": arguments.lowering}}
    runs = {"eager": train(arguments, mesh, None)}
    torch._dynamo.reset()
    counters.clear()
    runs["fastpack"] = train(arguments, mesh, compiled)
    wanted, found = (run["losses"] for run in runs.values())
    wrong = [
        step for step, pair in enumerate(zip(wanted, found, strict=True)) if not math.isclose(*pair, rel_tol=TOLERANCE)
    ]
    if dist.get_rank() == 0:
        show(runs, arguments)
    if wrong:
        message = (
            f"rank {dist.get_rank()}: the losses of step {wrong[0]} differ: {wanted[wrong[0]]} and {found[wrong[0]]}"
        )
        print(message, file=sys.stderr)
    dist.destroy_process_group()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
