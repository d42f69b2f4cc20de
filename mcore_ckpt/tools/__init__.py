"""A checkpoint on the disk to answers: open, inspect, verify, repair, compare.

In: the directory of a checkpoint that anybody wrote.
Out: reports as frozen values, lazy tensors, a page of HTML; in bounded memory, without a process group.
Must not know: how answers are printed.

Modules: checkpoint, copy, diff, dtype_cast, fingerprints, html_report, inspection, keys, parallel_layout, payloads,
plain_state, regrid, repair, run_folders, run_listing, tensor_stats, tilings, verify, _plain_compare.
"""
