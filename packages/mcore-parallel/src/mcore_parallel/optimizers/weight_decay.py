"""Which parameters decay."""

from mcore_parallel.sharding import NamedParameter


def has_weight_decay(named: NamedParameter) -> bool:
    """Return whether a parameter decays: all but biases and logically one-dimensional tensors.

    Judged by logical tensors, so a flat slice or a stack of norms is not mistaken for a matrix.
    """
    return all(
        len(part.shape) > 1 and part.name.rpartition(".")[2] != "bias"
        for part in named.layout.parts
    )
