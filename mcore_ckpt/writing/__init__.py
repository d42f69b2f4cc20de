"""A laid-out bucket and memory to a durable file, here or in another process.

In: layouts of file images, tensors or memory that holds their bytes.
Out: files, and for each its length and checksums; or how the process that wrote has ended.
Must not know: keys' meaning, plans of other ranks, when a checkpoint is published. The writer process knows no torch.

Modules: call_process, call_worker, image_writer, in_line, job_handle, process, stage_pool, staging, writer_messages,
_writer_child, _writer_process.
With torch: in_line, stage_pool, staging.
"""
