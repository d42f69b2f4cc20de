"""A checkpoint on the disk to answers: open, inspect, verify, repair, compare.

In: the directory of a checkpoint that anybody wrote.
Out: reports as frozen values, lazy tensors, a page of HTML; in bounded memory, without a process group.
Must not know: how answers are printed.
"""
