"""What more than one process of vvllm-ms needs: errors, limits, paths, logging, messages, the residency core."""

PINNED_VLLM = "0.32.0"
"""The one vLLM version whose internals the pager was verified against."""


def is_pinned(version: str) -> bool:
    """Whether a vLLM version is the pinned release; a local build of it ("0.32.0+cu130") is."""
    return version.partition("+")[0] == PINNED_VLLM
