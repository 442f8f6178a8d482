"""Loops over the parts of a batch: images in a vision encoder, the phonemes of a length regulator, losses per text."""

from __future__ import annotations

import itertools
from typing import Any

from bench.case import Case, Parameters, Program
from bench.cases.compilers import EAGER, Compiler, usual

BATCHES = 6
WIDTH, HEADS, LAYERS, CLASSES = 512, 8, 4, 512
MERGED = 2  # patches on a side of what the encoder merges into one token


def grids(count: int) -> list[list[tuple[int, int, int]]]:
    """Time, height and width of the images of each batch, in patches: about `count` images, of other sizes in each."""
    import torch

    generator = torch.Generator().manual_seed(3)
    found = []
    for number in range(BATCHES):
        many = max(2, count - number % 3)
        sides = torch.randint(4, 9, (many, 2), generator=generator).mul(2 * MERGED).tolist()
        found.append([(1, height, width) for height, width in sides])
    return found


def lengths(count: int) -> list[list[int]]:
    import torch

    generator = torch.Generator().manual_seed(4)
    many = [max(2, count - number % 3) for number in range(BATCHES)]
    return [torch.randint(24, 200, (n,), generator=generator).tolist() for n in many]


def tower(parameters: Parameters) -> tuple[Any, Any, list[dict[str, Any]]]:
    """The vision encoder of Qwen2.5-VL, on images of several sizes."""
    import torch
    from transformers import Qwen2_5_VLConfig
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

    vision = {
        "depth": LAYERS, "hidden_size": WIDTH, "intermediate_size": 3 * WIDTH, "num_heads": HEADS, "patch_size": 14,
        "out_hidden_size": WIDTH, "spatial_merge_size": MERGED, "window_size": 112, "fullatt_block_indexes": [1, 3],
    }  # fmt: skip
    config = Qwen2_5_VLConfig(vision_config=vision).vision_config
    config._attn_implementation = "sdpa"
    model = Qwen2_5_VisionTransformerPretrainedModel(config).train()
    batches = [
        {
            "hidden_states": torch.randn(sum(h * w for _, h, w in grid), 3 * 2 * 14 * 14),
            "grid_thw": torch.tensor(grid),
        }
        for grid in grids(parameters["parts"])
    ]
    return model, lambda compiled, batch: compiled(**batch).last_hidden_state.square().mean(), batches


def per_text(parameters: Parameters) -> tuple[Any, Any, list[dict[str, Any]]]:
    """Layers on packed rows, in which each text attends to itself, and a loss for each text."""
    import torch
    import torch.nn.functional as F
    from torch import Tensor, nn

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, sizes: Tensor) -> Tensor:
            q, k, v = self.qkv(self.norm(x)).view(-1, 3, HEADS, WIDTH // HEADS).permute(1, 2, 0, 3).unsqueeze(1)
            parts = zip(*(y.split(sizes.tolist(), 2) for y in (q, k, v)), strict=True)
            y = torch.cat([F.scaled_dot_product_attention(*part, is_causal=True) for part in parts], 2)
            return x + self.out(y[0].transpose(0, 1).flatten(1))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Layer() for _ in range(LAYERS)])
            self.head = nn.Linear(WIDTH, CLASSES)

        def forward(self, x: Tensor, labels: Tensor, sizes: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x, sizes)
            parts = zip(self.head(x).split(sizes.tolist()), labels.split(sizes.tolist()), strict=True)
            return torch.stack([F.cross_entropy(*part) for part in parts]).mean()

    batches = [
        {
            "x": torch.randn(sum(sizes), WIDTH),
            "labels": torch.randint(CLASSES, (sum(sizes),)),
            "sizes": torch.tensor(sizes),
        }
        for sizes in lengths(parameters["parts"])
    ]
    return Model(), lambda compiled, batch: compiled(**batch), batches


def pooled(parameters: Parameters) -> tuple[Any, Any, list[dict[str, Any]]]:
    """A contrastive loss between the means of texts, and their rows padded to the longest for a recurrent network."""
    import torch
    import torch.nn.functional as F
    from torch import Tensor, nn
    from torch.nn.utils.rnn import pad_sequence

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            self.score = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, sizes: Tensor) -> Tensor:
            x = self.mlp(x)
            means = torch.stack([F.normalize(part.mean(0), dim=0) for part in x.split(sizes.tolist())])
            padded = pad_sequence([torch.tanh(self.score(part)) for part in x.split(sizes.tolist())], batch_first=True)
            scores = 10 * means @ means.T
            return F.cross_entropy(scores, torch.arange(sizes.shape[0])) + padded.square().mean()

    batches = [
        {"x": torch.randn(sum(sizes), WIDTH), "sizes": torch.tensor(sizes)} for sizes in lengths(parameters["parts"])
    ]
    return Model(), lambda compiled, batch: compiled(**batch), batches


PROGRAMS = {"images, Qwen2.5-VL": tower, "attention and loss per text": per_text, "poolings": pooled}


def build(compiler: Compiler, parameters: Parameters, device: str) -> Program:
    from torch._dynamo.utils import counters

    from bench.cases.training import training_program

    model, loss_of, batches = PROGRAMS[parameters["program"]](parameters)
    compiled = compiler(model.to(device))
    batches = [{name: value.to(device) for name, value in batch.items()} for batch in batches]
    return training_program(
        model, lambda batch: loss_of(compiled, batch), batches, lambda: {"graphs": counters["stats"]["unique_graphs"]}
    )


def groups(device: str, quick: bool) -> list[dict[str, Any]]:
    counts = [4] if quick else [8]
    programs = list(PROGRAMS)[2:] if quick else PROGRAMS
    return [{"program": name, "parts": count} for name, count in itertools.product(programs, counts)]


CASE = Case(
    name="sequences",
    title="Loops over the images or texts of a batch, as many and as large as each batch has",
    groups=groups,
    contenders=usual(build),
    baseline=EAGER,
    x="parts",
    expected=(
        "Unrolled, each number of parts is a graph of its own, and n small products take longer than one. As one "
        "computation, a step costs what its rows and the pairs of rows within parts cost, in one graph."
    ),
    cpu_time=True,
    notes="Six batches of other numbers and sizes of parts, in turns.",
)
