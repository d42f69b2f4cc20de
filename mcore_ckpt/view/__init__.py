"""Tensors put together from slices of stored tensors, under requested keys; nothing is copied until it is read.

In: an index and its payloads; which slice of which stored tensor each requested tensor is made of.
Out: an index and payloads like any others: of a view, in another dtype, with another axis, of plain files.
Must not know: models, targets, who reads.

Modules: derived, file_payloads, part_sums, payloads, slices, source_files.
"""
