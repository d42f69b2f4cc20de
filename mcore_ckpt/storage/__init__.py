"""Where checkpoints live: put, read a range, list, delete, publish.

In: names below one directory, byte ranges, buffers.
Out: durable files, and bytes read completely or not at all. Another kind of storage is another `base.Storage`.
Must not know: what the bytes mean.
"""
