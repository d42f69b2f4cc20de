"""Stored records, as loads and offline commands both see them: locate, check, sum, open files.

In: an index, byte ranges of its files.
Out: open files that belong to the index, planned reads, checksums compared.
Must not know: torch, tensors in memory, what a load or a command wants the bytes for.

Modules: checks, checksums, file_footers, fingerprints, item_checks, nearest, open_files, ranges.
"""
