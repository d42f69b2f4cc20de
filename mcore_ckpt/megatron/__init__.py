"""This package behind Megatron-Core, version by version: the only layer that imports it.

In: what Megatron's training code calls: strategies, common state, async queue, registry.
Out: the same under this package's saves and loads; `install()`, which puts them in place, and the way back.
Must not know: how bytes are laid out, read or written.

With torch: calls, certificate, flat_buckets, install, optimizer_state, other_division, serialization, strategy,
versions, _fully_parallel.
"""
