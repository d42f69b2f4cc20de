"""Side-by-side benchmarks: this package, stock megatron-core, stock DCP and the raw device, on the same state."""
