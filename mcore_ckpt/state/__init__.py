"""State dicts as they come: torch's classes and Megatron's sharded leaves, described without importing Megatron.

In: tensors, DTensors, sharded tensors and objects.
Out: dtypes, slices, DCP's metadata classes.
Must not know: files.

With torch: plan_check, shards, values.
"""
