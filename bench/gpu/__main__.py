"""The command line: `python -m bench.gpu`, which `make gpu` runs."""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import torch

from bench import results
from bench.gpu.pieces import NAMES, PIECES
from bench.gpu.schedule import run_by
from bench.peer import ROOT

NEEDED = ("transformers", "pytest", "matplotlib", "tabulate")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu",
        description="Test and measure what needs a CUDA device, the most valuable first, by a deadline.",
        epilog=f"pieces, in their order: {', '.join(NAMES)}",
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: try it without a device")
    parser.add_argument("--minutes", type=float, default=10.0, help="for everything (default %(default)g)")
    parser.add_argument("--only", metavar="PIECE,…", default="", help="only these pieces")
    parser.add_argument(
        "--resume", action="store_true", help="go on with what there was no time for, at the same commit and machine"
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="for results (default bench/results, on a CPU bench/scratch/gpu)"
    )
    given = parser.parse_args(arguments)
    if not 0 < given.minutes < float("inf"):
        parser.error(f"--minutes is {given.minutes:g}; it takes a number above 0")
    given.only = [name.strip() for name in given.only.split(",") if name.strip()]
    if unknown := [name for name in given.only if name not in NAMES]:
        parser.error(f"--only names {unknown[0]!r}; pieces: {', '.join(NAMES)}")
    given.out = given.out or (results.FOLDER if given.device == "cuda" else ROOT / "bench" / "scratch" / "gpu")
    return given


def what_is_missing(device: str) -> str:
    """Why this Python cannot run the pieces on the device, and what to do; "" if it can."""
    if device == "cuda" and not torch.cuda.is_available():
        if torch.version.cuda is None:
            return (
                f"torch {torch.__version__} is built without CUDA. Install a build for CUDA, from "
                "https://download.pytorch.org/whl say, and give its Python: make gpu GPU_PYTHON=/path/to/python"
            )
        if not shutil.which("nvidia-smi"):
            return (
                "there is no NVIDIA driver on this machine: nvidia-smi is not there. Run it where there is a card, or "
                "try it on the CPU: make gpu DEVICE=cpu"
            )
        return (
            f"torch {torch.__version__}, for CUDA {torch.version.cuda}, finds no device. The driver may be too old for "
            f"this CUDA (nvidia-smi shows its own), or CUDA_VISIBLE_DEVICES may hide the card"
        )
    if absent := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        return f"{sys.executable} lacks {', '.join(absent)}: pip install {' '.join(absent)}"
    if "fastpack" not in {point.name for point in metadata.entry_points(group="torch_dynamo_backends")}:
        return f"fxpasses is not installed for {sys.executable}: pip install --no-deps -e ."
    return ""


def main(arguments: Sequence[str] | None = None) -> int:
    began = time.monotonic()
    given = parse(arguments)
    if why := what_is_missing(given.device):
        print(f"error: {why}", file=sys.stderr)
        return 2
    from bench.gpu.running import Run  # it needs matplotlib

    def say(text: str) -> None:
        print(f"{time.monotonic() - began:5.0f} s  {text}", file=sys.stderr, flush=True)

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: the page is written, and processes end
    run = Run(given.out, given.device, given.minutes, given.resume, say)
    pieces = [run.sized(piece) for piece in PIECES if not given.only or piece.name in given.only]
    try:
        run_by(began + 60 * given.minutes, pieces, run.work, run.ended)
    except KeyboardInterrupt:
        print("interrupted; what was measured is kept, and --resume goes on", file=sys.stderr)
        return 130
    finally:
        if run.page_file.exists():
            print(run.page_file)
    return 0 if run.all_is_well() else 1


if __name__ == "__main__":
    sys.exit(main())
