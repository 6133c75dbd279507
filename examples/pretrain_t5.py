"""Megatron's entry for T5 by its name: takes its flags, under torchrun or alone.

    torchrun --nproc_per_node=8 examples/pretrain_t5.py --encoder-num-layers 12 ...

The same as ``mcore-train t5``.
"""

import sys

from mcore_train.cli import pretrain

if __name__ == "__main__":
    sys.exit(pretrain("t5", sys.argv[1:]))
