"""Odd Hugging Face folders against AutoTokenizer: the same ids, or refused."""

import json
import random

import pytest
from transformers import AutoTokenizer

from mcore_data.tokenizers.building import load_tokenizer

NAMES = ["<x>", "<y>", "<|end|>", "beginning", "a", " the", "[PAD]", "<x>y"]
FLAGS = ["lstrip", "rstrip", "single_word", "normalized"]
ROLES = ["bos_token", "eos_token", "unk_token", "pad_token", "mask_token", "image_token"]


def draw_token(draw, name):
    """A token by its name or by its fields, as either file writes it."""
    if draw.random() < 0.6:
        return name
    flags = {flag: draw.random() < 0.3 for flag in ("lstrip", "rstrip", "single_word")}
    return {"content": name, "normalized": draw.random() < 0.3, **flags}


def draw_folder(draw, source, folder):
    """Files that name tokens and flags of which tokenizer.json may lack some."""
    folder.mkdir()
    fields = json.loads((source / "tokenizer.json").read_text())
    size = len(fields["model"]["vocab"])
    core = load_tokenizer(source).core
    core.add_special_tokens(draw.sample(NAMES, draw.randrange(3)))
    core.save(str(folder / "tokenizer.json"))
    names = draw.sample(NAMES, 4)
    config = {"tokenizer_class": draw.choice(["PreTrainedTokenizerFast", "TokenizersBackend"])}
    for role in draw.sample(ROLES, draw.randrange(4)):
        token = draw_token(draw, draw.choice(names))
        config[role] = token if isinstance(token, str) else {"__type": "AddedToken", **token}
    if draw.random() < 0.3:
        config[draw.choice(["additional_special_tokens", "extra_special_tokens"])] = names[:2]
    if draw.random() < 0.1:
        config["extra_special_tokens"] = {"video_token": names[0]}
    if draw.random() < 0.15:
        config["model_specific_special_tokens"] = {"audio_token": names[3]}
    if draw.random() < 0.1:
        config["split_special_tokens"] = True
    if draw.random() < 0.3:
        start = core.get_vocab_size() if draw.random() < 0.7 else size + 3
        tokens = {
            str(core.token_to_id(name) or start + number): {
                "content": name,
                "special": draw.random() < 0.7,
                **{flag: draw.random() < 0.2 for flag in FLAGS},
            }
            for number, name in enumerate(names[: draw.randrange(3)])
        }
        config["added_tokens_decoder"] = tokens
    if draw.random() < 0.4:
        roles = {
            role: draw_token(draw, draw.choice(names)) for role in draw.sample(ROLES[:5], 2)
        }
        (folder / "special_tokens_map.json").write_text(json.dumps(roles))
    if draw.random() < 0.3:
        start = core.get_vocab_size() if draw.random() < 0.8 else size + 3
        added = {}
        for name in names[: draw.randrange(3)]:
            number = core.token_to_id(name)
            added[name] = number if number is not None else start + len(added)
        (folder / "added_tokens.json").write_text(json.dumps(added))
    if draw.random() < 0.95:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))


def draw_text(draw):
    words = [*NAMES, "in", "beginning", " ", "  ", "was", "foo", "<", "banana", "\n"]
    return "".join(draw.choices(words, k=draw.randrange(1, 10)))


def open_or_refuse(folder):
    try:
        return load_tokenizer(folder)
    except ValueError:
        return None


def compare(seeds, source, tmp_path):
    """Hold drawn folders to AutoTokenizer; return how many were refused."""
    refused = 0
    for seed in seeds:
        draw = random.Random(seed)
        folder = tmp_path / f"{seed}"
        draw_folder(draw, source, folder)
        ours = open_or_refuse(folder)
        if ours is None:
            refused += 1
            continue
        theirs = AutoTokenizer.from_pretrained(folder)
        assert ours.core.get_vocab() == theirs.get_vocab(), seed
        for text in (draw_text(draw) for _ in range(20)):
            assert ours.encode(text) == theirs(text)["input_ids"], (seed, text)
        if theirs.eos_token_id is not None:
            assert ours.eod == theirs.eos_token_id, seed
        ours.save(tmp_path / "saved")
        again = load_tokenizer(tmp_path / "saved")
        assert again.core.to_str() == ours.core.to_str(), seed
    return refused


