"""Slices that begin where a floating-point number of the batch says."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.support import compiled

pytestmark = pytest.mark.usefixtures("capture_flags")


def cut(x: Tensor, sizes: Tensor) -> Tensor:
    height, width = sizes.tolist()
    padding = (x.shape[0] - int(round(height * (28 / width), 3))) // 2
    return x.sin()[padding : x.shape[0] - padding] * 2


@pytest.mark.filterwarnings("ignore:fxpasses. compiling the backward")
def test_a_slice_from_a_number_computed_in_floating_point_is_compiled() -> None:
    """Before, each call raised "name 'TruncToInt' is not defined", and ran uncompiled."""
    is_old = torch.__version__ < "2.12"  # whose backward fails to compile, and runs operator by operator
    program = compiled(cut, "inductor", strict=not is_old)
    for sizes in ([30, 40], [12, 90], [50, 111], [20, 70], [40, 30]):
        x = torch.randn(40, requires_grad=True)
        expected, found = cut(x, torch.tensor(sizes)), program(x, torch.tensor(sizes))
        torch.testing.assert_close(found, expected)
        gradients = [torch.autograd.grad(y.square().sum(), x)[0] for y in (expected, found)]
        torch.testing.assert_close(gradients[1], gradients[0])
