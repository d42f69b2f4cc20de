"""What the ranks hold, laid out before a byte is written.

In: specifications of shards: key, dtype, global shape, box.
Out: buckets with file, offset and length of each item; plans as columns of numbers; the coordinator's
check of all plans.
Must not know: how bytes get into files, processes, Megatron's classes.

Modules: accesses, buckets, dcp_tensors, dense_tensors, distribution, file_image, fingerprint, plan_check, plans,
replicas, save_index, saved_layout, shards, torch_classes.
With torch: accesses, dcp_tensors, dense_tensors, fingerprint, replicas, saved_layout, torch_classes.
"""
