"""What was compiled goes to a file and comes back; a file that does not fit is refused, with a reason."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor import config as inductor_config

import fxpasses
from fxpasses.compiler import cache_files, kernel_libraries


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Inductor's cache, with one library."""
    folder = tmp_path / "cache"
    library = folder / "ab" / "kernel.so"
    library.parent.mkdir(parents=True)
    library.write_bytes(b"library")
    monkeypatch.setattr(cache_files, "_folder", lambda: folder)
    monkeypatch.setattr(cache_files, "_libraries", lambda: iter([library]))
    return folder


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What PyTorch is given; it has artifacts to save."""
    found: list[bytes] = []
    monkeypatch.setattr(torch.compiler, "save_cache_artifacts", lambda: (b"artifacts", None))
    monkeypatch.setattr(torch.compiler, "load_cache_artifacts", lambda given: [found.append(given)])
    return found


def test_artifacts_and_libraries_come_back(folder: Path, loaded: list[bytes], tmp_path: Path) -> None:
    fxpasses.save_caches(tmp_path / "file.zip")
    library = folder / "ab" / "kernel.so"
    library.unlink()
    assert fxpasses.load_caches(tmp_path / "file.zip")
    assert loaded == [b"artifacts"]
    assert library.read_bytes() == b"library" and os.access(library, os.X_OK)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "file.zip"]


@pytest.mark.parametrize("key", ["version of torch", "version of fxpasses", "version of Python", "system", "processor"])
def test_a_file_of_another_kind_is_refused(
    key: str, folder: Path, loaded: list[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    identity = cache_files._identity()
    fxpasses.save_caches(tmp_path / "file.zip")
    monkeypatch.setattr(cache_files, "_identity", lambda: identity | {key: "another one"})
    with pytest.warns(UserWarning, match=f"is not used: it is of another {key}: .*, and this is another one"):
        assert not fxpasses.load_caches(tmp_path / "file.zip")
    assert not loaded


def test_a_damaged_file_is_refused(folder: Path, loaded: list[bytes], tmp_path: Path) -> None:
    path = tmp_path / "file.zip"
    fxpasses.save_caches(path)
    whole = path.read_bytes()
    for damaged in (b"", whole[: len(whole) // 2], whole.replace(b"artifacts", b"artefacts", 1)):
        path.write_bytes(damaged)
        with pytest.warns(UserWarning, match="it is damaged, or no file of"):
            assert not fxpasses.load_caches(path)
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("identity.json", json.dumps(cache_files._identity()))
    with pytest.warns(UserWarning, match="it is damaged, or no file of"):
        assert not fxpasses.load_caches(path)
    assert not loaded


def test_any_damage_is_refused(folder: Path, loaded: list[bytes], tmp_path: Path) -> None:
    path = tmp_path / "file.zip"
    fxpasses.save_caches(path)
    whole = path.read_bytes()
    refused = 0
    for at in range(0, len(whole), 3):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            refused += not fxpasses.load_caches(path)
    assert refused > 0  # there are bytes on which nothing depends
    assert set(loaded) <= {b"artifacts"}


def test_others_may_read_a_file_and_a_link_is_followed(folder: Path, loaded: list[bytes], tmp_path: Path) -> None:
    real, link = tmp_path / "file.zip", tmp_path / "link.zip"
    link.symlink_to(real)
    before = os.umask(0o022)
    try:
        fxpasses.save_caches(link)
    finally:
        os.umask(before)
    assert link.is_symlink() and real.stat().st_mode & 0o777 == 0o644


def test_a_file_names_no_path_outside_the_cache(folder: Path, loaded: list[bytes], tmp_path: Path) -> None:
    path = tmp_path / "file.zip"
    fxpasses.save_caches(path)
    with zipfile.ZipFile(path, "a") as file:
        file.writestr("libraries/../../outside.so", b"")
    with pytest.warns(UserWarning, match="it is damaged"):
        assert not fxpasses.load_caches(path)
    assert not (tmp_path / "outside.so").exists() and not loaded


def test_errors_of_the_caller(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError, match=r"missing\.zip"):
        fxpasses.load_caches(tmp_path / "missing.zip")
    monkeypatch.setattr(torch.compiler, "save_cache_artifacts", lambda: None)
    with pytest.raises(RuntimeError, match="after the first training steps"):
        fxpasses.save_caches(tmp_path / "file.zip")
    with inductor_config.patch(force_disable_caches=True), pytest.raises(RuntimeError, match="are switched off"):
        fxpasses.save_caches(tmp_path / "file.zip")
    monkeypatch.setattr(torch.compiler, "save_cache_artifacts", lambda: (b"", None))
    with pytest.raises(FileNotFoundError, match=r"there is no folder .*missing, in which file\.zip"):
        fxpasses.save_caches(tmp_path / "missing" / "file.zip")


def test_a_full_disk_leaves_the_earlier_file(
    folder: Path, loaded: list[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file.zip"
    path.write_bytes(b"earlier")

    def full(*arguments: Any, **named: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(zipfile.ZipFile, "write", full)
    with pytest.raises(OSError, match="No space left"):
        fxpasses.save_caches(path)
    assert path.read_bytes() == b"earlier"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["cache", "file.zip"]


_PROGRAM = """
import sys
import torch
from torch._dynamo.utils import counters
import fxpasses

path, *sizes = sys.argv[1:]
is_first = len(sizes) == 1
if not is_first:
    assert fxpasses.load_caches(path)
for size in sizes:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, int(size)), torch.nn.GELU(), torch.nn.Linear(int(size), 8))
    x = torch.randn(4, 8)
    expected = torch.autograd.grad(model(x).square().sum(), model.parameters())
    program = torch.compile(model, backend="fastpack", options={"fastpack.strict": True}, dynamic=False)
    actual = torch.autograd.grad(program(x).square().sum(), model.parameters())
    torch.testing.assert_close(actual, expected)
    print(counters["inductor"]["fxgraph_cache_miss"], counters["aot_autograd"]["autograd_cache_hit"])
if is_first:
    fxpasses.save_caches(path)
"""


@pytest.mark.slow
def test_a_process_with_an_empty_cache_compiles_nothing_but_other_programs(tmp_path: Path) -> None:
    path = tmp_path / "file.zip"

    def run(name: str, *sizes: str) -> tuple[list[str], set[str]]:
        folder = tmp_path / name
        environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(folder)}
        arguments = [sys.executable, "-c", _PROGRAM, str(path), *sizes]
        done = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines(), {file.relative_to(folder).as_posix() for file in folder.rglob("*.so")}

    assert run("first", "16")[0] == ["2 0"]
    with zipfile.ZipFile(path) as file:
        names = {name.removeprefix("libraries/") for name in file.namelist() if name.startswith("libraries/")}
    kept = {name for name in names if name.endswith(".so")}
    assert all(name.startswith(kernel_libraries.FOLDER) for name in names - kept) and names > kept
    found, libraries = run("second", "16", "24")
    assert found == ["0 1", "2 1"]
    made = 2  # of the other program, one for forward and one for backward
    assert libraries > kept and len(libraries) == len(kept) + made
