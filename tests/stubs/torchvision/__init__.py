"""Stands in for torchvision, of which no build matches the CPU's torch: vLLM's module of Qwen3.5 imports it for images,
and text-only serving calls none of it. Whatever is asked for by name is an empty class."""

__version__ = "0"
