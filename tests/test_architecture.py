"""ARCHITECTURE.md names what is there."""

from __future__ import annotations

import re
from pathlib import Path

from tests.test_imports import BASE, MAY_IMPORT

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "ARCHITECTURE.md").read_text()


def test_files_exist() -> None:
    names = set(re.findall(r"`([\w/]+\.(?:py|md)|[a-z]+/)`", TEXT))
    missing = [name for name in names if not any((folder / name).exists() for folder in (ROOT, ROOT / "fxpasses"))]
    assert len(names) > 15 and not [name for name in missing if "NAME" not in name]


def test_the_import_rules_are_those_of_the_test() -> None:
    rows = dict(re.findall(r"^\| `(\w+)/` \|.*\| ([^|]*) \|$", TEXT, re.M))
    for folder, allowed in MAY_IMPORT.items():
        said = set(re.findall(r"`(\w+)`", rows[folder]))
        assert said == allowed or rows[folder] == "all above" or (rows[folder] == "plain data only" and not allowed)
    assert set(re.findall(r"`(\w+)`", TEXT.split("*Plain data* are")[1].split(".\n")[0])) == BASE
