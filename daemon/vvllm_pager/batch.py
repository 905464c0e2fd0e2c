"""What a host-driven step of one layer is about."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vvllm_pager.kernel import Compute
from vvllm_shared.residency.page_table import Ints


@dataclass(frozen=True)
class Batch:
    """The router's choice on the host, and what the kernel is given."""

    planned: Ints
    """[T, k] expert ids, -1 where a pair is nobody's."""
    routed: Ints
    """[T, k] as the router gave them, to rows of padding too."""
    x: torch.Tensor
    """[T, H] inputs."""
    weights: torch.Tensor
    """[T, k]."""
    ids: torch.Tensor
    """[T, k] on the device, as `routed`."""
    compute: Compute
    """The stock kernel."""
