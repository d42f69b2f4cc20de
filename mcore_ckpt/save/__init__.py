"""One save of all ranks, from the plan to the durable files and the commit, synchronous or asynchronous.

In: a sharded state dict, a directory, options.
Out: a published checkpoint, or one error on every rank; the queue of saves in flight; a report.
Must not know: which Megatron called.

Modules: async_queue, buckets, call_worker, forked_call, plan_check, planner, plans, replicas, save_index, staging,
staging_buffers, supervised_child, transaction, upkeep, writer, writer_process, _report, _upkeep_process, _writer_main,
_writer_messages.
With torch: async_queue, plan_check, planner, replicas, save_index, staging, staging_buffers, transaction.
"""
