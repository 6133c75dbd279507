import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from warm_ranks import run_ranks

from mcore_ckpt import convert, save
from mcore_infer import load_model
from mcore_infer.generation import next_logits
from mcore_parallel.config import ParallelConfig
from mcore_parallel.mesh import SINGLE, ParallelContext
from mcore_parallel.sharding import named_shards

LINEAR = "model.layers.0.self_attn.q_proj"
TOKENS = torch.tensor([[5, 6, 7, 200], [1, 2, 3, 4]])


def test_a_run_folder_is_all_that_is_needed(loaded):
    assert loaded.folder.name == "iter_0000007"
    assert loaded.tokenizer.vocab_size == 257
    assert loaded.description.config.num_layers == 2
    assert not loaded.model.training
    assert next(loaded.model.parameters()).dtype == torch.float64


def test_a_step_folder_and_another_dtype_load_too(loaded):
    again = load_model(loaded.folder, ParallelContext.single(), dtype=torch.float32)
    logits = next_logits(again.model, TOKENS)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits.double(), next_logits(loaded.model, TOKENS), **CLOSE)


CLOSE = {"rtol": 1e-4, "atol": 1e-4}


def logits_of(folder, tp):
    ctx = ParallelContext.build(ParallelConfig(tensor_model_parallel_size=tp))
    logits = next_logits(load_model(folder, ctx).model, TOKENS)
    ctx.destroy()
    return logits


@pytest.mark.parametrize(("tp", "form"), [(2, "megatron"), (4, "mcore")])
def test_tensor_ranks_score_as_one_rank_does(run_folder, model, tp, form, tmp_path):
    expected = next_logits(model, TOKENS)
    if form != "mcore":
        convert("mcore", run_folder, form, tmp_path / form)
        run_folder = tmp_path / form
    for logits in run_ranks(logits_of, tp, run_folder, tp):
        torch.testing.assert_close(logits, expected, rtol=1e-10, atol=1e-10)


def test_padding_of_the_vocabulary_is_no_token(model):
    assert model.padded_vocab_size > 257
    assert next_logits(model, TOKENS).shape == (2, 257)


def test_no_checkpoint_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="not a folder"):
        load_model(tmp_path / "nothing", ParallelContext.single())


def test_a_checkpoint_that_names_no_model_is_an_error(model, tmp_path):
    step = save(tmp_path, 1, named_shards(model), world=SINGLE)
    with pytest.raises(ValueError, match="does not describe its model"):
        load_model(step, ParallelContext.single())


@pytest.mark.parametrize("form", ["hf", "megatron", "dcp"])
def test_a_folder_of_another_format_answers_as_the_run_it_came_from(
    run_folder, loaded, tmp_path, form
):
    convert("mcore", run_folder, form, tmp_path / form)
    again = load_model(tmp_path / form, ParallelContext.single())
    assert torch.equal(next_logits(again.model, TOKENS), next_logits(loaded.model, TOKENS))


def refused(folder, fields):
    ctx = ParallelContext.build(ParallelConfig(**fields))
    try:
        load_model(folder, ctx)
    except ValueError as error:
        return str(error)
    finally:
        ctx.destroy()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"context_parallel_size": 2}, "--context-parallel-size"),
        (
            {"tensor_model_parallel_size": 2, "sequence_parallel": True},
            "--sequence-parallel",
        ),
    ],
)
def test_layouts_that_cannot_write_token_by_token_are_refused(run_folder, fields, message):
    assert all(message in answer for answer in run_ranks(refused, 2, run_folder, fields))


@pytest.fixture
def adapters(run_folder, tmp_path):
    """A folder of PEFT beside a Hugging Face folder, which alone has the small files."""
    convert("mcore", run_folder, "hf", tmp_path / "base")
    (tmp_path / "base" / "generation_config.json").write_text(
        '{"eos_token_id": [3, 9], "temperature": 0.6}'
    )
    words = WordLevel({chr(number): number for number in range(257)}, unk_token="a")
    Tokenizer(words).save(str(tmp_path / "base" / "tokenizer.json"))
    shape = load_file(tmp_path / "base" / "model.safetensors")[f"{LINEAR}.weight"].shape
    pair = {"lora_A": torch.randn(2, shape[1]), "lora_B": torch.randn(shape[0], 2)}
    (tmp_path / "adapter").mkdir()
    save_file(
        {f"base_model.model.{LINEAR}.{kind}.weight": t.double() for kind, t in pair.items()},
        tmp_path / "adapter" / "adapter_model.safetensors",
    )
    table = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["q_proj"]}
    table["base_model_name_or_path"] = str(tmp_path / "base")
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(table))
    return tmp_path


def test_a_folder_of_peft_answers_as_its_merged_model_and_takes_small_files_of_its_base(
    adapters, loaded
):
    convert("hf", adapters / "adapter", "hf", adapters / "merged")
    merged, apart = (
        load_model(adapters / name, ParallelContext.single()) for name in ("merged", "adapter")
    )
    logits = next_logits(apart.model, TOKENS)
    torch.testing.assert_close(logits, next_logits(merged.model, TOKENS), **CLOSE)
    assert not torch.allclose(logits, next_logits(loaded.model, TOKENS), **CLOSE)
    assert apart.ends == merged.ends == (3, 9)
    assert apart.sampling_defaults == merged.sampling_defaults == {"temperature": 0.6}
    assert apart.tokenizer.vocab_size == 257
    (adapters / "adapter" / "generation_config.json").write_text('{"eos_token_id": 4}')
    assert load_model(adapters / "adapter", ParallelContext.single()).ends == (4,)
