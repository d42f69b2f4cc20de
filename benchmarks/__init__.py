"""Benchmarks in one run: this package, Megatron-Core, DCP, torch_checkpointing, the raw device; the same state."""
