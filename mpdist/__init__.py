"""Sharded mixed-precision training of Hugging Face causal LMs, with numbers that can be trusted."""

__version__ = "0.1.0"
