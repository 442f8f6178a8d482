"""The results of a case: one JSON file with the machine, versions and commit, and an entry for each measurement.

    {"case": ..., "machine": {...}, ..., "entries": [{"parameters": {...}, "contender": ..., "outcome": ..., ...}]}

`outcome` is "measured", or why there are no figures: "wrong", "failed", "too slow", "unavailable", "no time"; `why` has
the words.
Keys end in their unit: `_s` seconds, `_bytes` bytes; ratios and counts have none.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import statistics
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from bench.case import Parameters
from bench.peer import ROOT

Entry = dict[str, Any]
NO_TIME = "no time"  # the run had a deadline, and the contender was not ready
FOLDER = ROOT / "bench" / "results"
# Figures of one file are compared with each other, so all of these must be the same for them.
IDENTITY = ("case", "device", "quick", "threads", "machine", "versions", "commit")


def new(case: str, device: str, quick: bool, threads: int, processes: int = 1) -> dict[str, Any]:
    """processes: how many each contender has, one after the other."""
    versions = {name: metadata.version(name) for name in ("torch", "transformers")}
    import fxpasses

    return {
        "case": case,
        "device": device,
        "quick": quick,
        "threads": threads,
        "processes": processes,
        "machine": machine(device),
        "versions": {"python": platform.python_version(), **versions, "fxpasses": fxpasses.__version__},
        "commit": commit(),
        "started": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "entries": [],
    }


def machine(device: str) -> dict[str, Any]:
    """Processor, cores, memory, and the accelerator if one is measured; no host or user name."""
    found: dict[str, Any] = {"processor": processor(), "cores": os.cpu_count(), "system": platform.system()}
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        found["memory_bytes"] = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if device == "cuda":
        import torch

        found["accelerator"] = torch.cuda.get_device_name()
        found["accelerator_bytes"] = torch.cuda.get_device_properties(0).total_memory
        found["cuda"] = torch.version.cuda
        found["driver"] = driver()
    return found


def driver() -> str:
    """The version of NVIDIA's driver; "unknown" without `nvidia-smi`."""
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        lines = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=30).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return lines[0] if lines else "unknown"


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    named = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())


def commit() -> str:
    """The commit that is checked out, with a "+" where Python files differ from it; "unknown" outside a checkout."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + "+" * bool(git("status", "--porcelain", "--", "*.py"))
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def path(folder: Path, case: str, device: str) -> Path:
    """The file of a case and device: results of CPU and CUDA are files side by side."""
    return folder / f"{case.rsplit('.', 1)[-1]}.{device}.json"


def read(file: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(file.read_text())
    return loaded


def write(file: Path, results: Mapping[str, Any]) -> None:
    """Write the file atomically: an interrupted run leaves the previous file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".part")
    part.write_text(json.dumps(results, indent=1) + "\n")
    part.replace(file)


def begin(file: Path, fresh: dict[str, Any], resume: bool) -> tuple[dict[str, Any], str]:
    """The results to add to, and why earlier ones were put aside ("" if none were, or none were requested).

    What there was no time for is not among them, so that it is measured now.
    """
    if not resume or not file.exists():
        return fresh, ""
    earlier = read(file)
    if other := [key for key in IDENTITY if earlier.get(key) != fresh[key]]:
        return fresh, f"of another {', '.join(other)}"
    return earlier | {"entries": [entry for entry in earlier["entries"] if entry["outcome"] != NO_TIME]}, ""


def find(entries: Iterable[Mapping[str, Any]], parameters: Parameters, contender: str) -> Mapping[str, Any] | None:
    wanted = (dict(parameters), contender)
    return next((entry for entry in entries if (entry["parameters"], entry["contender"]) == wanted), None)


def with_figures(entries: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The measured entries whose contender gave figures of its own."""
    return [entry for entry in entries if entry["outcome"] == "measured" and entry.get("figures")]


def spread(samples: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile."""
    if len(samples) < 2:
        return samples[0], samples[0], samples[0]
    lower, middle, upper = statistics.quantiles(samples, n=4, method="inclusive")
    return lower, middle, upper
