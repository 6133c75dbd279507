"""Megatron's entry for BERT by its name: takes its flags, under torchrun or alone.

    torchrun --nproc_per_node=8 examples/pretrain_bert.py --num-layers 24 ...

The same as ``mcore-train bert``.
"""

import sys

from mcore_train.cli import pretrain

if __name__ == "__main__":
    sys.exit(pretrain("bert", sys.argv[1:]))
