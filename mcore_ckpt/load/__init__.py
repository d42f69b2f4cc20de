"""Requested slices to read ranges to destination tensors; stored records, located and checked, for the tools, too.

In: an index, and what the caller requests: keys, slices, tensors to fill.
Out: filled tensors and objects, every record that was read completely checked; what is wrong with a stored record.
Must not know: how checkpoints are written, Megatron's classes.

With torch: reader, reads, requests.
"""