def test_odd_folders_give_the_ids_of_transformers_or_are_refused(bpe_folder, tmp_path):
    assert 2 < compare(range(60), bpe_folder, tmp_path) < 24


def files(folder, source, **named):
    """A folder with the tokenizer.json of another one, and these files."""
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text((source / "tokenizer.json").read_text())
    for name, fields in named.items():
        (folder / f"{name}.json").write_text(json.dumps(fields))
    return folder


def test_a_token_of_the_config_alone_is_added_and_named(bpe_folder, tmp_path, caplog):
    config = {"pad_token": "[PAD]", "additional_special_tokens": ["<|im_end|>"]}
    folder = files(tmp_path / "a", bpe_folder, tokenizer_config=config)
    with caplog.at_level("INFO", "mcore_data"):
        tokenizer = load_tokenizer(folder)
    size = load_tokenizer(bpe_folder).vocab_size
    assert tokenizer.encode("<|im_end|>[PAD]") == [size + 1, size]
    assert f"lacks: '[PAD]' ({size}), '<|im_end|>' ({size + 1})" in caplog.text
    assert tokenizer.pad == size
    caplog.clear()
    tokenizer.save(tmp_path / "b")
    load_tokenizer(tmp_path / "b")
    assert not caplog.text


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ({"added_tokens": {"<x>": 900}}, r"added_tokens\.json gives .* '<x>' the id 900, and"),
        (
            {"tokenizer_config": {"added_tokens_decoder": {"5": {"content": "<x>"}}}},
            r"tokenizer_config\.json gives the token '<x>' the id 5, and tokenizer\.json gives",
        ),
        ({"tokenizer_config": {"split_special_tokens": True}}, "split_special_tokens is set"),
        (
            {
                "tokenizer_config": {
                    "tokenizer_class": "GPT2Tokenizer",
                    "add_prefix_space": True,
                }
            },
            "add_prefix_space is True, and False in tokenizer.json, so transformers gives",
        ),
        (
            {"tokenizer_config": {"added_tokens_decoder": {"5": "<x>"}}},
            "'<x>' is not an added",
        ),
        ({"special_tokens_map": ["<x>"]}, r"special_tokens_map\.json must hold a JSON object"),
    ],
)
def test_a_folder_that_asks_for_other_ids_is_refused(bpe_folder, tmp_path, named, message):
    with pytest.raises(ValueError, match=message):
        load_tokenizer(files(tmp_path / "a", bpe_folder, **named))


def test_a_file_that_is_cut_off_is_named(bpe_folder, tmp_path):
    folder = files(tmp_path / "a", bpe_folder)
    (folder / "added_tokens.json").write_text('{"<x>": ')
    with pytest.raises(ValueError, match=r"added_tokens\.json is not JSON"):
        load_tokenizer(folder)


@pytest.mark.parametrize("lower_case", [True, False])
def test_flags_of_a_bert_folder_are_those_of_its_tokenizer_json(tmp_path, lower_case):
    vocab = tmp_path / "vocab.txt"
    vocab.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "The", "the"]))
    load_tokenizer("BertWordPieceCase", vocab_file=vocab).save(tmp_path / "cased")
    config = {"tokenizer_class": "BertTokenizer", "do_lower_case": lower_case}
    folder = files(tmp_path / "a", tmp_path / "cased", tokenizer_config=config)
    theirs = AutoTokenizer.from_pretrained(folder)("The", add_special_tokens=False)["input_ids"]
    if lower_case:
        with pytest.raises(ValueError, match="do_lower_case is True, and lowercase of"):
            load_tokenizer(folder)
        assert theirs == [6]
    else:
        assert load_tokenizer(folder).encode("The") == theirs == [5]
