"""The Triton kernels of device-driven paging, compiled, on a real GPU."""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

# The tests themselves.
from cut_checks import *  # noqa: F403
from foresight_checks import *  # noqa: F403
from kernel_checks import *  # noqa: F403
from launch_checks import *  # noqa: F403
from layer_checks import *  # noqa: F403
from vvllm_pager.device_table import DeviceTable
from vvllm_shared.residency import Weights

pytestmark = pytest.mark.gpu


def test_advice_does_not_wait_for_the_running_step() -> None:
    table = DeviceTable(64, 16, torch.device("cuda"))
    torch.cuda.synchronize()
    torch.cuda._sleep(1 << 28)  # cycles: a tenth of a second or more
    running = torch.cuda.Event()
    running.record()
    bias = [float(expert) for expert in range(64)]
    table.advise(Weights(heat=2.0, age=0.5, heat_decay=0.75), bias)
    assert not running.query()
    table.read()
    torch.cuda.synchronize()
    assert table.weights == Weights(heat=2.0, age=0.5, heat_decay=0.75)
    assert table.host.bias.tolist() == bias
