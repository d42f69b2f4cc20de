"""This package behind the protocols of torch.distributed.checkpoint.

In: DCP's plans, write items and state dicts.
Out: planners and a storage writer that `dcp.save` and `dcp.load` take; the reader is `load.reader`.
Must not know: Megatron-Core, though its own writer and planners have the same methods.

With torch: bucket_writer, planners, writer.
"""
