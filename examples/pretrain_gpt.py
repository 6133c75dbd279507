"""Megatron's entry by its name: takes its flags, under torchrun or alone.

    torchrun --nproc_per_node=8 examples/pretrain_gpt.py --num-layers 24 ...

The same as ``mcore-train gpt``. Flags that have another spelling here are translated, flags
without a meaning are named, and an unknown one is answered with the nearest known one.
"""

import sys

from mcore_train.cli import pretrain

if __name__ == "__main__":
    sys.exit(pretrain("gpt", sys.argv[1:]))
