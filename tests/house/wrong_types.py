"""Wrong on purpose: `nox -s types` fails unless the checker finds this error."""

import torch

size: int = torch.ones(1)
