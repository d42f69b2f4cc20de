"""One save of all ranks, from the plan to the commit, synchronous or asynchronous.

In: a sharded state dict, a directory, options.
Out: a published checkpoint, or one error on every rank; the queue of saves in flight; a report.
Must not know: which Megatron called, and how a file is written.

Modules: async_queue, rank_state, transaction, upkeep, _planning, _report, _spreading, _state_history, _upkeep_process.
With torch: async_queue, rank_state, transaction, _planning, _spreading, _state_history.
"""
