"""What docs/format.md says, and nothing else: bytes to items and index, and back.

In: bytes of any origin, none of them trusted; or descriptions of tensors.
Out: an index (which items, where), payloads located inside their items, the bytes around a payload, `.metadata`.
Must not know: who reads or writes, in which process, or in which order.

Modules: dtypes, file_names, footer, index, index_pickle, item_layout, item_reading, manifest, metadata_read,
metadata_write, safe_pickle, state_file, tensor_pickle, zip_records, _columns, _constructors, _index_classes,
_index_columns, _unpickler.
"""
