"""Another rank of a contender: a process that takes a step whenever the first rank takes one.

ranks = SecondRank(build_arguments)       in the first rank: starts the process, and joins its group
model = ranks.wrapped(model)              DistributedDataParallel
ranks.tell(STEP)                          before each step
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

STEP, SAVE = 1, 2


class SecondRank:
    """The first rank's side. steps_of: a function of a module, given `arguments`, that returns what to do when told."""

    def __init__(self, steps_of: Callable[..., Callable[[int], None]], arguments: tuple[Any, ...]) -> None:
        place = Path(tempfile.mkdtemp()) / "ranks"
        given = pickle.dumps((str(place), steps_of, arguments)).hex()
        self.process = subprocess.Popen([sys.executable, "-m", "bench.second_rank", given], stdout=sys.stderr)
        join(0, str(place))

    def tell(self, what: int) -> None:
        """Have the other rank do the same now."""
        dist.broadcast(torch.tensor(what), 0)


def join(rank: int, place: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{place}", rank=rank, world_size=2)


def wrapped(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


def _main() -> None:
    place, steps_of, arguments = pickle.loads(bytes.fromhex(sys.argv[1]))
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    join(1, place)
    step = steps_of(*arguments)
    while True:
        what = torch.tensor(0)
        dist.broadcast(what, 0)
        step(int(what))


if __name__ == "__main__":
    _main()
