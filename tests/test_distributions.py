"""What the source distribution and the wheel hold: they are built from this tree, without a network."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
REPOSITORY = "https://github.com/fxpasses/fxpasses"
FILES = "https://raw.githubusercontent.com/fxpasses/fxpasses"
LINK = r"\]\(([^)\s]+)\)"


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    for package in ("hatchling", "hatch_fancy_pypi_readme"):
        pytest.importorskip(package, reason="builds the distributions")
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def files(*arguments: str) -> set[str]:
    """The tree's files that git lists."""
    command = ["git", "ls-files", *arguments]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        pytest.skip("needs a git repository")
    return {name for name in listed.stdout.splitlines() if (ROOT / name).exists()}


def test_the_source_distribution_is_the_repository(built):
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        held = {name.split("/", 1)[1] for name in archive.getnames()}
    assert files() <= held <= files() | files("--others", "--exclude-standard") | {"PKG-INFO"}


def test_the_wheel_is_the_package(built):
    with zipfile.ZipFile(next(built.glob("*.whl"))) as archive:
        held = set(archive.namelist())
    package = {name for name in held if ".dist-info/" not in name}
    assert package == files("--cached", "--others", "--exclude-standard", "fxpasses")


def test_links_of_the_description_lead_to_the_repository(built):
    with zipfile.ZipFile(next(built.glob("*.whl"))) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = archive.read(name).decode()
    readme = (ROOT / "README.md").read_text()
    fields, description = metadata.split("\n\n", 1)
    assert "Description-Content-Type: text/markdown" in fields and f"Project-URL: Homepage, {REPOSITORY}" in fields
    links = re.findall(LINK, description)
    assert len(links) == len(re.findall(LINK, readme)) > 0
    paths = [re.sub(rf"^({REPOSITORY}/blob|{FILES})/main/", "", link).split("#")[0] for link in links]
    assert [path for path in paths if not (ROOT / path).is_file()] == []
    assert f"]({FILES}/main/bench/results/overview.svg)" in description  # a page would not be shown as a picture
    assert re.sub(rf"\]\(({REPOSITORY}/blob|{FILES})/main/", "](", description).strip() == readme.strip()
