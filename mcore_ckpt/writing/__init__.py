"""A laid-out bucket and memory to a durable file, here or in another process.

In: layouts of file images, tensors or memory that holds their bytes.
Out: files, and for each its length and checksums; or how the process that wrote has ended.
Must not know: keys' meaning, plans of other ranks, when a checkpoint is published. The writer process knows no torch.

Modules: call_worker, forked_call, persistent_writer, snapshot, staging, staging_buffers, supervised_child, writer_job,
_image_writer, _status_page, _writer_messages, _writer_process.
With torch: snapshot, staging, staging_buffers.
"""
