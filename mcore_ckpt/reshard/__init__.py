"""A checkpoint to the same checkpoint under another parallel layout.

In: a checkpoint, parallel sizes, rules; or what an optimizer's state is to look like.
Out: which slice of which tensor each rank of the target has, and the target itself.
Must not know: models and formats of others; the caller passes the order of parameters that a model gives.

Modules: buckets, conversion, names, options, partition, plan, reshard, rules, sidecars, _optimizer_layout.
"""
