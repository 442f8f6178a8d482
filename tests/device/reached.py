"""Which lines of device code the tests on the simulated device reach: `make device-coverage`.

    python -m coverage run --data-file=DATA --source=fxpasses -m pytest tests/device
    python -m coverage run --data-file=DATA --source=fxpasses --append -m pytest tests/runtime
    python -m tests.device.reached DATA

The second run is of tests on the CPU: most of the runtime is the same for both.

Device code is what moves tensors and metadata in `fxpasses/runtime`, and elsewhere the branches that ask for
a device. Prints the lines that were not reached, and the share of those that were.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from coverage import Coverage

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "fxpasses"
RUNTIME = [
    *sorted((PACKAGE / "runtime").glob("*.py")), *sorted((PACKAGE / "runtime" / "offload").glob("*.py"))
]  # fmt: skip
OTHER_DEVICES = {"cuda_extras.py", "grouped_kernels.py"}  # what CUDA alone has
_ASKS = re.compile(r"device\.type|\.is_cuda|on_device|on_accelerator|on_host|accelerator\.|_is_remote|is_cpu")


def device_branches(path: Path) -> Iterator[int]:
    """The lines of branches that are taken for a device."""
    text = path.read_text()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.If) and _ASKS.search(ast.get_source_segment(text, node.test) or ""):
            for statement in (*node.body, *node.orelse):
                yield from range(statement.lineno, (statement.end_lineno or statement.lineno) + 1)


def main(data: str) -> None:
    coverage = Coverage(data_file=data)
    coverage.load()
    total = reached = 0
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.name in OTHER_DEVICES or "attention" in path.parts:
            continue
        _, statements, _, missing, _ = coverage.analysis2(str(path))
        own = set(statements) if path in RUNTIME else set(statements).intersection(device_branches(path))
        left = sorted(own.intersection(missing))
        total, reached = total + len(own), reached + len(own) - len(left)
        if left:
            print(f"{path.relative_to(ROOT)}: {', '.join(map(str, left))}")
    print(f"{reached} of {total} lines of device code are reached: {100 * reached / total:.1f} %")


if __name__ == "__main__":
    main(sys.argv[1])
