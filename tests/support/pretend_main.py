"""What a spawned process imports in place of the trainer's main module: "cuda" is the CPU there, too.

A process that multiprocessing spawns imports the main module again, as its parent had it. A test's rank puts this one
there (`sys.modules["__main__"]`) before stock Megatron spawns a worker, which names CUDA devices outright.
"""

from tests.support.cpu_megatron import pretend_cuda

pretend_cuda()
