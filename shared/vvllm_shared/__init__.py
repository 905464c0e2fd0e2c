"""What more than one process of vvllm-ms needs: errors, limits, paths, logging, messages, the residency core."""

PINNED_VLLM = "0.32.0"
"""The one vLLM version whose internals the pager was verified against."""
