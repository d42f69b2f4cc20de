"""What docs/format.md says, and nothing else: bytes to items and index, and back.

In: bytes of any origin, none of them trusted; or descriptions of tensors.
Out: an index (which items, where), payloads located inside their items, the bytes around a payload, `.metadata`.
Must not know: the reader or writer, its process, or the order of its calls.
"""
