"""One save of all ranks, from the plan to the durable files and the commit, synchronous or asynchronous.

In: a sharded state dict, a directory, options.
Out: a published checkpoint, or one error on every rank; the queue of saves in flight; a report.
Must not know: which Megatron called.

With torch: async_queue, planner, replicas, staging, transaction.
"""
