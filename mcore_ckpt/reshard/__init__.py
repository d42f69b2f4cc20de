"""A checkpoint to the same checkpoint under another parallel layout.

In: a checkpoint, parallel sizes, rules; or what an optimizer's state is to look like.
Out: which slice of which tensor each rank of the target has, and the target itself.
Must not know: families of models, formats of others. Megatron's model is built for the order of its parameters alone.

Modules: conversion, gpt_model, names, options, own_process, parameter_orders, partition, plan, reshard, rules,
_buckets, _optimizer_layout.
"""
