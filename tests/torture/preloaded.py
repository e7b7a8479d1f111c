"""What the server of `verbs.py` imports once, for all the processes that are forked from it."""

from importlib import import_module

import torch
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from tests.unwaited import let_nothing_wait_for_the_disk

# And what verbs import only when they use it.
for module in ("matplotlib.pyplot", "peft", "scipy.stats"):
    import_module(module)
for module in ("evaluate", "export", "prepare", "train", "verify", "upscale"):
    import_module(f"scale_cli.commands.{module}")
for module in ("faults", "tiny_run"):
    import_module(f"tests.torture.{module}")

# A fork of a process with a pool of threads would wait for threads that it does not have.
torch.set_num_threads(1)

# A quarter of a second in every process that loads a model.
get_checkpoint_conversion_mapping("llama")

let_nothing_wait_for_the_disk()
