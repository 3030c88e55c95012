"""Latency of engines at equal expert memory, each case in a process of its own."""
