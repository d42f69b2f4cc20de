"""A checkpoint to the same checkpoint under another parallel layout.

In: a checkpoint, parallel sizes, rules; or what an optimizer's state is to look like.
Out: which slice of which tensor each rank of the target has, and the target itself.
Must not know: families of models, formats of others. Megatron's model is built for the order of its parameters alone.

Modules: build, conversion, derived, file_payloads, gpt_model, names, options, own_process, parameter_orders, part_sums,
partition, plan, reshard, rules, safetensors, slices, slots, source_files, state_pickle, target_directory, target_files,
torch_dist, torch_files, view_payloads, _buckets, _file_stream, _journal, _optimizer_layout, _read_ahead, _slot_writer,
_written_proof.
"""
