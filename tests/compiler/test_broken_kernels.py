"""Half a file in Inductor's cache is built anew."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch._inductor.runtime.runtime_utils import cache_dir

from fxpasses.compiler.broken_kernels import building_anew


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    assert cache_dir() == str(tmp_path)
    file = tmp_path / "kernel.so"
    file.write_bytes(b"\x7fELF")
    return file


def load(file: Path) -> str:
    """As Inductor does: an error of its own has the importer's as its cause."""
    if not file.exists():
        return "built anew"
    try:
        raise ImportError("file too short", path=str(file))
    except ImportError as error:
        raise RuntimeError("InductorError") from error


def test_a_kernel_that_cannot_be_loaded_is_built_anew(kernel: Path) -> None:
    assert building_anew(lambda: load(kernel)) == "built anew"


def test_files_outside_the_cache_stay(kernel: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = tmp_path_factory.mktemp("elsewhere") / "extension.so"
    other.write_bytes(b"")
    with pytest.raises(RuntimeError, match="InductorError"):
        building_anew(lambda: load(other))
    assert other.exists()
