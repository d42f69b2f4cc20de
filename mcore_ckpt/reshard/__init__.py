"""A checkpoint as slices of stored tensors, written again: under another parallel layout, or as other files.

In: a checkpoint, parallel sizes, rules; or the layout that an optimizer's state is to have.
Out: which slice of which tensor lies in which file of the target, and the target itself, complete or not there.
Must not know: families of models, formats of others. Megatron's model is built for the order of its parameters alone.

Modules: build, conversion, derived, file_payloads, gpt_model, names, options, own_process, parameter_orders, part_sums,
partition, plan, reshard, rules, safetensors, slices, slots, source_files, state_pickle, target_directory, target_files,
torch_dist, torch_files, view_payloads, _buckets, _file_stream, _journal, _optimizer_layout, _read_ahead, _slot_writer,
_written_proof.
"""
