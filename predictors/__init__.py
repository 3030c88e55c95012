"""Guess the experts of the next layers. No CUDA, no vLLM."""
