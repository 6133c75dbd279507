"""Tiny models of transformers as folders, and ours built from them."""

import copy
from pathlib import Path

import torch

from mcore_ckpt.save_load.loading import describe_checkpoint, load
from mcore_models.description import ModelDescription
from mcore_models.families import FAMILIES
from mcore_models.protocol import TrainableModel
from mcore_parallel.mesh import ParallelContext
from mcore_parallel.sharding import named_shards


def ours_of(folder: Path, dtype: torch.dtype = torch.float64) -> TrainableModel:
    """Build the model that a Hugging Face folder holds, in eval mode, and fill it."""
    found = describe_checkpoint(folder).extra["model"]
    description = ModelDescription.from_dict(found)
    model = FAMILIES[description.family].build(
        description.config,
        ParallelContext.single(),
        vocab_size=description.vocab_size,
        dtype=dtype,
    )
    load_weights(model, folder)
    return model.eval()


def load_weights(model: TrainableModel, folder: Path) -> None:
    """Load every weight of a model from a folder."""
    shards = {f"model.{name}": shard for name, shard in named_shards(model).items()}
    load(folder, shards, cast=True, ignore=("optimizer.", "rng."))


def largest_gradient_error(model: TrainableModel, theirs: torch.nn.Module, folder: Path):
    """Compare all gradients, theirs read by our names from a folder; relative to the largest.

    Returns:
        The largest difference, and the name of the parameter.
    """
    gradients = copy.deepcopy(theirs)
    with torch.no_grad():
        own = dict(theirs.named_parameters())
        for name, parameter in gradients.named_parameters():
            parameter.copy_(own[name].grad)
    gradients.save_pretrained(folder)
    want = copy.deepcopy(model)
    load_weights(want, folder)
    pairs = list(zip(model.named_parameters(), want.parameters(), strict=True))
    largest = max(each.abs().max().item() for _, each in pairs)
    errors = {
        name: (each.grad - other).abs().max().item() / largest for (name, each), other in pairs
    }
    worst = max(errors, key=errors.__getitem__)
    return errors[worst], worst
