"""A checkpoint as slices of stored tensors, written again: under another parallel layout, or as other files.

In: a checkpoint, parallel sizes, rules; or the layout that an optimizer's state is to have.
Out: the slice of each tensor in each file of the target, and the target itself, complete or not there.
Must not know: families of models, formats of others. Megatron's model is built for the order of its parameters alone.
"""
