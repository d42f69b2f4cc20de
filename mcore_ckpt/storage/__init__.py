"""Where checkpoints live: put, read a range, list, delete, publish.

In: names below one directory, byte ranges, buffers.
Out: durable files, and bytes that were read whole or not at all. Another kind of storage is another `base.Storage`.
Must not know: what the bytes mean.

Modules: base, direct_io, resolve, _durable, _local, _local_reader, _local_writer, _regular_files.
"""
