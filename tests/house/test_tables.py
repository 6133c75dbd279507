"""Tables whose rows belong together: a sentence on each row that a new name lacks."""

import re
import sys
from collections.abc import Collection, Iterable
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from string import Formatter
from types import SimpleNamespace
from typing import cast, get_args, get_type_hints

sys.path.insert(0, str(Path(__file__).parents[1]))

from house.sources import ROOT
from parity.family_cases import CASES

from mcore_base.options import ON, Options, Rule, option, rules_of
from mcore_ckpt.conversion.options import ConvertOptions, UpcycleOptions
from mcore_ckpt.families import MODEL_TYPES, find_family
from mcore_data.config import PreprocessConfig
from mcore_infer.config import InferenceConfig, SamplingConfig, ServerConfig
from mcore_infer.quantization.options import QuantizeConfig
from mcore_models.building.initialization import initial_std
from mcore_models.config import TransformerConfig
from mcore_models.flops import rank_bytes
from mcore_models.layer_patterns import PATTERN_MIXERS
from mcore_models.layers.mixers import MIXERS
from mcore_models.logical_tensors import MIXER_NORMS, MIXER_SHAPES
from mcore_models.memory_changes import OptimizerChoice
from mcore_moe.config import MoEConfig
from mcore_parallel.config import ParallelConfig
from mcore_parallel.optimizers import config as optimizer_options
from mcore_train.composition import FAMILY_COMMANDS, TrainConfig
from mcore_train.config import OptimizerConfig
from mcore_train.updating.optimizers import OPTIMIZERS

NO_RULE = {"MainWeightsConfig"}
"""Options of optimizers/config.py that every rule shares."""
OTHER_PARITY = {
    "deepseek_v2": "tests/parity/test_deepseek.py",
    "deepseek_v3": "tests/parity/test_deepseek.py",
    "kimi_k2": "packages/mcore-ckpt/tests/conversion/test_mtp_layers.py",
    "mamba2": "tests/parity/test_transformers.py",
    "nemotron_h": "tests/parity/test_transformers.py",
    "t5": "tests/parity/test_t5.py",
    "bert": "tests/parity/test_bert.py",
    "megatron-bert": "tests/parity/test_bert.py",
    "roberta": "tests/parity/test_bert.py",
    "xlm-roberta": "tests/parity/test_bert.py",
    "modernbert": "tests/parity/test_bert.py",
}
"""Families that are compared with transformers in a file of their own."""


def optimizer_faults(
    choices: Collection[str],
    rules: Collection[str],
    options: dict[str, str],
    parts: dict[str, str],
    layout_test: str,
    state_bytes: dict[str, tuple[int, int]],
) -> list[str]:
    """Say what an optimizer lacks.

    Args:
        choices: of ``--optimizer``.
        rules: names in ``OPTIMIZERS``.
        options: classes in optimizers/config.py, by name.
        parts: class of each part of ``TrainConfig``.
        layout_test: text of the test that verifies optimizers over layouts.
        state_bytes: of one weight by rule, as the rule keeps them and as plans count them.
    """
    found = [
        f"--optimizer {name} has no rule: add it to OPTIMIZERS in "
        "mcore_train/updating/optimizers.py."
        for name in sorted(set(choices) - set(rules))
    ]
    found += [
        f"rule {name} is no choice: add it to OptimizerName in "
        "mcore_parallel/optimizers/config.py."
        for name in sorted(set(rules) - set(choices))
    ]
    found += [  # every run of tests/frozen is one of adam
        f"--optimizer {name} is not verified over layouts: add a row to OPTIMIZERS in "
        "tests/parity/test_optimizers.py."
        for name in sorted(set(choices) - {"adam"})
        if f'"optimizer": "{name}"' not in layout_test
    ]
    found += [
        f"--optimizer {name} keeps {kept} bytes of each weight, and plans count {planned}: "
        "correct NUM_MOMENTS in mcore_parallel/optimizers/config.py."
        for name, (kept, planned) in state_bytes.items()
        if kept != planned
    ]
    for name in sorted(set(options) - NO_RULE):
        homes = [part for part, kind in parts.items() if kind == name]
        if not homes:
            found.append(
                f"{name} reaches no command: add it to TrainConfig in "
                "mcore_train/composition.py, as the part with its optimizer's name."
            )
        elif homes[0] not in choices:
            found.append(
                f"part {homes[0]} of TrainConfig is no choice of --optimizer, so nothing "
                "refuses its options under other rules: give it the name of the choice."
            )
    return found


