"""From a map-style dataset to batches of torch tensors: the only room that needs torch.

Each micro-batch is a dict of [B, S] tensors of one data-parallel rank. Worker processes
prepare the next ones while the step runs.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.data import DataLoader

from mcore_data.blending import MapDataset
from mcore_data.sampler import CyclicSampler, SingleSampler

_PREFETCH = 4


def build_loader(
    dataset: MapDataset | Iterable[dict[str, torch.Tensor]],
    *,
    micro_batch_size: int,
    dp_rank: int = 0,
    dp_size: int = 1,
    consumed_samples: int = 0,
    dataloader_type: Literal["single", "cyclic", "external"] = "single",
    num_workers: int = 0,
    seed: int = 1234,
    pin_memory: bool = False,
) -> Iterable[dict[str, torch.Tensor]]:
    """Micro-batches of one data-parallel rank, from a place in the data on.

    Args:
        dataset: map-style dataset of numpy samples; with ``external`` the loader itself,
            which is returned as it is.
        micro_batch_size: samples in a batch.
        dp_rank: rank along the data axis.
        dp_size: ranks along the data axis.
        consumed_samples: samples that all ranks together have had; the batches continue
            there, whatever the number of ranks was before.
        dataloader_type: ``single`` goes through the dataset once, ``cyclic`` for ever in new
            permutations.
        num_workers: processes that prepare batches; 0 prepares them when asked.
        seed: of the permutations of ``cyclic``.
        pin_memory: put batches where a GPU copies them from without waiting.

    Raises:
        ValueError: if nothing is left of the data, or sizes make no sense.
    """
    if dataloader_type == "external":
        return dataset  # pyrefly: ignore
    place = {
        "num_samples": len(dataset),  # pyrefly: ignore
        "micro_batch_size": micro_batch_size,
        "dp_rank": dp_rank,
        "dp_size": dp_size,
        "consumed_samples": consumed_samples,
    }
    sampler = (
        SingleSampler(**place)
        if dataloader_type == "single"
        else CyclicSampler(**place, seed=seed)
    )
    return DataLoader(
        dataset,  # pyrefly: ignore
        batch_sampler=sampler,
        num_workers=num_workers,
        prefetch_factor=_PREFETCH if num_workers else None,
        persistent_workers=num_workers > 0,
        pin_memory=pin_memory,
        collate_fn=collate,
    )


def collate(samples: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Stack samples of numpy arrays into tensors with a leading batch dimension."""
    return {
        key: torch.from_numpy(np.stack([sample[key] for sample in samples]))
        for key in samples[0]
    }
