"""What a host-driven step of one layer is about."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vvllm_pager.kernel import Compute


@dataclass(frozen=True)
class Batch:
    """What the kernel is given, all on the device."""

    x: torch.Tensor
    """[T, H] inputs."""
    weights: torch.Tensor
    """[T, k]."""
    ids: torch.Tensor
    """[T, k] as the router gave them, to rows of padding too."""
    padding: torch.Tensor | None
    """bool [T], rows that are nobody's, where the runner says."""
    compute: Compute
    """The stock kernel."""
