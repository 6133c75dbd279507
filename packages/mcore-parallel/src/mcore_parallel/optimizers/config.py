"""Options of the optimizers: constants of the update rules and formats of their state.

Imports no torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, Literal

from mcore_base.options import ON, Because, Options, Rule, option

OptimizerName = Literal["adam", "sgd", "lion", "muon", "soap", "adafactor", "schedule_free"]
"""Choices of --optimizer."""

MATRIX_OPTIMIZERS = ("muon", "soap", "adafactor")
"""Choices of --optimizer that update matrices; AdamW updates all other parameters."""

NUM_MOMENTS: Mapping[str, int] = MappingProxyType(
    {"adam": 2, "sgd": 1, "lion": 1, "schedule_free": 3, "muon": 1, "soap": 0, "adafactor": 0}
)
"""Moments that an optimizer stores for each weight, for memory estimates. Those of a matrix
optimizer are of weights in matrices; state of another shape is in its ``state_shapes``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamConfig(Options):
    """AdamW: decoupled weight decay, bias correction (Loshchilov and Hutter 2019).

    With a matrix optimizer, AdamW updates the other parameters: embeddings, head, norms,
    biases, routers.
    """

    part_of: ClassVar = {"optimizer": ("adam", *MATRIX_OPTIMIZERS)}

    adam_beta1: float = option(0.9, minimum=0, below=1)
    """Decay of the mean of gradients, 0 to below 1."""

    adam_beta2: float = option(0.999, minimum=0, below=1)
    """Decay of the mean of squared gradients, 0 to below 1."""

    adam_eps: float = option(1e-8, above=0)
    """Added to the root of the mean square; above 0."""

    exp_avg_dtype: Literal["fp32", "bf16"] = "fp32"
    """Format in which the mean of gradients is kept: fp32 or bf16. Computed in fp32."""

    exp_avg_sq_dtype: Literal["fp32", "bf16"] = "fp32"
    """Format in which the mean of squared gradients is kept: fp32 or bf16. bf16 holds steps of
    no less than 0.4 %, so it needs an --adam-beta2 of about 0.95."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SGDConfig(Options):
    """Stochastic gradient descent with momentum."""

    part_of: ClassVar = {"optimizer": "sgd"}

    sgd_momentum: float = option(0.9, minimum=0, below=1)
    """Share of the last update in the next, 0 to below 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LionConfig(Options):
    """Lion: the sign of an interpolated momentum (Chen et al. 2023, arXiv:2302.06675)."""

    part_of: ClassVar = {"optimizer": "lion"}

    lion_beta1: float = option(0.95, minimum=0, below=1)
    """Share of the momentum in the update, 0 to below 1."""

    lion_beta2: float = option(0.98, minimum=0, below=1)
    """Decay of the momentum, 0 to below 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleFreeConfig(Options):
    """Schedule-Free AdamW: averaging in place of a decay (Defazio et al. 2024)."""

    part_of: ClassVar = {"optimizer": "schedule_free"}

    schedule_free_beta1: float = option(0.9, above=0, below=1)
    """Share of the averaged weights in the weights at which gradients are computed; above 0."""

    schedule_free_beta2: float = option(0.999, minimum=0, below=1)
    """Decay of the mean of squared gradients, 0 to below 1."""

    schedule_free_eps: float = option(1e-8, above=0)
    """Added to the root of the mean square; above 0."""

    schedule_free_r: float = option(0.0, minimum=0)
    """Power r: step t has a weight of about t^r in the average; 0: equal weights. With 1 or 2
    the average forgets a long warm-up."""

    rules = (
        Rule(
            ("optimizer", "lr_decay_style"),
            lambda v: v.optimizer == "schedule_free" and v.lr_decay_style != "constant",
            "--optimizer schedule_free needs no decay of the learning rate: give "
            "--lr-decay-style constant, and a warm-up.",
        ),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class MuonConfig(Options):
    """Muon: orthogonalized momentum of whole matrices (Jordan et al. 2024)."""

    part_of: ClassVar = {"optimizer": "muon"}

    muon_momentum: float = option(0.9, minimum=0, below=1)
    """Decay of the mean of gradients, 0 to below 1."""

    muon_nesterov: bool = False
    """Orthogonalize the mean of gradients one step ahead: Nesterov's momentum."""

    muon_split_qkv: bool = True
    """Orthogonalize the query, key and value matrices of a layer separately; off: as one matrix
    of all their rows."""

    muon_coefficient_type: Literal["simple", "quintic", "polar_express"] = "quintic"
    """Polynomials of the Newton-Schulz iteration: simple, one for all steps, as in the first
    Muon; quintic, five fitted ones; polar_express, the best for each step. The last of a list
    repeats."""

    muon_num_ns_steps: int = option(5, minimum=1)
    """Steps of the Newton-Schulz iteration."""

    muon_scale_mode: Literal["spectral", "unit_rms_norm", "shape_scaling"] = option(
        "spectral", needs={"muon_moment2_method": "none"}
    )
    """Factor on the update of a matrix of m outputs and n inputs: spectral, sqrt(max(m, n));
    unit_rms_norm, sqrt(m / n); shape_scaling, sqrt(max(1, m / n))."""

    muon_extra_scale_factor: float = option(1.0, above=0)
    """Another factor on updates of matrices. With 0.2 and spectral they are as large as AdamW's
    updates, so that one learning rate fits both."""

    muon_tp_mode: Literal["blockwise", "duplicated", "distributed"] = "distributed"
    """How matrices that tensor ranks share are computed: distributed, each whole matrix on one
    rank; duplicated, each whole matrix on all tensor ranks, so that no result is sent between
    them; blockwise, each rank's block as a separate matrix: without messages between tensor
    ranks, but the update differs from that on one rank. Megatron's default: blockwise."""

    muon_moment2_method: Literal["none", "adamuon", "normuon"] = "none"
    """Second moment that divides the orthogonalized momentum: adamuon, of each element;
    normuon, of each row. Both scale an update to a root mean square of 0.2."""

    muon_beta2: float = option(
        0.95, minimum=0, below=1, needs={"muon_moment2_method": ("adamuon", "normuon")}
    )
    """Decay of the second moment, 0 to below 1."""

    muon_eps: float = option(
        1e-8, above=0, needs={"muon_moment2_method": ("adamuon", "normuon")}
    )
    """Added to the root of the second moment; above 0."""

    def state_shapes(self, shape: tuple[int, ...]) -> Mapping[str, tuple[int, ...]]:
        """Return the shape of the second moment: elementwise (AdaMuon) or by row (NorMuon)."""
        kinds = {"none": {}, "adamuon": {"square": shape}, "normuon": {"square": shape[:1]}}
        return kinds[self.muon_moment2_method]

    rules = (
        Rule(
            ("muon_tp_mode", "muon_moment2_method"),
            lambda v: v.muon_tp_mode == "duplicated" and v.muon_moment2_method != "none",
            "--muon-tp-mode duplicated keeps no state of whole matrices: use distributed with "
            "--muon-moment2-method {muon_moment2_method}.",
        ),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class SoapConfig(Options):
    """SOAP: Adam in the eigenbasis of Shampoo (Vyas et al. 2024, arXiv:2409.11321)."""

    part_of: ClassVar = {"optimizer": "soap"}

    soap_beta1: float = option(0.95, minimum=0, below=1)
    """Decay of the mean of gradients, 0 to below 1."""

    soap_beta2: float = option(0.95, minimum=0, below=1)
    """Decay of the mean of squared rotated gradients, 0 to below 1."""

    soap_eps: float = option(1e-8, above=0)
    """Added to the root of the mean square; above 0."""

    soap_shampoo_beta: float = option(0.95, minimum=0, below=1)
    """Decay of the means of G G^T and G^T G, 0 to below 1."""

    soap_precondition_frequency: int = option(10, minimum=1)
    """Steps between two updates of the eigenbasis."""

    soap_max_dim: int = option(8192, minimum=1)
    """Longest side of a matrix that is rotated; longer sides are not rotated."""

    def state_shapes(self, shape: tuple[int, ...]) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of Adam's moments, and of a rotated side's mean and basis."""
        shapes: dict[str, tuple[int, ...]] = {"exp_avg": shape, "exp_avg_sq": shape}
        for side, size in zip(("left", "right"), shape, strict=True):
            if size <= self.soap_max_dim:
                shapes |= {side: (size, size), f"{side}_basis": (size, size)}
        return shapes


@dataclass(frozen=True, kw_only=True, slots=True)
class AdafactorConfig(Options):
    """Adafactor: a factored second moment (Shazeer and Stern 2018, arXiv:1804.04235)."""

    part_of: ClassVar = {"optimizer": "adafactor"}

    adafactor_beta2_decay: float = option(-0.8, below=0)
    """Exponent d: step t has a share of t^d in the second moment."""

    adafactor_clip_threshold: float = option(1.0, above=0)
    """Largest root mean square of the update of a matrix; larger updates are scaled down."""

    def state_shapes(self, shape: tuple[int, ...]) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of the mean squares of rows and columns."""
        return {"row": shape[:1], "column": shape[1:]}


@dataclass(frozen=True, kw_only=True, slots=True)
class MainWeightsConfig(Options):
    """Main weights and averaged weights that the optimizer keeps."""

    main_params_dtype: Literal["fp32", "bf16"] = option("fp32", needs={"bf16": ON})
    """Format of the main weights of 16-bit weights. bf16: no main weights are kept; updates are
    computed in fp32 and rounded stochastically to bf16, so that small updates are not lost.
    Saves 4 bytes a weight."""

    ema_decay: float = option(
        0.0,
        minimum=0,
        below=1,
        excludes={"optimizer": Because("which averages weights itself", "schedule_free")},
    )
    """Decay, such as 0.999, of an exponential moving average of the weights; 0: no average. The
    average is float32, sharded and saved like moments, 4 bytes a weight; --eval-average-weights
    evaluates it and mcore-ckpt average RUN writes it as a model."""

    rules = (
        Rule(
            ("main_params_dtype", "is_fully_sharded", "main_grads_dtype"),
            lambda v: (
                v.main_params_dtype == "bf16"
                and v.is_fully_sharded
                and v.main_grads_dtype == "fp32"
            ),
            "--main-params-dtype bf16: {sharding} keeps float32 rows, which are main weights: "
            "add --main-grads-dtype bf16, with which rows are bf16 too.",
        ),
    )
