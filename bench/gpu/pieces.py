"""What is run on a device, the most valuable first: the tests, and of each case a group or two."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.case import Case, Parameters, among, load, only
from bench.gpu.schedule import Piece

TESTS = "tests"
WAVES = 3  # with the contenders that compile in as many turns, a group is worth measuring
TRIED = 2  # contenders beside the baseline, on a CPU


@dataclass(frozen=True)
class Measured(Piece):
    """A case. only: KEY=VALUE of its groups on CUDA. sizes: parameters that replace a group's, on CUDA.
    contenders: beside the baseline; all of them, if empty. wave_s: for contenders that compile side by side, and to
    time them."""

    only: Sequence[str] = ()
    sizes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    contenders: Sequence[str] = ()
    wave_s: float = 80.0

    def sized(self, device: str, at_once: int) -> Piece:
        """The piece with the seconds that it needs, where so many contenders compile at once."""
        case = self.case(device)
        waves = math.ceil(len(case.contenders) / at_once)
        enough = min(WAVES, waves) * self.wave_s * len(case.groups(device, False))
        return dataclasses.replace(self, least_s=self.wave_s / 2, enough_s=enough)

    def case(self, device: str) -> Case:
        """The case with its contenders and groups of this piece: on a CPU those of a quick run, and few contenders."""
        found = among(load(self.name), self.contenders)
        quick = device != "cuda"
        if not quick:
            found = only(found, self.only)
        groups: list[Parameters] = []
        for group in found.groups(device, quick):
            group = dict(group) | ({} if quick else dict(self.sizes))
            if group not in groups:  # `sizes` may make two the same
                groups.append(group)
        # The baseline is first in any case; where time is short, ours and one of the others are worth most.
        ours = [contender for contender in found.contenders if contender.ours]
        others = [each for each in found.contenders if not each.ours and each.name != found.baseline]
        contenders = [*ours[:1], *others[:1], *ours[1:], *others[1:]]
        if quick:
            contenders = [each for each in contenders if not each.unavailable(groups[0], device)][:TRIED]
        contenders = [found.contender(found.baseline), *contenders]
        return dataclasses.replace(found, contenders=contenders, groups=lambda device, quick: groups)


PIECES: tuple[Piece, ...] = (
    Piece(TESTS, share=6, least_s=20, enough_s=120),
    Measured("packed_metadata", share=2, only=("model=llama", "layers=4")),
    Measured(
        "experts",
        share=4,
        only=("experts=8", "loop=where"),
        sizes={"experts": 16, "top": 4},
        contenders=("Inductor, both flags", "HF grouped_mm", "by hand, Inductor", "fastpack"),
    ),
    Measured(
        "offload",
        share=3,
        sizes={"layers": 8},
        contenders=(
            "eager, save_on_cpu",
            "Inductor",
            "Inductor, PyTorch's offloading",
            "fastpack",
            "fastpack, to host",
            "fastpack, to host, 1 buffer",
        ),
    ),
    Measured("flash_path", share=2, only=("model=llama", "layers=4", "checkpointed=False")),
    Measured(
        "packed_attention",
        share=2,
        only=("mask=documents", "tokens=8192"),
        contenders=("Inductor", "eager, flash path", "fastpack, dense", "fastpack"),
    ),
    Measured("cuda_graphs", share=2, only=("layers=8",)),
    Measured(
        "loss_head",
        share=2,
        only=("loss=plain", "tokens=4096", "hidden=2048"),
        contenders=("Inductor", "fastpack", "fastpack, chunks", "Liger kernel", "Inductor, auto_chunker"),
    ),
    Measured(
        "live_rows",
        share=2,
        only=("model=Llama", "dead=padding and prompts", "tokens=384"),
        contenders=("Inductor", "fastpack", "fastpack, live rows", "by hand, Inductor", "Liger kernel"),
    ),
    Measured("grouped_products", share=1, only=("experts=64",), wave_s=45),
    Measured("offload_sweep", share=1, only=("products=4",), wave_s=50),
)
NAMES = tuple(piece.name for piece in PIECES)
