"""A file as it is going to be: laid out, written window by window with its checksums, and told in `.metadata`.

In: descriptions of tensors and objects; their bytes, window by window.
Out: files of the format that `format` describes, and the content of `.metadata`.
Must not know: who fills an image, a save or a conversion.
"""
