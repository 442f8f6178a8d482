"""The command line: `python -m bench list | run CASE… | report [DIR]`."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from bench import results
from bench.case import CASES, among, load, only
from bench.measuring import Settings, processes_of, run_case

EXAMPLES = """examples:
  python -m bench run --quick                       every case, reduced, in about 15 minutes on 2 cores
  python -m bench run experts --device cuda         one case at full width on a GPU
  python -m bench run packed_metadata --resume      continue after an interruption
  python -m bench report                            write bench/RESULTS.md from bench/results/*.json
"""


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description="Measure contenders side by side.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="the cases and their contenders")
    run = commands.add_parser("run", help="measure cases and write DIR/CASE.DEVICE.json")
    run.add_argument("cases", nargs="*", metavar="CASE", help="default: all")
    run.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="cuda measures at full width")
    run.add_argument("--quick", action="store_true", help="fewer and smaller groups, fewer rounds")
    run.add_argument(
        "--only", action="append", default=[], metavar="KEY=VALUE", help="only groups with this parameter value"
    )
    run.add_argument("--contender", action="append", default=[], metavar="NAME", help="only these, beside the baseline")
    run.add_argument("--resume", action="store_true", help="skip what DIR already holds for this commit")
    threads = torch.get_num_threads()
    run.add_argument("--threads", type=int, default=threads, help="threads of each contender (default %(default)s)")
    run.add_argument("--rounds", type=int, metavar="N", help="time every contender at most N times")
    run.add_argument("--processes", type=int, metavar="N", help="start every contender N times (default 1)")
    run.add_argument(
        "--limit", type=float, metavar="SECONDS", help="time for a contender to compile and see every batch"
    )
    run.add_argument(
        "--lock", type=Path, metavar="FILE", help="runs with one FILE compile side by side, and time in turns"
    )
    folder: dict[str, Any] = {
        "type": Path,
        "default": results.FOLDER,
        "metavar": "DIR",
        "help": "default bench/results",
    }
    run.add_argument("--out", **folder)
    shown = commands.add_parser("report", help="write the tables and plots of DIR's JSON")
    shown.add_argument("folder", nargs="?", **folder)
    given = parser.parse_args(arguments)
    if given.command == "run":
        unknown = [name for name in given.cases if name not in CASES and "." not in name]
        if unknown:
            parser.error(f"there is no case {unknown[0]!r}; cases: {', '.join(CASES)}")
        if wrong := next((text for text in given.only if "=" not in text), None):
            parser.error(f"--only is {wrong!r}; it takes KEY=VALUE, such as layers=8")
        for option in ("threads", "rounds", "processes"):
            if (value := getattr(given, option)) is not None and value < 1:
                parser.error(f"--{option} is {value}; it takes a number from 1")
        if given.device == "cuda" and not torch.cuda.is_available():
            parser.error("--device is cuda, but PyTorch finds no CUDA device")
    return given


def show_cases() -> None:
    for name in CASES:
        case = load(name)
        print(f"{name}: {case.title}")
        for contender in case.contenders:
            print(f"    {contender.name}")


def run(given: argparse.Namespace) -> None:
    settings = (Settings.quick if given.quick else Settings)(given.device, given.threads)
    chosen = {"limit_s": given.limit, "rounds": given.rounds, "processes": given.processes, "lock": given.lock}
    settings = dataclasses.replace(settings, **{key: value for key, value in chosen.items() if value})
    for name in given.cases or CASES:
        case = among(only(load(name), given.only), given.contender)
        fresh = results.new(case.name, given.device, given.quick, given.threads, processes_of(case, settings))
        file = results.path(given.out, case.name, given.device)
        found, why = results.begin(file, fresh, given.resume)
        if why:
            print(f"{file.name} holds results {why}: they are measured again", file=sys.stderr)
        total = len(case.groups(given.device, given.quick)) * len(case.contenders)
        with tqdm(total=total, desc=name, unit="contender") as bar:
            save = functools.partial(results.write, file, found)
            run_case(case, found, settings, save, bar.set_postfix_str, bar.update)
        for entry in found["entries"]:
            if entry["outcome"] in ("wrong", "failed"):
                who = f"{name}, {entry['contender']}, {entry['parameters']}"
                print(f"{who}: {entry['outcome']}: {entry['why']}", file=sys.stderr)


def main(arguments: Sequence[str] | None = None) -> int:
    given = parse(arguments)
    try:
        if given.command == "list":
            show_cases()
            return 0
        if given.command == "report":
            from bench import report  # it needs matplotlib

            print(report.write(given.folder))
            return 0
        run(given)
        return 0
    except KeyboardInterrupt:
        print("interrupted; what was measured is kept, and --resume goes on", file=sys.stderr)
        return 130
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
