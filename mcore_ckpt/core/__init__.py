"""The vocabulary of all packages.

In: plain values, and what goes wrong on a rank or in a child process.
Out: the tree of errors, options, boxes and their arithmetic, progress and tables for a terminal, the ends of processes,
collectives that raise one rank's error on all ranks, and CRC-32.
Must not know: what a checkpoint is made of; files, formats, Megatron.

With torch: ranks.
"""