def test_an_optimizer_has_a_choice_a_rule_and_options_that_are_refused_without_it():
    here = optimizer_options.__name__
    options = {
        name: name
        for name, value in vars(optimizer_options).items()
        if is_dataclass(value) and value.__module__ == here
    }
    parts = {name: kind.__name__ for name, kind in get_type_hints(TrainConfig).items()}
    choices = get_args(get_type_hints(OptimizerConfig)["optimizer"])
    layout_test = (ROOT / "tests/parity/test_optimizers.py").read_text()
    configs = {
        name: kind() for name, kind in get_type_hints(TrainConfig).items() if name in choices
    }
    state_bytes = {}
    for name, build in OPTIMIZERS.items():
        moments = build(cast(TrainConfig, SimpleNamespace(**configs))).moments
        kept = sum({"fp32": 4, "bf16": 2}[dtype] for dtype in moments.values())
        planned = 0
        if name in optimizer_options.NUM_MOMENTS:
            in_matrix = name in optimizer_options.MATRIX_OPTIMIZERS
            planned = OptimizerChoice(name=name).element_bytes(in_matrix=in_matrix)
        state_bytes[name] = kept, planned
    faults = optimizer_faults(choices, OPTIMIZERS, options, parts, layout_test, state_bytes)
    assert not faults, "\n".join(faults)
    for name, kind in get_type_hints(TrainConfig).items():
        if name in choices:
            # AdamW also updates what matrix optimizers leave.
            others = ("adam", *optimizer_options.MATRIX_OPTIMIZERS)
            wanted = others if name == "adam" else name
            assert kind.part_of == {"optimizer": wanted}, f"{kind.__name__}.part_of"


def test_what_an_optimizer_lacks_is_said_in_one_sentence():
    options = {"SGDConfig": "", "LionConfig": "", "SoapConfig": ""}
    parts = {"sgd": "SGDConfig", "the_lion": "LionConfig"}
    layout_test = '{"optimizer": "sgd"}'
    state_bytes = {"sgd": (4, 4), "lion": (4, 8)}
    found = optimizer_faults(
        ["sgd", "lion"], ["sgd", "muon"], options, parts, layout_test, state_bytes
    )
    assert [line.partition(":")[0] for line in found] == [
        "--optimizer lion has no rule",
        "rule muon is no choice",
        "--optimizer lion is not verified over layouts",
        "--optimizer lion keeps 4 bytes of each weight, and plans count 8",
        (
            "part the_lion of TrainConfig is no choice of --optimizer, so nothing refuses its "
            "options under other rules"
        ),
        "SoapConfig reaches no command",
    ]


def mixer_faults(
    mixers: Collection[str],
    shapes: Collection[str],
    norms: Collection[str],
    letters: Collection[str],
    counted: Collection[str],
    stds: dict[str, dict[str, float]],
) -> list[str]:
    """Say what a mixer of a layer lacks.

    Args:
        mixers: names in ``MIXERS``.
        shapes: names in ``MIXER_SHAPES``.
        norms: names in ``MIXER_NORMS``.
        letters: names that letters of a pattern stand for.
        counted: names whose memory a plan estimates.
        stds: by mixer, initial spreads of its matrices over those of other matrices.
    """
    home = "mcore_models/logical_tensors.py"
    found = []
    for name in sorted({*mixers, *shapes, *norms, *letters}):
        if name not in mixers:
            found.append(f"mixer {name} is not built: add it to MIXERS in layers/mixers.py.")
        if name not in shapes:
            found.append(f"mixer {name} has no tensors: add it to MIXER_SHAPES in {home}.")
        if name not in norms:
            found.append(f"mixer {name} has no norm: add it to MIXER_NORMS in {home}.")
        # By a flag, * is latent attention, and layers have inputs of their own.
        if name not in letters and name not in ("mla", "layer_input"):
            found.append(
                f"mixer {name} is in no pattern: give it a letter in PATTERN_MIXERS of "
                "mcore_models/layer_patterns.py."
            )
        if name in letters and name not in counted:
            found.append(
                f"plans know no memory of mixer {name}: add what it keeps of a token to "
                "_kept_widths in mcore_models/flops.py."
            )
        if stds.get(name) and min(stds[name].values()) == 1.0:
            found.append(
                f"no matrix of mixer {name} begins smaller, as one that writes to the residual "
                "stream should: add its end to _RESIDUAL in building/initialization.py."
            )
    return found


def test_a_mixer_is_built_has_tensors_a_norm_a_letter_and_a_smaller_last_matrix():
    config, moe = (
        TransformerConfig(num_layers=8, hidden_size=64, num_attention_heads=4),
        MoEConfig(num_experts=2),
    )
    stds = {
        name: {
            tensor: initial_std(f"blocks.0.{tensor}", config) / config.init_method_std
            for tensor, shape in tensors(config, moe).items()
            if len(shape) == 2
        }
        for name, tensors in MIXER_SHAPES.items()
    }
    counted = [name for letter, name in PATTERN_MIXERS.items() if is_counted(letter)]
    letters = PATTERN_MIXERS.values()
    faults = mixer_faults(MIXERS, MIXER_SHAPES, MIXER_NORMS, letters, counted, stds)
    assert not faults, "\n".join(faults)


def is_counted(letter: str) -> bool:
    """Whether memory is estimated of a model whose layers are one letter of a pattern."""
    config = TransformerConfig(
        num_layers=1, hidden_size=256, num_attention_heads=4, hybrid_override_pattern=letter
    )
    moe = MoEConfig(num_experts=2 * (letter == "E"))
    try:
        rank_bytes(config, 64, ParallelConfig(), world_size=1, seq_length=8, moe=moe)
    except KeyError:
        return False
    return True


