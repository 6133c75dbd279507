"""mcore-infer alone: a saved model of random weights writes on after a prompt, both ways."""

import tempfile
from pathlib import Path

from mcore_ckpt.save_load.saving import save
from mcore_data.tokenizers.plain import ByteTokenizer
from mcore_infer import SamplingConfig, __version__, generate_text, load_model
from mcore_infer.cli import main
from mcore_models.config import TransformerConfig
from mcore_models.description import ModelDescription
from mcore_models.gpt import GPT
from mcore_parallel.mesh import SINGLE, ParallelContext
from mcore_parallel.sharding import named_shards

assert __version__[0].isdigit(), __version__

with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    described = ModelDescription(
        config=TransformerConfig(num_layers=2, hidden_size=16, num_attention_heads=4),
        vocab_size=ByteTokenizer.vocab_size,
    )
    model = GPT(described.config, ParallelContext.single(), vocab_size=described.vocab_size)
    shards = {f"model.{key}": shard for key, shard in named_shards(model).items()}
    ByteTokenizer().save(folder / "tokenizer")
    save(
        folder / "run",
        1,
        shards,
        world=SINGLE,
        extra={"model": described.to_dict()},
        folders={"tokenizer": folder / "tokenizer"},
    )
    loaded = load_model(folder / "run", ParallelContext.single())
    sampling = SamplingConfig(num_tokens=8, top_k=1)
    texts = generate_text(loaded.model, loaded.tokenizer, ["In the"], sampling, seed=1)
    assert len(texts) == 1, texts
    words = (
        "generate",
        "--load",
        str(folder / "run"),
        "--prompt",
        "In the",
        "--num-tokens",
        "4",
    )
    assert main(list(words)) in (0, None)
