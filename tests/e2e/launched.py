"""Commands on several ranks, started as torchrun starts them, in warm processes."""

import os
from concurrent.futures import ThreadPoolExecutor

from warm_ranks import run_command

from mcore_parallel.launch.launcher import free_port


def run_as_torchrun_does(num_ranks, module, *words, cwd=None):
    """Run one of the commands on several ranks; return what each printed."""
    meeting = {
        "WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }

    def start(rank):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        return run_command(module, *words, env={**os.environ, **meeting, **place}, cwd=cwd)

    with ThreadPoolExecutor(num_ranks) as ranks:
        all_done = list(ranks.map(start, range(num_ranks)))
    for done in all_done:
        assert done.returncode == 0, done.stdout + done.stderr
    return [done.stdout for done in all_done]
