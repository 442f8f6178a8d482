"""Which way a grouped product takes, for devices that are not there."""

import importlib.util

import pytest
import torch

from fxpasses.experts.runtime import grouped_ways
from fxpasses.experts.runtime.grouped_ways import Way, reads_offsets, way_of

pytestmark = pytest.mark.all_cases

CUDA, XPU, OTHER, CPU = (torch.device(name) for name in ("cuda", "xpu", "privateuseone", "cpu"))


@pytest.fixture
def machine(monkeypatch):
    """machine(capability, triton): as if there were CUDA devices of this major capability, and triton or not."""

    def set_up(capability, triton=True):
        monkeypatch.setattr(torch.version, "hip", None)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: capability > 0)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (capability, 0))
        monkeypatch.setattr(grouped_ways, "_has_triton_package", lambda: triton)

    return set_up


@pytest.mark.parametrize(
    "capability, triton, dtype, widths, way",
    [
        (9, True, torch.bfloat16, (64, 128), Way.LIBRARY),
        (10, False, torch.bfloat16, (64, 128), Way.LIBRARY),
        (9, True, torch.bfloat16, (64, 129), Way.TRITON),
        (9, True, torch.bfloat16, (0, 128), Way.TRITON),
        (9, True, torch.float16, (64, 128), Way.TRITON),
        (9, True, torch.float32, (64, 128), Way.TRITON),
        (8, True, torch.bfloat16, (64, 128), Way.TRITON),
        (12, True, torch.bfloat16, (64, 128), Way.TRITON),
        (9, True, torch.float64, (64, 128), Way.EACH),
        (7, True, torch.float16, (64, 128), Way.EACH),
        (8, False, torch.bfloat16, (64, 128), Way.EACH),
    ],
)
def test_cuda(capability, triton, dtype, widths, way, machine):
    machine(capability, triton)
    assert way_of(CUDA, dtype, *widths) is way
    assert reads_offsets(CUDA, CUDA, dtype, *widths) == (way is Way.EACH)
    assert not reads_offsets(CPU, CUDA, dtype, *widths)


@pytest.mark.parametrize("device, way", [(XPU, Way.TRITON), (OTHER, Way.EACH), (CPU, Way.EACH)], ids=str)
def test_other_devices(device, way, machine):
    machine(9)
    assert way_of(device, torch.bfloat16, 64, 128) is way


def test_rocm_has_triton_whatever_its_capability(machine, monkeypatch):
    machine(7)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert way_of(CUDA, torch.bfloat16, 64, 128) is Way.TRITON


def test_a_cuda_tensor_without_a_device_has_no_kernel(machine):
    """Fake tensors, where code is compiled for a device that is not there."""
    machine(0)
    assert way_of(CUDA, torch.bfloat16, 64, 128) is Way.EACH


def test_triton_is_looked_for_without_its_import():
    found = grouped_ways._has_triton_package.__wrapped__()
    assert found == (importlib.util.find_spec("triton") is not None)