def test_what_a_mixer_lacks_is_said_in_one_sentence():
    stds = {"conv": {"conv.out.weight": 1.0}, "mla": {"mla.proj.weight": 0.5}}
    found = mixer_faults(["mla", "attn"], ["mla", "conv"], ["mla"], ["conv"], [], stds)
    assert [line.partition(":")[0].partition(",")[0] for line in found] == [
        "mixer attn has no tensors",
        "mixer attn has no norm",
        "mixer attn is in no pattern",
        "mixer conv is not built",
        "mixer conv has no norm",
        "plans know no memory of mixer conv",
        "no matrix of mixer conv begins smaller",
    ]


def option_faults(config_types: Iterable[type], known: Collection[str]) -> list[str]:
    """Say what is missing of options whose rules name others.

    Args:
        config_types: classes with options.
        known: fields and properties of all configs that commands have.
    """
    found = []
    for kind in config_types:
        for name, own in rules_of(kind).items():
            conditions = (*own.part_of, *own.needs, *own.idle_with, *own.excludes)
            found += [
                f"{kind.__name__}.{name} names {each.name}, which no command has: correct the "
                "name, or add the part to a command's config."
                for each in conditions
                if each.name not in known
            ]
        for rule in vars(kind).get("rules", ()):
            names = {part for _, part, _, _ in Formatter().parse(rule.message) if part}
            found += [
                f"a rule of {kind.__name__} names {name}, which no command has: {rule.message}"
                for name in sorted({*rule.fields, *names} - set(known))
            ]
    return found


def _configs() -> tuple[set[type], set[str]]:
    """Return the configs of all training commands, and the names of their options."""
    kinds = {k for c in FAMILY_COMMANDS.values() for k in get_type_hints(c.verified).values()}
    kinds |= {SamplingConfig, InferenceConfig, ServerConfig, QuantizeConfig, PreprocessConfig}
    kinds |= {ConvertOptions, UpcycleOptions}
    names = {name for kind in kinds for name in dir(kind) if not name.startswith("_")}
    return kinds, names


def test_rules_of_options_name_options_that_commands_have():
    kinds, names = _configs()
    faults = option_faults(kinds, names)
    assert not faults, "\n".join(faults)
    unchecked = sorted(k.__name__ for k in kinds if not issubclass(k, Options))
    assert unchecked == ["StrictnessConfig"]  # three choices that parsing checks


def test_what_an_option_lacks_is_said_in_one_sentence():
    @dataclass(frozen=True, kw_only=True, slots=True)
    class ToyConfig(Options):
        """A part that TrainConfig does not have."""

        toy_scale: float = option(1.0, above=0, needs={"use_toys": ON})
        rules = (Rule(("toy_scale",), lambda v: False, "--toy-scale {toy_scle}"),)

    assert [line.partition(":")[0] for line in option_faults([ToyConfig], {"toy_scale"})] == [
        "ToyConfig.toy_scale names use_toys, which no command has",
        "a rule of ToyConfig names toy_scle, which no command has",
    ]


def family_faults(name: str, cases: Collection[str], shapes: str, page: str) -> list[str]:
    """Say what a Hugging Face family lacks.

    Args:
        name: its ``model_type``.
        cases: keys of the models that are compared with transformers.
        shapes: text of the test that holds sizes against weights.
        page: text of the page that lists the families.
    """
    try:
        find_family(name)
    except LookupError as error:
        return [str(error)]
    found = []
    if name not in OTHER_PARITY and name not in {re.split(r"[ ,]", case)[0] for case in cases}:
        found.append(
            f"{name} is not compared: add it to CASES in tests/parity/family_cases.py."
        )
    if f'"{name}"' not in shapes:
        found.append(
            f"{name} has no sizes: add it to CONFIGS in "
            "packages/mcore-ckpt/tests/families/test_shape_check.py."
        )
    if not re.search(rf"\b{re.escape(name)}\b", page):
        found.append(f"{name} is not listed: add it to packages/mcore-ckpt/README.md.")
    return found


def test_a_family_is_listed_compared_and_held_against_its_weights():
    shapes = ROOT / "packages/mcore-ckpt/tests/families/test_shape_check.py"
    texts = shapes.read_text(), (ROOT / "packages/mcore-ckpt/README.md").read_text()
    faults = [line for name in MODEL_TYPES for line in family_faults(name, CASES, *texts)]
    assert not faults, "\n".join(faults)
    for name, file in OTHER_PARITY.items():
        word = name.replace("-", "").replace("_", "")
        text = (ROOT / file).read_text().replace("-", "").replace("_", "")
        assert word in text.lower(), name


def test_what_a_family_lacks_is_said_in_one_sentence():
    lacks = family_faults("llama", ["mistral, tied"], "", "")
    assert [line.partition(":")[0] for line in lacks] == [
        *("llama is not compared", "llama has no sizes", "llama is not listed"),
    ]
