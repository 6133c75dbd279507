"""Random models of transformers and their quantized folders, for tests with other loaders."""

import pytest
import torch

from mcore_infer.cli import main


@pytest.fixture(scope="session")
def save_random():
    """Returns a function that saves a random model of a kind, unless its folder is there."""

    def save(folder, kind, sizes, *, std, dtype=torch.float32):
        transformers = pytest.importorskip("transformers")
        if folder.exists():
            return
        config = getattr(transformers, f"{kind}Config")(**sizes, pad_token_id=None)
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                weight.copy_(std * torch.randn(weight.shape) + 1.0 * ("norm" in name))
        model.to(dtype).save_pretrained(folder)

    return save


@pytest.fixture(scope="session")
def quantize_folder():
    """Returns a function that quantizes with the tokenizer and text of ``path``."""

    def run(path, folder, output, method, form, *options):
        words = ["--load", folder, "--output", output, "--tokenizer", path / "bytes"]
        words += ["--calibration-data", path / "text.txt", "--method", method, "--format", form]
        assert main(["quantize", *map(str, [*words, *options])]) == 0

    return run
