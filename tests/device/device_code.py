"""What counts as device code, and which of it needs a real device.

Device code is what moves tensors and metadata in `runtime`, and in folders of that name of some features, and elsewhere
the branches that ask for a device.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "fxpasses"
WHOLE = (
    "runtime/*.py",
    *(f"{feature}/runtime/*.py" for feature in ("metadata", "experts", "offload")),
    "attention/runtime/cuda.py",
)
_ASKS = re.compile(
    r"\.device\b|device\.type|\.is_cuda|on_device|on_accelerator|on_host|accelerator\.|_is_remote|is_cpu|cuda_extras\."
    r"|reads_offsets|[\"'](cpu|cuda)[\"']"
)

# Lines that no simulated device can run, and why. One that a test does reach is an error.
ONLY_CUDA: dict[str, dict[str, str]] = {
    "runtime/cuda_extras.py": {
        "torch.cuda.cudart().cudaHostRegister(": "calls CUDA's driver",
        "torch.cuda.cudart().cudaHostUnregister(": "calls CUDA's driver",
    },
    "attention/runtime/operators.py": {
        "return cuda.plan_of(mask)": "a mask on a CUDA device; `cuda.plan_of` itself is tested on the CPU",
    },
    "offload/saved.py": {
        "return Reason.REPLAYED, 'mode=\"reduce-overhead\", or another that uses CUDA graphs'": (
            "Inductor records CUDA graphs on CUDA devices alone"
        ),
    },
}


def lines_of(path: Path) -> set[int]:
    """The lines of device code in a file of the package."""
    text = path.read_text()
    tree = ast.parse(text)
    if any(path in PACKAGE.glob(pattern) for pattern in WHOLE):
        return set(range(1, len(text.splitlines()) + 1))
    return set(_branches(tree, text))


def only_cuda(path: Path) -> set[int]:
    """The lines of a file that `ONLY_CUDA` names by a part; raises `ValueError` unless each part is in one line."""
    name, lines = str(path.relative_to(PACKAGE)), path.read_text().splitlines()
    found: set[int] = set()
    for part in ONLY_CUDA.get(name, {}):
        numbers = [number for number, line in enumerate(lines, 1) if part in line]
        if len(numbers) != 1:
            raise ValueError(f"{name} has {len(numbers)} lines with {part!r}, which should be one")
        found.update(numbers)
    return found


def _branches(tree: ast.AST, text: str) -> Iterator[int]:
    """The lines of both branches of each question about a device, and what follows where one for the CPU ends."""
    for node in ast.walk(tree):
        for block in (getattr(node, name, None) for name in ("body", "orelse", "finalbody")):
            for number, statement in enumerate(block if isinstance(block, list) else ()):
                if isinstance(statement, ast.If) and _ASKS.search(ast.get_source_segment(text, statement.test) or ""):
                    following = block[number + 1 :] if _leaves_without_a_device(statement) else []
                    for part in (*statement.body, *statement.orelse, *following):
                        yield from _lines(part)


def _leaves_without_a_device(statement: ast.If) -> bool:
    asks = ast.unparse(statement.test)
    has_none = asks.startswith("not torch.accelerator.") or re.fullmatch(r"[\w.()]+ == 'cpu'", asks)
    return bool(has_none) and isinstance(statement.body[-1], (ast.Return, ast.Raise, ast.Continue, ast.Break))


def _lines(statement: ast.stmt) -> range:
    return range(statement.lineno, (statement.end_lineno or statement.lineno) + 1)
