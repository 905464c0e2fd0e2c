"""Tiny checkpoints in the formats and layouts that people download, quantised for real from random weights."""
