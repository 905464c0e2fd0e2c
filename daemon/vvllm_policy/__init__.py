"""The policy process: router traces in, residency advice out. No torch, no vllm."""
