"""This package behind the protocols of torch.distributed.checkpoint.

In: DCP's plans, write items and state dicts.
Out: planners, a storage writer and a storage reader that `dcp.save` and `dcp.load` take.
Must not know: Megatron-Core, though its own writer and planners have the same methods.

With torch: reader, writer.
"""
