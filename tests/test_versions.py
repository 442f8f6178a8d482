"""What the changelog says of versions is what is built, tested and documented."""

from __future__ import annotations

import re
from pathlib import Path

import fxpasses
import fxpasses.data

ROOT = Path(__file__).parents[1]
POLICY = " ".join((ROOT / "CHANGELOG.md").read_text().split("## Versions")[1].split("\n## ")[0].split())


def found(pattern: str, file: str) -> list[str]:
    return re.findall(pattern, (ROOT / file).read_text(), flags=re.MULTILINE)


def test_the_supported_versions_of_torch_are_those_that_are_tested():
    [oldest] = found(r'^dependencies = \["torch>=([\d.]+)"', "pyproject.toml")
    [pinned] = found(r"^torch==(\d+\.\d+)", "constraints.txt")
    [first, last] = found(r"^COMPAT_TORCH \?= (\d+\.\d+)\S* (\d+\.\d+)\S*$", "Makefile")[0]
    assert oldest == first
    assert f"torch {first} to {last}: tests run on {pinned} (`make test`), and on {first} and {last} (" in POLICY


def test_the_version_is_a_heading():
    assert fxpasses.__version__ in found(r"^## (\S+)$", "CHANGELOG.md")


def test_every_public_name_is_in_the_documentation():
    documented = set(found(r"^::: fxpasses\.(\S+)$", "docs/api.md"))
    modules = {"__version__", "inspect"}
    assert documented >= {*fxpasses.__all__, *(f"data.{name}" for name in fxpasses.data.__all__)} - modules
