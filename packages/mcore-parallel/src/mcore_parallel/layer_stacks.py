"""The layers of a model chunk, as those see them who wrap them from outside."""

from torch import nn


def layer_stacks(chunk: nn.Module) -> list[list[nn.Module]]:
    """List the layers of each stack of a chunk, in forward order.

    A stack is a container named ``blocks``: of the chunk itself, or of a part such as an
    encoder.
    """
    return [
        list(module.children())
        for name, module in chunk.named_modules()
        if name.rpartition(".")[2] == "blocks"
        and isinstance(module, nn.ModuleDict | nn.ModuleList)
    ]
