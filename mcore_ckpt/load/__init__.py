"""Requested slices to read ranges to destination tensors; stored records, located and checked, for the tools, too.

In: an index, and what the caller requests: keys, slices, tensors to fill.
Out: filled tensors and objects, every record that was read completely checked; what is wrong with a stored record.
Must not know: how checkpoints are written, Megatron's classes.

Modules: arrivals, checks, checksums, dtype_conversions, file_footers, flattened, item_checks, item_decoding, nearest,
open_files, ranges, read_requests, reader, stored_fingerprints, _columns, _extents, _item_locations, _overlaps,
_placement, _tensor_reads, _wanted_items.
With torch: arrivals, dtype_conversions, flattened, item_decoding, read_requests, reader, _columns, _extents,
_item_locations, _overlaps, _placement, _tensor_reads, _wanted_items.
"""
