"""The cases on the simulated device: what they count, and the arithmetic beside it. Contenders have their processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.case import CASES, load
from bench.cases import simulated_device_reload, simulated_device_stalls
from bench.peer import Peer
from tests.device import building

STALLS, RELOAD = simulated_device_stalls.CASE, simulated_device_reload.CASE


def figures_of(case: str, contender: str, parameters: dict[str, Any], folder: Path) -> dict[str, float]:
    if missing := building.missing():
        pytest.skip(f"the simulated device cannot be built: {missing}")
    peer = Peer(case, contender, parameters, "cpu", 1, folder)
    try:
        peer.ask("prepare", 300)  # a first run builds the device
        return peer.ask("count", 120)["figures"]
    finally:
        peer.close()


@pytest.mark.timeout(600)
def test_a_step_of_ours_waits_once(tmp_path):
    parameters = {"layers": 3, "checkpointed": True, "kernel_ms": 0.1, "read_ms": 0.1}
    assert figures_of(STALLS.name, "fastpack", parameters, tmp_path)["stalls"] == 1


@pytest.mark.timeout(600)
def test_a_step_of_eager_mode_waits_for_each_read(tmp_path):
    parameters = {"layers": 3, "checkpointed": False, "kernel_ms": 0.1, "read_ms": 0.1}
    found = figures_of(STALLS.name, "eager", parameters, tmp_path)
    assert found["stalls"] == 4 * 3 == simulated_device_stalls.stalls("eager", parameters)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_backward_pass_waits_for_each_copy_where_there_is_one_buffer(tmp_path):
    found = figures_of(RELOAD.name, "1 buffer", {"copy_ms": 20.0, "layers": 3, "kernel_ms": 0.1}, tmp_path)
    assert found["backward_s"] >= 3 * 0.020


def test_the_formulas_of_the_reload():
    computed = simulated_device_reload.computed
    assert computed(8, 3.0, 2.0, buffers=1) == 8 * (3 + 2)
    assert computed(8, 3.0, 2.0, buffers=2) == 3 + 7 * 3 + 2
    assert computed(8, 1.0, 2.0, buffers=2) == 1 + 7 * 2 + 2


def test_what_is_off_by_more_than_allowed_is_marked():
    parameters = {"copy_ms": 20.0, "layers": 8, "kernel_ms": 2.0}
    figures = {"kernels": 40, "kernel_s": 0.002, "backward_q1_s": 0.0, "backward_q3_s": 0.0}
    seconds = {"no offload": 0.080, "1 buffer": 0.245, "2 buffers": 0.190}
    entries = [
        {"parameters": parameters, "outcome": "measured", "contender": name, "figures": figures | {"backward_s": s}}
        for name, s in seconds.items()
    ]
    rows = {row["contender (simulated device)"]: row for row in simulated_device_reload.arithmetic(entries)}
    assert all(row["c/g"] == pytest.approx(2) and row["g, ms"] == pytest.approx(10) for row in rows.values())
    assert {name: row["off by"] for name, row in rows.items()} == {
        "no offload": "+0.0 %",
        "1 buffer": "+2.1 %",
        "2 buffers": "+11.8 % (!)",
    }


@pytest.mark.parametrize("case", [STALLS, RELOAD], ids=lambda case: case.name)
def test_no_contender_takes_part_where_the_device_cannot_be_built(case, monkeypatch):
    monkeypatch.setattr(building, "missing", lambda: "there is no compiler")
    for contender in case.contenders:
        why = contender.unavailable({}, "cpu")
        assert why == "the simulated device cannot be built: there is no compiler"
        assert "--device cpu" in contender.unavailable({}, "cuda")


def test_listing_the_cases_adds_no_device_to_the_process():
    assert load(STALLS.name).simulated and "simulated" in STALLS.title.lower() + RELOAD.title.lower()
    # In a process of its own: tests of the device may have registered it in this one.
    listing = """
import torch
from bench.case import CASES, load
print(len([load(name) for name in CASES]), torch._C._get_privateuse1_backend_name())
"""
    told = subprocess.run([sys.executable, "-c", listing], capture_output=True, text=True, check=True)
    assert told.stdout.split() == [str(len(CASES)), "privateuseone"]
