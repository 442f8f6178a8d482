"""Runs the zoo: each architecture in a process with a time limit, several at a time. `make zoo` calls it.

Results are JSON lines in a file. What ran according to it is not run again, unless the file is removed.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import multiprocessing
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.zoo import results, worker
from tests.zoo.architectures import MAPPINGS, Architecture, architectures
from tests.zoo.exceptions import LEFT_OUT

ROOT = Path(__file__).parents[2]
LIMIT_S = 300.0


# Forked from a process that has imported torch and transformers, and has run nothing.
_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(["tests.zoo.preloaded"])


def run_one(
    architecture: Architecture,
    limit_s: float = LIMIT_S,
    every: bool = False,
    contenders: Sequence[str] = worker.CONTENDERS,
) -> list[dict[str, Any]]:
    """The results of an architecture's process; of one that is killed, those before, and one that says so."""
    if reason := LEFT_OUT.get(architecture.key, LEFT_OUT.get(architecture.model_type)):
        return [{"architecture": architecture.key, "left_out": reason}]
    receiving, sending = _PROCESSES.Pipe(duplex=False)
    process = _PROCESSES.Process(target=worker.serve, args=(sending, architecture, every, contenders), daemon=True)
    process.start()
    sending.close()
    lines: list[dict[str, Any]] = []
    deadline = time.monotonic() + limit_s
    ended = f"took more than {limit_s:.0f} s"
    try:
        while receiving.poll(max(0.0, deadline - time.monotonic())):
            result = receiving.recv()
            if result is None:
                ended = ""
                process.join(5)
                break
            lines.append(result)
    except EOFError:
        process.join(5)
        ended = f"ended with exit code {process.exitcode}"
    process.kill()
    process.join()
    if ended:
        lines.append({"ended": ended})
    return [{"architecture": architecture.key, **line} for line in lines]


def chosen(names: Sequence[str]) -> list[Architecture]:
    """Those of a task, a type of model, or a key; all, if none is named."""
    known = architectures()
    for name in names:
        if not any(name in (each.task, each.model_type, each.key) for each in known):
            raise SystemExit(f"no task, type of model or architecture is called {name!r}; tasks: {', '.join(MAPPINGS)}")
    return [each for each in known if not names or {each.task, each.model_type, each.key} & set(names)]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.zoo.run", description=__doc__)
    parser.add_argument("names", nargs="*", help="tasks, types of models or TASK/TYPE; default: all")
    parser.add_argument("--out", type=Path, default=results.FILE, help=f"default: {results.FILE.relative_to(ROOT)}")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time; default: 2")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help=f"seconds each; default: {LIMIT_S:.0f}")
    parser.add_argument("--every", action="store_true", help="all combinations of layouts, checkpoints and experts")
    parser.add_argument("--eager", action="store_true", help="eager mode alone: which can be built and run")
    parser.add_argument("--missing", action="store_true", help="leave out what is published for these versions")
    parser.add_argument("--again", action="store_true", help="run those that are in the file as well")
    options = parser.parse_args()
    # Before the process that others are forked from starts.
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}

    from tqdm import tqdm

    done = set() if options.again else results.forget_not_run(options.out)
    if options.missing:
        done |= results.ran(results.read(results.PUBLISHED))
    todo = [each for each in chosen(options.names) if each.key not in done]
    versions = results.versions()
    contenders = worker.CONTENDERS[:1] if options.eager else worker.CONTENDERS
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with (
        concurrent.futures.ThreadPoolExecutor(options.jobs) as pool,
        tqdm(total=len(todo), unit="model") as bar,
        options.out.open("a") as file,
    ):
        futures = {pool.submit(run_one, each, options.limit, options.every, contenders): each for each in todo}
        for future in concurrent.futures.as_completed(futures):
            file.writelines(json.dumps({**line, **versions}) + "\n" for line in future.result())
            file.flush()
            bar.set_postfix_str(futures[future].key)
            bar.update()


if __name__ == "__main__":
    main()
