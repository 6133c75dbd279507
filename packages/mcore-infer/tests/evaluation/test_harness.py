"""The adapter beside lm-evaluation-harness' own model of transformers; `nox -s extras`."""

import json

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from mcore_infer.evaluation import harness

pytestmark = pytest.mark.filterwarnings("ignore")  # of packages that are not ours
TEXTS = [
    "the cat sat on the mat",
    "in the beginning was the word",
    "a rose is a rose is a rose",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    pytest.importorskip("lm_eval")
    path = tmp_path_factory.mktemp("llama")
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>", "<s>", "</s>"])
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    fast.save_pretrained(path)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=24,
        initializer_range=0.3, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def both(folder):
    from lm_eval.models.huggingface import HFLM

    ours = harness.adapter_class()(load=str(folder), device="cpu", batch_size=3)
    theirs = HFLM(pretrained=str(folder), device="cpu", batch_size=1, dtype="float32")
    return ours, theirs


def cut(text):
    """Part a text before its last word."""
    before, _, word = text.rpartition(" ")
    return before, f" {word}"


def instances(kind, arguments):
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, one, i) for i, one in enumerate(arguments)]


def test_tokens_and_log_likelihoods_are_those_of_transformers(both):
    ours, theirs = both
    assert ours.max_length == theirs.max_length
    assert ours.prefix_token_id == theirs.prefix_token_id
    for text in (*TEXTS, " a", "<s>the cat", ""):
        assert ours.tok_encode(text) == list(theirs.tok_encode(text))
    pairs = [cut(text) for text in TEXTS]
    pairs += [("the cat ", "sat"), ("", "the cat sat"), (" ".join(TEXTS * 3), " the mat")]
    for kind, arguments in (
        ("loglikelihood", pairs),
        ("loglikelihood_rolling", [(text,) for text in (*TEXTS, " ".join(TEXTS * 3))]),
    ):
        mine, want = (getattr(lm, kind)(instances(kind, arguments)) for lm in both)
        for one, other in zip(mine, want, strict=True):
            if kind == "loglikelihood":
                assert one == (pytest.approx(float(other[0]), rel=1e-5), other[1])
            else:
                assert one == pytest.approx(float(other), rel=1e-5)


def test_texts_are_written_as_transformers_writes_them(both):
    options = {"until": [" rose", "\n"], "max_gen_toks": 8, "do_sample": False}
    arguments = [(text, options) for text in TEXTS]
    mine, want = (lm.generate_until(instances("generate_until", arguments)) for lm in both)
    assert mine == want
    with pytest.raises(ValueError, match="num_beams"):
        both[0].generate_until(instances("generate_until", [("a", {"num_beams": 4})]))


def test_a_task_runs_by_the_harness_command_line(folder, tmp_path, capsys):
    rows = [{"question": cut(t)[0], "choices": [cut(t)[1], " the"], "answer": 0} for t in TEXTS]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "tiny.yaml").write_text(
        f"""task: tiny
dataset_path: json
dataset_kwargs: {{data_files: {{test: {tmp_path / "rows.jsonl"}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
target_delimiter: ""
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""
    )
    words = [
        "--tasks",
        "tiny",
        "--include_path",
        str(tmp_path),
        "--model_args",
        f"load={folder}",
    ]
    harness.main(["run", "--model", "mcore", *words])
    assert "|acc" in capsys.readouterr().out.replace(" ", "")


def test_what_the_model_does_not_know_is_refused(folder):
    adapter = harness.adapter_class()
    with pytest.raises(ValueError, match="load=DIR"):
        adapter()
    with pytest.raises(ValueError, match="parallelize"):
        adapter(load=str(folder), parallelize=True)
