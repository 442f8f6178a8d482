"""Inductor tests the vector instructions that it will use, and no others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from torch._inductor import config, cpu_vec_isa

from fxpasses.compiler import vector_tests


class Isa:
    """A set of vector instructions whose test is counted."""

    tested: list[str] = []

    def __init__(self, name: str, passes: bool = True) -> None:
        self.name, self.passes = name, passes

    def __str__(self) -> str:
        return self.name

    def __bool__(self) -> bool:
        self.tested.append(self.name)
        return self.passes

    def bit_width(self) -> int:
        return {"avx2": 256}.get(self.name.split()[0], 512)


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[Isa]]:
    """Four sets, of which the processor lacks the first and the second does not build."""
    if not cpu_vec_isa.x86_isa_checker():
        pytest.skip("no x86 processor")
    Isa.tested = []
    found = [Isa("avx512 avx512_vnni amx_tile"), Isa("avx512 avx512_vnni", passes=False), Isa("avx512"), Isa("avx2")]
    monkeypatch.setattr(cpu_vec_isa, "supported_vec_isa_list", found)
    monkeypatch.setattr(cpu_vec_isa, "x86_isa_checker", lambda: ["avx2", "avx512", "avx512_vnni"])
    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    cpu_vec_isa.valid_vec_isa_list.cache_clear()
    vector_tests._first_that_passes.cache_clear()
    yield found
    cpu_vec_isa.valid_vec_isa_list.cache_clear()
    vector_tests._first_that_passes.cache_clear()


def test_the_first_that_passes_is_the_last_that_is_tested(known: list[Isa]) -> None:
    with vector_tests.testing_one():
        ours = cpu_vec_isa.pick_vec_isa()
        cpu_vec_isa.pick_vec_isa()
    assert Isa.tested == ["avx512 avx512_vnni", "avx512"]
    assert ours is cpu_vec_isa.pick_vec_isa()  # stock's choice, after all tests
    assert Isa.tested[-1] == "avx2"


def test_all_are_tested_where_the_user_asks_for_one(known: list[Isa], monkeypatch: pytest.MonkeyPatch) -> None:
    with vector_tests.testing_one():
        assert str(cpu_vec_isa.pick_vec_isa()) == "avx512"
        with config.patch({"cpp.simdlen": 256}):
            assert str(cpu_vec_isa.pick_vec_isa()) == "avx2"
        monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
        assert str(cpu_vec_isa.pick_vec_isa()) == "avx2"


def test_what_passed_is_not_tested_in_the_next_process(known: list[Isa], monkeypatch: pytest.MonkeyPatch) -> None:
    def pick() -> str:
        vector_tests._first_that_passes.cache_clear()
        Isa.tested = []
        with vector_tests.testing_one():
            return str(cpu_vec_isa.pick_vec_isa())

    assert pick() == "avx512" and Isa.tested == ["avx512 avx512_vnni", "avx512"]
    assert pick() == "avx512" and Isa.tested == []
    (note,) = vector_tests._note(cpu_vec_isa, []).parent.iterdir()
    note.write_text("{")
    assert pick() == "avx512" and Isa.tested
    monkeypatch.setattr(cpu_vec_isa, "x86_isa_checker", lambda: ["avx2"])  # another processor
    assert pick() == "avx2" and Isa.tested == ["avx2"]
    note.parent.rename(note.parent.with_name("away"))
    note.parent.write_text("")  # a folder that cannot be made
    with pytest.warns(UserWarning, match="noting which vector instructions passed"):
        assert pick() == "avx2" and Isa.tested == ["avx2"]


def test_an_error_in_choosing_has_all_tested(known: list[Isa], monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> list[Isa]:
        raise ZeroDivisionError("a defect")

    fails.cache_clear = lambda: None  # type: ignore[attr-defined]
    monkeypatch.setattr(vector_tests, "_first_that_passes", fails)
    with vector_tests.testing_one(), pytest.warns(UserWarning, match=r"testing vector instructions .*a defect"):
        assert str(cpu_vec_isa.pick_vec_isa()) == "avx512"
    assert "avx2" in Isa.tested
