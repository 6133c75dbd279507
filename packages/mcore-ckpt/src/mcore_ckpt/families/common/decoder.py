"""Llama-like families as data: one ``Decoder`` describes config.json and weights of a family.

A ``Decoder`` lists fixed fields, defaults of transformers, and ``FieldRule`` parts that read
and write fields of both sides together. A field of ours that no part covers must have its
default, so that every family refuses a new field until the field is added to a part.

The old spellings (``rope_theta``, ``rope_scaling``, ``torch_dtype``) and the new ones
(``rope_parameters``, ``dtype``) are read; both are written unless they contradict, so that
every transformers since 4.40 reads a folder.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mcore_ckpt.families.common.fields import (
    DEFAULTS,
    FULL_TOKENS,
    VARIANTS,
    Fields,
    expert_setting,
    no_experts,
    require,
    require_family,
    require_routing,
    setting,
    settings,
)
from mcore_ckpt.families.common.rope import (
    STRETCHED,
    one_rope_table,
    read_rope,
    write_rope,
)
from mcore_ckpt.mapping.rules import Rule, Table
from mcore_models.layer_patterns import pattern_layers
from mcore_models.logical_tensors import (
    ffn_size,
    has_attention_bias,
    has_qkv_bias,
    head_dim,
    is_gated,
    norm_kinds,
    num_kv_heads,
)

Description = Mapping[str, Any]
"""Description of a model in our fields; see ``families``."""

Theirs = dict[str, Any]
"""Fields of a config.json."""

_LONG = 131072
_USUALLY_ABSENT = (
    *("position_embedding_type", "hidden_dropout", "multi_latent_attention"),
    *("rotary_interleaved", "rotary_percent", "window_size", "window_attn_skip_freq"),
    *("normalization", "apply_layernorm_1p", "swiglu", "qk_layernorm"),
    *("add_bias_linear", "add_qkv_bias", *VARIANTS),
)


def _nothing(*_: Any) -> dict[str, Any]:
    return {}


@dataclass(frozen=True, kw_only=True, slots=True)
class FieldRule:
    """Converts a group of our fields from and to the fields of a config.json."""

    covers: tuple[str, ...] = ()
    """Our fields that this rule covers."""
    read: Callable[[Fields, dict[str, Any]], dict[str, Any]] = _nothing
    """Returns our fields, given their fields and our fields read so far."""
    write: Callable[[Description, Theirs], Theirs] = _nothing
    """Returns their fields, given our fields and their fields written so far, which it may
    change."""
    keep: tuple[str, ...] = ()
    """Their fields that this family reads, though most families ignore them."""


def pair(ours: str, theirs: str, default: Any = None, kind: type | None = None) -> FieldRule:
    """Return the rule of a field with the same values and another name in config.json.

    Args:
        ours: our field; omitted from a description where it has our default.
        theirs: their field.
        default: value that transformers assumes if the field is absent; None: it is required.
        kind: type that values are converted to.
    """

    def read(fields: Fields, _: dict[str, Any]) -> dict[str, Any]:
        value = fields.take(theirs, default)
        value = kind(value) if kind else value
        return {} if value == DEFAULTS[ours] else {ours: value}

    def write(description: Description, _: Theirs) -> Theirs:
        return {theirs: setting(description, ours)}

    return FieldRule(covers=(ours,), read=read, write=write)


ATTENTION_BIAS = pair("add_attention_bias", "attention_bias", False)


def _own_heads(_: Description, theirs: Theirs) -> Theirs:
    width = theirs["hidden_size"] // theirs["num_attention_heads"]
    if theirs.pop("head_dim") != width:
        raise ValueError(f"it cannot express --kv-channels: only {width}, hidden size / heads")
    return {}


OWN_HEADS = FieldRule(write=_own_heads)
"""Heads are as wide as the model divided by their number: no field ``head_dim``."""


def _own_groups(description: Description, theirs: Theirs) -> Theirs:
    heads = theirs["num_attention_heads"]
    if theirs.pop("num_key_value_heads") != heads:
        raise ValueError(
            f"it cannot express --num-query-groups: only {heads}, as many as heads"
        )
    return _own_heads(description, theirs)


OWN_GROUPS = FieldRule(covers=("add_qkv_bias",), write=_own_groups)
"""Each query head has separate keys and values; biases in all linears or in none."""


def _fixed_width(_: Description, theirs: Theirs) -> Theirs:
    width = 4 * theirs["hidden_size"]
    if theirs.pop("intermediate_size") != width:
        raise ValueError(f"it cannot express --ffn-hidden-size: only {width}, 4 hidden sizes")
    return {}


FIXED_WIDTH = FieldRule(write=_fixed_width)
"""Feed-forward layers are four times as wide as the model: no field ``intermediate_size``."""


def _read_epsilon(_: Fields, ours: dict[str, Any]) -> dict[str, Any]:
    if ours["norm_epsilon"] != 1e-5:
        raise ValueError(
            f"config.json has layer_norm_eps={ours['norm_epsilon']!r}, which this family "
            "ignores: its norms have 1e-05. Remove the field."
        )
    return {}


def _write_epsilon(_: Description, theirs: Theirs) -> Theirs:
    if (epsilon := theirs.pop("layer_norm_eps")) != 1e-5:
        raise ValueError(f"it cannot express --norm-epsilon {epsilon}: only 1e-05")
    return {}


FIXED_EPSILON = FieldRule(read=_read_epsilon, write=_write_epsilon)
"""The epsilon of LayerNorms is 1e-5: no field ``layer_norm_eps``."""

_PLAIN = {"gelu": "", "gelu_tanh": "openai_gelu", "relu": "relu", "relu2": "squared_relu"}
_GATED = {"silu": "swiglu", "gelu": "exact_geglu", "gelu_tanh": "geglu"}
_TANH = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")
"""Their names of the tanh approximation of GELU."""


def activation_rule(theirs: str, default: str, *, gated: bool = False) -> FieldRule:
    """Return the rule of a family's activation.

    Args:
        theirs: their field.
        default: value that transformers assumes if the field is absent.
        gated: whether feed-forward layers have a gate.
    """
    kinds = _GATED if gated else _PLAIN
    tanh = default if default in _TANH else _TANH[int(gated)]

    def read(fields: Fields, _: dict[str, Any]) -> dict[str, Any]:
        value = fields.take(theirs, default)
        kind = "gelu_tanh" if value in _TANH else value
        if kind not in kinds:
            names = [name for name in (*kinds, *_TANH) if name != "gelu_tanh"]
            raise ValueError(
                f"config.json has {theirs}={value!r}, which mcore cannot represent here: only "
                f"{', '.join(names)}."
            )
        ours = {"swiglu": False, kinds[kind]: True}
        return {name: on for name, on in ours.items() if name and on != DEFAULTS[name]}

    def write(description: Description, _: Theirs) -> Theirs:
        is_set = {kind: setting(description, ours) for kind, ours in kinds.items() if ours}
        kind = next((kind for kind, on in is_set.items() if on), "gelu")
        others = {*_PLAIN.values(), *_GATED.values(), "quick_geglu"} - {"", kinds.get(kind)}
        require(description, **dict.fromkeys(sorted(others), False))
        if not kinds.get(kind) and gated:
            raise ValueError(f"it cannot express {kind} without a gate")
        return {theirs: tanh if kind == "gelu_tanh" else kind}

    names = {*_PLAIN.values(), *_GATED.values()} - {""}
    return FieldRule(covers=tuple(sorted(names)), read=read, write=write)


def both_dropouts(first: str, second: str, default: float) -> FieldRule:
    """Return the rule of two of their fields that must both equal our ``hidden_dropout``."""

    def read(fields: Fields, _: dict[str, Any]) -> dict[str, Any]:
        dropout = fields.take(first, default)
        fields.must_be(second, dropout)
        return {"hidden_dropout": dropout}

    def write(description: Description, _: Theirs) -> Theirs:
        return dict.fromkeys((first, second), setting(description, "hidden_dropout"))

    return FieldRule(covers=("hidden_dropout",), read=read, write=write)


@dataclass(frozen=True, kw_only=True, slots=True)
class Decoder:
    """A Llama-like family: its config.json and its weights."""

    model_type: str
    """``model_type`` in config.json."""
    architecture: str
    """Class in config.json's ``architectures``."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Our fields with the same value in all models of the family."""
    field_names: Mapping[str, str] = field(default_factory=dict)
    """The family's name of each field that has another name in most families."""
    rotates: bool = True
    """Whether queries and keys rotate; if not, ``fixed`` sets ``position_embedding_type``."""
    stretched_layers: str = ""
    """Layer type whose positions ``rope_scaling`` stretches; empty: all layers."""
    absent: Mapping[str, Any] = field(default_factory=dict)
    """Values that transformers assumes for absent fields, if they differ from Llama's."""
    only: Mapping[str, Any] = field(default_factory=dict)
    """Their fields with one allowed value, which is written."""
    refused: Mapping[str, Any] = field(default_factory=dict)
    """Their fields with one allowed value, which is not written."""
    unread: tuple[str, ...] = ()
    """Their fields that are copied without being read, for inference engines."""
    dropped: tuple[str, ...] = ()
    """Their fields about weights that are not converted."""
    parts: tuple[FieldRule, ...] = ()
    """Rules beyond sizes, norms, ties and rotary positions, applied in this order."""
    experts: FieldRule | None = None
    """Rule of the MoEConfig fields; None: no experts."""
    layers: tuple[str, ...] = ()
    """Layer types allowed in ``--hybrid-override-pattern``; empty: no pattern."""
    activation: tuple[str, str] = ("hidden_act", "silu")
    """Field and value of the activation; empty: a part covers it."""
    epsilon: str = "rms_norm_eps"
    """Their field of the norms' epsilon."""
    theta: float = 10000.0
    """Rotary base if config.json states none."""
    partial: float = 0.0
    """Share of each head that rotates if config.json states none; 0: whole heads, and any other
    value in config.json is refused."""
    normalize: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict
    """Rewrites the family's spellings of a config.json into the usual ones."""
    weights: Callable[[Description], Table] | None = None
    """Returns the rules of the weights; None: ``decoder_table``."""
    as_stored: Callable[[dict[str, Any], Collection[str]], dict[str, Any]] | None = None
    """See ``families``."""
    renames: Callable[[Collection[str]], dict[str, str]] | None = None
    """See ``families``."""
    carries: tuple[str, ...] = ()
    """Their fields that are copied in addition to ``unread``."""

    def to_ours(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Convert a config.json to a description."""
        keep = tuple(name for part in self._all_parts() for name in part.keep)
        usual = {theirs: name for name, theirs in self.field_names.items()}
        renamed = {usual.get(name, name): value for name, value in config.items()}
        if self.rotates:
            renamed = one_rope_table(renamed, self.stretched_layers)
        try:
            normalized = self.normalize(renamed)
        except KeyError as error:
            raise ValueError(f"config.json lacks {error.args[0]}.") from None
        fields = Fields(normalized, keep=keep, absent=self.absent)
        for name, value in {**self.only, **self.refused}.items():
            fields.must_be(name, value)
        for name in (*self.unread, *self.dropped):
            fields.maybe(name)
        if self.activation[0]:
            fields.must_be(*self.activation)
        ours = self._read_common(fields) | dict(self.fixed)
        kinds, count = normalized.get("layer_types"), ours["num_layers"]
        if isinstance(kinds, list) and len(kinds) != count:
            raise ValueError(
                f"config.json has {len(kinds)} layer_types for num_hidden_layers={count}: it "
                "must name the kind of each layer."
            )
        for part in self.parts:
            ours |= part.read(fields, ours)
        moe = self.experts.read(fields, ours) if self.experts else {}
        return fields.described(ours, moe)

    def _all_parts(self) -> tuple[FieldRule, ...]:
        return self.parts if self.experts is None else (*self.parts, self.experts)

    def _read_common(self, fields: Fields) -> dict[str, Any]:
        """Read the fields of all families: sizes, norms, ties, rotary positions."""
        heads = fields.take("num_attention_heads")
        hidden = fields.take("hidden_size")
        usual = fields.take("norm_eps", 1e-6) if self.epsilon == "rms_norm_eps" else None
        limit = fields.take("max_position_embeddings", 0)
        ours: dict[str, Any] = {
            "num_layers": fields.take("num_hidden_layers"),
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "num_query_groups": fields.take("num_key_value_heads", heads),
            "kv_channels": fields.take("head_dim", hidden // heads),
            "ffn_hidden_size": fields.take("intermediate_size"),
            "max_position_embeddings": limit,
            "norm_epsilon": fields.take(self.epsilon, usual),
            "attention_dropout": fields.take("attention_dropout", 0.0),
            "init_method_std": fields.take("initializer_range", 0.02),
            "untie_embeddings_and_output_weights": not fields.take(
                "tie_word_embeddings", False
            ),
        }
        if not self.rotates:
            return ours
        ours |= read_rope(fields, limit, theta=self.theta, partial=self.partial or 1.0)
        if not self.partial and ours["rotary_percent"] != 1.0:
            raise ValueError(
                f"config.json has partial_rotary_factor={ours['rotary_percent']!r}, which this "
                "family ignores, as it rotates whole heads. Remove the field."
            )
        return ours

    def to_theirs(self, description: Description) -> dict[str, Any]:
        """Convert a description to a config.json."""
        require_family(description, "gpt")
        if self.layers:
            checked_layers(description, *self.layers)
        if self.experts is None:
            no_experts(description)
        covered = {name for part in self._all_parts() for name in part.covers}
        covered |= set(STRETCHED) if self.rotates else set()
        covered |= {"rotary_percent"} if self.partial else set()
        covered |= {"hybrid_override_pattern"} if self.layers else set()
        plain = {name: DEFAULTS[name] for name in _USUALLY_ABSENT if name not in covered}
        require(description, **{**self.fixed, **plain, **self.fixed})
        theirs = self._write_common(description)
        for part in self.parts:
            theirs |= part.write(description, theirs)
        if self.experts is not None:
            require_routing(description, FULL_TOKENS)
            theirs |= self.experts.write(description, theirs)
        return {
            self.field_names.get(name, name): v for name, v in {**theirs, **self.only}.items()
        }

    def _write_common(self, description: Description) -> Theirs:
        config = settings(description)
        theirs: Theirs = {
            "model_type": self.model_type,
            "architectures": [self.architecture],
            "vocab_size": description["vocab_size"],
            "hidden_size": config.hidden_size,
            "intermediate_size": ffn_size(config),
            "num_hidden_layers": config.num_layers,
            "num_attention_heads": config.num_attention_heads,
            "num_key_value_heads": num_kv_heads(config),
            "head_dim": head_dim(config),
            # 0 is no limit here; transformers requires a number.
            "max_position_embeddings": config.max_position_embeddings or _LONG,
            "initializer_range": config.init_method_std,
            self.epsilon: config.norm_epsilon,
            "attention_dropout": config.attention_dropout,
            "tie_word_embeddings": not config.untie_embeddings_and_output_weights,
            **(write_rope(description) if self.rotates else {}),
        }
        if self.activation[0]:
            theirs |= [self.activation]
        if self.partial not in (0.0, 1.0):
            theirs["partial_rotary_factor"] = config.rotary_percent
            theirs["rope_parameters"]["partial_rotary_factor"] = config.rotary_percent
        return theirs

    def table(self, description: Description) -> Table:
        """Return the rules of the weights."""
        return (self.weights or decoder_table)(description)


def checked_layers(description: Description, *known: str) -> tuple[str, ...]:
    """Return the layers of a hybrid pattern; ValueError for types that the family lacks."""
    require_family(description, "gpt")
    pattern = setting(description, "hybrid_override_pattern")
    layers = pattern_layers(pattern)
    if not layers or not set(layers) <= set(known):
        kinds = ", ".join(one if len(one) == 1 else f"[{one}]" for one in known)
        raise ValueError(
            f"it cannot express --hybrid-override-pattern {pattern!r}: only {kinds}"
        )
    return layers


NORMS = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
"""Norms before attention and before the feed-forward layer."""

ANGLES = ("*.rotary_emb.inv_freq",)
"""Patterns of rotary frequencies in old folders, which are computed instead."""


def decoder_table(
    description: Mapping[str, Any],
    mlp: Iterable[Rule] | None = None,
    norms: Mapping[str, str] | None = None,
    extra: Iterable[Rule] = (),
) -> Table:
    """Return the rules of a Llama-like model's weights.

    Args:
        description: description of the model.
        mlp: rules of the feed-forward layers; None: a dense MLP.
        norms: our names of a layer's norms and theirs; None: a norm before each half.
        extra: rules to append.
    """
    halves = mlp_rules(description) if mlp is None else mlp
    rules = around(description, [*attention_rules(description, norms), *halves])
    return Table(
        (*rules, *extra),
        setting(description, "num_layers"),
        expert_setting(description, "num_experts"),
        droppable=ANGLES,
        copies=tied_copies(description),
    )


def attention_rules(
    description: Mapping[str, Any], norms: Mapping[str, str] | None = None
) -> list[Rule]:
    """Return the rules of a layer's norms and attention projections, with their biases.

    Args:
        description: description of the model.
        norms: our names of the norms and theirs; None: a norm before each half.
    """
    config = settings(description)
    rules = [
        Rule(f"blocks.*.{ours}.{kind}", f"model.layers.*.{theirs}.{kind}")
        for ours, theirs in (NORMS if norms is None else norms).items()
        for kind in norm_kinds(config)
    ]
    for kind in ("weight", "bias"):
        if kind == "weight" or has_qkv_bias(config):
            rules += [
                Rule(
                    f"blocks.*.attention.qkv.{part}.{kind}",
                    f"model.layers.*.self_attn.{part}_proj.{kind}",
                )
                for part in "qkv"
            ]
        if kind == "weight" or has_attention_bias(config):
            there = f"model.layers.*.self_attn.o_proj.{kind}"
            rules.append(Rule(f"blocks.*.attention.proj.{kind}", there))
    return rules + (qk_norm_rules() if setting(description, "qk_layernorm") else [])


def qk_norm_rules() -> list[Rule]:
    """Return the rules of the norms on each head's queries and keys."""
    return [
        Rule(
            f"blocks.*.attention.{part}_norm.weight",
            f"model.layers.*.self_attn.{part}_norm.weight",
        )
        for part in ("q", "k")
    ]


def mlp_rules(
    description: Mapping[str, Any], layers: tuple[int, ...] | None = None
) -> list[Rule]:
    """Return the rules of a feed-forward layer, gated or not."""
    gated = is_gated(settings(description))
    names = {"fc1.gate": "gate_proj", "fc1.up": "up_proj"} if gated else {"fc1": "up_proj"}
    kinds = ("weight", "bias") if setting(description, "add_bias_linear") else ("weight",)
    return [
        Rule(
            f"blocks.*.mlp.{ours}.{kind}", f"model.layers.*.mlp.{theirs}.{kind}", layers=layers
        )
        for kind in kinds
        for ours, theirs in {**names, "fc2": "down_proj"}.items()
    ]


def gated_rules(
    ours: str,
    theirs: str,
    layers: tuple[int, ...] | None = None,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> list[Rule]:
    """Return the rules of a gated network without biases.

    Args:
        ours: prefix of our names within a layer, up to the dot.
        theirs: prefix of their names within a layer, up to the dot.
        layers: layers that have the network; None: all.
        names: their names of gate, up- and down-projection.
    """
    return [
        Rule(
            f"blocks.*.{ours}{mine}.weight",
            f"model.layers.*.{theirs}{name}.weight",
            layers=layers,
        )
        for mine, name in zip(("fc1.gate", "fc1.up", "fc2"), names, strict=True)
    ]


def around(description: Mapping[str, Any], layer_rules: Iterable[Rule]) -> tuple[Rule, ...]:
    """Return rules of embedding, layers, final norm and head, in this order."""
    head = [Rule("head.weight", "lm_head.weight")]
    kinds = norm_kinds(settings(description))
    return (
        Rule("embedding.weight", "model.embed_tokens.weight"),
        *layer_rules,
        *(Rule(f"final_norm.{kind}", f"model.norm.{kind}") for kind in kinds),
        *(head if setting(description, "untie_embeddings_and_output_weights") else []),
    )


def tied_copies(description: Mapping[str, Any]) -> dict[str, str]:
    """Return the head as a copy of the embedding if they are tied; else empty."""
    if setting(description, "untie_embeddings_and_output_weights"):
        return {}
    return {"lm_head.weight": "model.embed_tokens.weight"}


def with_head(
    description: Mapping[str, Any],
    rules: Iterable[Rule],
    embedding: str,
    head: str = "lm_head.weight",
    droppable: tuple[str, ...] = (),
) -> Table:
    """Return a table of rules with the head added: separate, or a copy of the embedding.

    Args:
        description: description of the model.
        rules: rules of all weights but the head.
        embedding: their name of the embedding.
        head: their name of the head.
        droppable: patterns of their names that are ignored.
    """
    is_untied = setting(description, "untie_embeddings_and_output_weights")
    last = [Rule("head.weight", head)] if is_untied else []
    return Table(
        (*rules, *last),
        setting(description, "num_layers"),
        expert_setting(description, "num_experts"),
        droppable=droppable,
        copies={} if is_untied else {head: embedding},
    )


def below_transformer(names: Collection[str]) -> dict[str, str]:
    """Return the names below ``transformer.`` of a bare model's tensors, by present name."""
    if any(name.startswith("transformer.") for name in names):
        return {}
    return {name: f"transformer.{name}" for name in names if name != "lm_head.weight"}
