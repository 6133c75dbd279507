"""Adds the tokens that the files next to a Hugging Face ``tokenizer.json`` declare.

``tokenizer.json`` describes a complete tokenizer, but ``tokenizer_config.json`` may declare
tokens or flags that it lacks; so may ``special_tokens_map.json`` and ``added_tokens.json``, if
the config has no ``added_tokens_decoder``. ``add_declared_tokens`` adds the tokens in the order
of transformers 5, so that a text gets the same ids. Folders for which this is not possible are
refused.
"""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

log = logging.getLogger(__name__)

CONFIG = "tokenizer_config.json"
ROLES = "special_tokens_map.json"
ADDED = "added_tokens.json"
_ROLES = tuple(f"{role}_token" for role in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
# Classes that use the steps of tokenizer.json; other classes build some steps from flags.
_PLAIN_CLASSES = ("", "PreTrainedTokenizer", "TokenizersBackend")
_NORMALIZER_FLAGS = {
    "do_lower_case": "lowercase",
    "strip_accents": "strip_accents",
    "tokenize_chinese_chars": "handle_chinese_chars",
}


def read_config(folder: Path) -> dict[str, Any]:
    """Return the fields of ``tokenizer_config.json`` and of ``special_tokens_map.json``.

    As in transformers, the map overrides the config, and is not read if the config has an
    ``added_tokens_decoder``.
    """
    config = _read_json(folder / CONFIG)
    return config if "added_tokens_decoder" in config else config | _read_json(folder / ROLES)


def add_declared_tokens(core: tokenizers.Tokenizer, folder: Path) -> None:
    """Add the tokens that the other files of a folder declare to ``core``, in place.

    Raises:
        ValueError: if a token would get another id than its file declares, or a flag
            contradicts ``tokenizer.json``.
    """
    config = read_config(folder)
    _refuse_other_flags(core, config, folder)
    before = core.get_added_tokens_decoder()
    names = _special_tokens(config, folder)
    declared: dict[int, AddedToken] = {}
    source = CONFIG
    if "added_tokens_decoder" in config:
        for number, fields in config["added_tokens_decoder"].items():
            declared[int(number)] = _added_token(fields, folder)
    else:
        source = ADDED
        # transformers takes a name in this file for a special token only if it has one of the
        # usual roles, given as a text and not as an object with a "__type". All other names
        # become ordinary tokens.
        usual = {
            key: value
            for key, value in config.items()
            if isinstance(value, list) or (key in _ROLES and "__type" not in (value or ""))
        }
        special = set(map(str, _special_tokens(usual, folder)))
        for name, number in _read_json(folder / ADDED).items():
            is_special = name in special
            token = AddedToken(name, normalized=not is_special, special=is_special)
            declared[number] = before.get(number, token) if _is(before, number, name) else token
    known = {token.content for token in (*before.values(), *declared.values())}
    undeclared = [token for token in names if str(token) not in known]
    undeclared = [
        AddedToken(token, special=True) if isinstance(token, str) else token
        for token in undeclared
    ]
    core.add_tokens([*(declared[number] for number in sorted(declared)), *undeclared])
    for number, token in declared.items():
        actual = core.token_to_id(token.content)
        if actual != number:
            raise ValueError(
                f"{folder / source} gives the token {token.content!r} the id {number}, and "
                f"tokenizer.json gives it {actual}. Save the tokenizer again "
                "(transformers: AutoTokenizer.from_pretrained, save_pretrained)."
            )
    after = core.get_added_tokens_decoder()
    new = [f"{after[i].content!r} ({i})" for i in sorted(after) if i not in before]
    if new:
        shown = ", ".join(new[:5]) + (f" and {len(new) - 5} more" if len(new) > 5 else "")
        log.info("%s: added tokens that tokenizer.json lacks: %s", folder, shown)


def _is(tokens: Mapping[int, AddedToken], number: int, name: str) -> bool:
    return number in tokens and tokens[number].content == name


def _special_tokens(config: Mapping[str, Any], folder: Path) -> list[str | AddedToken]:
    """Return the tokens with a role, then the others, in the order in which they get ids."""
    custom_roles = [key for key in config if key.endswith("_token") and key not in _ROLES]
    values = [config.get(key) for key in [*_ROLES, *custom_roles]]
    extra = config.get("extra_special_tokens") or ()
    if isinstance(extra, Mapping):
        values += extra.values()
    elif not any(isinstance(config[key], str) for key in custom_roles):
        # Custom roles given as texts replace the model-specific tokens.
        values += (config.get("model_specific_special_tokens") or {}).values()
    if isinstance(extra, Mapping):
        extra = ()
    values += extra or config.get("additional_special_tokens") or ()
    tokens: list[str | AddedToken] = []
    for value in values:
        token = _added_token(value, folder) if isinstance(value, Mapping) else value
        if isinstance(token, (str, AddedToken)) and str(token) and token not in tokens:
            tokens.append(token)
    return tokens


def _added_token(fields: Mapping[str, Any], folder: Path) -> AddedToken:
    """Build a token from its fields in a JSON file."""
    try:
        options: dict[str, Any] = {"special": True, **fields}
        return AddedToken(
            **{name: options[name] for name in options if name not in ("__type", "id")}
        )
    except TypeError as error:
        raise ValueError(f"{folder}: {fields!r} is not an added token: {error}") from error


def _refuse_other_flags(
    core: tokenizers.Tokenizer, config: Mapping[str, Any], folder: Path
) -> None:
    """Refuse flags with which transformers encodes differently than ``tokenizer.json``."""
    wrong = ""
    if config.get("split_special_tokens"):
        wrong = "split_special_tokens is set, which cuts special tokens into pieces"
    if (config.get("tokenizer_class") or "").removesuffix("Fast") not in _PLAIN_CLASSES:
        normalizer, pre_tokenizer = (
            json.loads(step.__getstate__()) if step else {}
            for step in (core.normalizer, core.pre_tokenizer)
        )
        if normalizer.get("type") == "BertNormalizer":
            defaults = {"do_lower_case": True, "tokenize_chinese_chars": True}
            for flag, field in _NORMALIZER_FLAGS.items():
                value = config.get(flag, defaults.get(flag))
                if value != normalizer[field]:
                    wrong = (
                        f"{flag} is {value}, and {field} of tokenizer.json is "
                        f"{normalizer[field]}"
                    )
        flag = config.get("add_prefix_space")
        if pre_tokenizer.get("type") == "ByteLevel" and flag not in (
            None,
            pre_tokenizer["add_prefix_space"],
        ):
            wrong = (
                f"add_prefix_space is {flag}, and {pre_tokenizer['add_prefix_space']} in "
                "tokenizer.json"
            )
    if wrong:
        raise ValueError(
            f"{folder / CONFIG}: {wrong}, so transformers gives other ids than "
            "tokenizer.json alone. Change one of the two files."
        )


def _read_json(path: Path) -> dict[str, Any]:
    """Return the fields of a JSON file; none if the file does not exist."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{path} must hold a JSON object, not a {type(fields).__name__}.")
    return fields
