"""Files of a target, written once from any payloads, and the directory that appears when all of them are complete.

In: payloads, and a plan: which slice of which tensor goes to which slot of which file.
Out: a directory under its name, complete, checked, and written on from where an interrupted run has stopped.
Must not know: models, partition rules, where the payloads come from.

Modules: build, directory, safetensors, slots, state_pickle, target_files, torch_dist, torch_files, _file_stream,
_journal, _proof, _read_ahead, _writer.
"""
