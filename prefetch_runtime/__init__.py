"""Keeps the experts that a MoE layer needs on the GPU, and serves them to vLLM exactly."""

__version__ = "0.1.0"
