"""One save of all ranks, from the plan to the durable files and the commit, synchronous or asynchronous.

In: a sharded state dict, a directory, options.
Out: a published checkpoint, or one error on every rank; the queue of saves in flight; a report.
Must not know: which Megatron called.

Modules: async_queue, call_worker, forked_call, rank_state, staging, staging_buffers, supervised_child, transaction,
upkeep, writer, writer_process, _planning, _report, _state_history, _upkeep_process, _writer_main, _writer_messages.
With torch: async_queue, rank_state, staging, staging_buffers, transaction, _planning, _state_history.
"""
