"""What the changelog says of versions is what is built, tested and documented."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest

import fxpasses
import fxpasses.data
from fxpasses.base import once, tested_torch

ROOT = Path(__file__).parents[1]
POLICY = " ".join((ROOT / "CHANGELOG.md").read_text().split("## Versions")[1].split("\n## ")[0].split())


def found(pattern: str, file: str) -> list[str]:
    return re.findall(pattern, (ROOT / file).read_text(), flags=re.MULTILINE)


def test_the_supported_versions_of_torch_are_those_that_are_tested():
    [oldest] = found(r'^dependencies = \["torch>=([\d.]+)"', "pyproject.toml")
    [pinned] = found(r"^torch==(\d+\.\d+)", "constraints.txt")
    [first, last] = found(r"^COMPAT_TORCH \?= (\d+\.\d+)\S* (\d+\.\d+)\S*$", "Makefile")[0]
    assert oldest == first
    assert [".".join(map(str, each)) for each in (tested_torch.OLDEST, tested_torch.NEWEST)] == [first, last]
    assert f"torch {first} to {last}: tests run on {pinned} (`make test`), and on {first} and {last} (" in POLICY


@pytest.mark.parametrize(
    ("version", "age"),
    [("2.10.1", "older"), ("2.16.0.dev20261101+cpu", "newer"), ("3.0", "newer"), ("2.13.0+cpu", ""), ("git", "")],
)
def test_another_torch_is_said_once(version, age, monkeypatch):
    monkeypatch.setattr(once, "_given", set())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            tested_torch.warn_if_untested(version)
    assert [f"torch {version} is {age} than" in str(warning.message) for warning in caught] == [True] * bool(age)


def test_the_version_is_a_heading():
    assert fxpasses.__version__ in found(r"^## (\S+)$", "CHANGELOG.md")


def test_every_public_name_is_in_the_documentation():
    documented = set(found(r"^::: fxpasses\.(\S+)$", "docs/api.md"))
    modules = {"__version__", "inspect"}
    assert documented >= {*fxpasses.__all__, *(f"data.{name}" for name in fxpasses.data.__all__)} - modules
