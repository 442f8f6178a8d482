"""Which lines of device code the tests reach: `make device-coverage`, or for some of its parts anew

    python -m tests.device.reached [PART ...]

Each part is a run of tests in a process of its own, whose measurement stays in `build/device-coverage`: after a stop,
name the parts that are missing. Prints the lines that no test reaches and the share of those that one does; fails under
`REQUIRED` percent, where a test fails, and where a test reaches a line that is said to need CUDA (`device_code.py`).
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from coverage import Coverage

from tests.device.device_code import PACKAGE, ROOT, lines_of, only_cuda

REQUIRED = 95.0  # percent
DATA = ROOT / "build" / "device-coverage"

# The longest first. The tests of the runtime and of passes run on the CPU: most of the runtime is the same for both.
PARTS = {
    "offload": ["tests/device/test_offload_*.py"],
    "runtime": ["tests/runtime", "--ignore=tests/experts/test_grouped_triton.py"],
    "races": ["tests/device/test_races_*.py"],
    "triton": ["tests/experts/test_grouped_triton.py"],
    "passes": [
        "tests/metadata/test_hoist_metadata.py", "tests/metadata/test_prologue_on_device.py",
        "tests/inspect/test_capturability.py", "tests/test_data.py",
    ],
    "metadata": ["tests/device/test_metadata_*.py"],
}  # fmt: skip


def run(part: str) -> str:
    """The failure in words, "" where all tests passed."""
    for old in DATA.glob(f"{part}.*"):
        old.unlink()
    measured = [sys.executable, "-m", "coverage", "run", f"--data-file={DATA / part}", f"--source={PACKAGE}", "-m"]
    tests = ["pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider", *_arguments(part)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    started = time.monotonic()
    found = subprocess.run([*measured, *tests], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    last = [f"exit code {found.returncode}", *found.stdout.strip().splitlines()][-1]
    print(f"{part}: {last}, {time.monotonic() - started:.0f} s in all", flush=True)
    return "" if found.returncode == 0 else found.stdout + found.stderr


def _arguments(part: str) -> list[str]:
    return [
        str(path) for pattern in PARTS[part] for path in (sorted(ROOT.glob(pattern)) if "*" in pattern else [pattern])
    ]


def report() -> bool:
    """Prints what is not reached; returns whether enough is."""
    coverage = Coverage(data_file=None)
    data = {part: [str(path) for path in DATA.glob(f"{part}.*")] for part in PARTS}
    for part in PARTS:
        if not data[part]:
            print(f"{part}: not measured yet")
    coverage.combine([path for paths in data.values() for path in paths], keep=True)
    total = reached = 0
    wrong = []
    for path in sorted(PACKAGE.rglob("*.py")):
        _, statements, _, missing, _ = coverage.analysis2(str(path))
        own = lines_of(path).intersection(statements)
        elsewhere = only_cuda(path)
        own -= elsewhere
        wrong += [f"{path.relative_to(ROOT)}:{line}" for line in sorted(elsewhere.difference(missing))]
        left = sorted(own.intersection(missing))
        total, reached = total + len(own), reached + len(own) - len(left)
        if left:
            print(f"{path.relative_to(ROOT)}: {', '.join(map(str, left))}")
    share = 100 * reached / total
    print(f"{reached} of {total} lines of device code are reached: {share:.1f} %, and {REQUIRED} % are required")
    for place in wrong:
        print(f"{place} is said to run on CUDA devices alone, and a test runs it")
    return share >= REQUIRED and not wrong


def main(parts: list[str]) -> int:
    unknown = set(parts).difference(PARTS)
    if unknown:
        raise SystemExit(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    DATA.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as processes:
        failures = [text for text in processes.map(run, parts or PARTS) if text]
    for text in failures:
        print(text)
    return int(not report() or bool(failures))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
