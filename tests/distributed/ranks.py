"""Run a function on several processes of one process group, with a wall limit: a hang fails, and says where.

The processes are forked from a server that has imported torch and this package once: each starts in no time.
"""

from __future__ import annotations

import datetime
import faulthandler
import multiprocessing
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing
from torch.multiprocessing.spawn import ProcessException

from tests import rounding

# The last ones are what AOTAutograd's partitioner imports when it is first called.
_PRELOADED = ["torch._dynamo", "torch.distributed", "fxpasses.compiler.backend", "tests.support"]
_PRELOADED += ["torch._inductor.pattern_matcher", "torch._inductor.codecache", "networkx"]
_GRACE = 1.0  # seconds between the stack of a rank that hangs, and its end


class RankFailed(RuntimeError):
    """A rank raised, or its process died."""


def run_on_ranks(
    function: Callable[..., Any], *, world: int = 2, args: Sequence[Any] = (), seconds: float = 120
) -> Any:
    """`function(rank, *args)` on `world` processes of a gloo group; returns what each returned, by rank.

    `function` stands at the top level of a module. What it returns is pickled by `torch.save`. Raises `RankFailed` with
    the traceback of each rank that fails, and `TimeoutError` with the stack of each rank after `seconds`. All processes
    are ended then.
    """
    multiprocessing.set_forkserver_preload(_PRELOADED)
    with tempfile.TemporaryDirectory() as folder:
        processes = torch.multiprocessing.start_processes(
            _run, (function, args, world, folder, seconds), nprocs=world, join=False, start_method="forkserver"
        )
        deadline = time.monotonic() + seconds
        try:
            while not processes.join(timeout=max(0.0, deadline - time.monotonic())):
                if time.monotonic() >= deadline:
                    stacks = "\n".join(_stack_file(folder, rank).read_text() for rank in range(world))
                    raise TimeoutError(f"{function.__name__} on {world} ranks takes over {seconds:.0f} s\n{stacks}")
        except ProcessException as failed:
            # A rank whose peer is gone fails as well, and may be found first.
            tracebacks = [file.read_text() for file in sorted(Path(folder).glob("*.error"))]
            raise RankFailed("\n".join(tracebacks) or str(failed)) from None
        finally:
            for process in processes.processes:
                process.kill()
                process.join()
        return [torch.load(Path(folder, str(rank)), weights_only=False) for rank in range(world)]


def _run(rank: int, function: Callable[..., Any], args: Sequence[Any], world: int, folder: str, seconds: float) -> None:
    with _stack_file(folder, rank).open("w") as stack:
        faulthandler.dump_traceback_later(seconds - _GRACE, file=stack)
        try:
            torch.save(_in_group(rank, function, args, world, folder, seconds), Path(folder, str(rank)))
        except Exception:
            Path(folder, f"{rank}.error").write_text(f"rank {rank}: {traceback.format_exc()}")
            raise
        faulthandler.cancel_dump_traceback_later()


def _in_group(
    rank: int, function: Callable[..., Any], args: Sequence[Any], world: int, folder: str, seconds: float
) -> Any:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if rounding.BY_SIZES:
        rounding.round_by_sizes()
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=seconds),
    )
    result = function(rank, *args)
    torch.distributed.destroy_process_group()
    return result


def _stack_file(folder: str, rank: int) -> Path:
    return Path(folder, f"{rank}.stack")
