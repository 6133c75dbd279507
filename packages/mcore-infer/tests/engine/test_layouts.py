"""Engines over several ranks write what one rank does."""

import os
from contextlib import redirect_stdout
from io import StringIO

import torch.distributed as dist

from mcore_infer import InferenceConfig, SamplingConfig
from mcore_infer.commands import generating
from mcore_infer.commands.opening import ModelOptions
from mcore_parallel.testing.ranks import run_ranks


def printed(folder, tp=0):
    """What the command prints."""
    options = ModelOptions(load=str(folder), device="cpu", tensor_model_parallel_size=tp)
    sampling, out = SamplingConfig(num_tokens=9, temperature=0.9), StringIO()
    prompts = ("In the", "And", "In the end")
    with redirect_stdout(out):
        assert not generating.generate(options, sampling, InferenceConfig(), prompts, seed=5)
    return out.getvalue()


def printed_by_ranks(folder, store):
    """The same on each of two ranks; the command leaves the world, and the pool wants one."""
    rank = dist.get_rank()
    names = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "x", "MASTER_PORT": "1"}
    os.environ |= names
    try:
        return printed(folder, tp=1)
    finally:
        for name in names:
            del os.environ[name]
        found = dist.FileStore(str(store), 2)
        dist.init_process_group("gloo", store=found, rank=rank, world_size=2)


def test_replicas_share_texts_and_the_first_rank_prints_all(run_folder, tmp_path):
    expected = printed(run_folder)
    assert len(expected) > 40
    assert run_ranks(printed_by_ranks, 2, run_folder, tmp_path / "store") == [expected, ""]
