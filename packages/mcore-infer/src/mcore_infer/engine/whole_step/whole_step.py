"""Runs a decoding step of all layers as one CUDA kernel, for few rows of a dense model.

Between separate kernels the memory is idle while one kernel ends and the next begins. The
persistent blocks of ``whole_step.cu`` copy the weights of the next phase while they wait for
each other.
Embedding, last norm and head run in torch. NVRTC, a dependency of torch, compiles the kernel
for the sizes of a model. Imported only if tensors are on a GPU.

Tensor ranks on one host launch the kernel together and write partial sums to each other's
memory, so that a step launches no all-reduces. All ranks use the kernel, or none.
"""

import ctypes
import socket
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from mcore_ckpt.formats.quantized_layouts import LAYOUTS
from mcore_ckpt.save_load.rank_agreement import any_rank, gather_json, raise_on_all_ranks
from mcore_infer.engine.few_rows_gemm import FewRowsGemm, use_few_rows_gemm
from mcore_infer.engine.paged_cache import PagedCache
from mcore_infer.engine.scheduler import Chunk, Step
from mcore_infer.engine.step_layout import DecodeTensors
from mcore_infer.quantization.gated_mlp import RoundedGatedMLP
from mcore_infer.quantization.gemms import InputRounding, QuantizedGemm
from mcore_models.config import TransformerConfig
from mcore_models.gpt import GPT
from mcore_models.layers.attention import Attention
from mcore_models.layers.block import TransformerBlock
from mcore_models.layers.mlp import MLP
from mcore_models.layers.rope import build_rotary
from mcore_models.logical_tensors import head_dim
from mcore_models.protocol import LanguageModel
from mcore_parallel.collectives import all_gather
from mcore_parallel.mesh import SINGLE, Axis, ParallelContext
from mcore_parallel.optional_kernels import (
    OptionalKernel,
    agree_on_kernels,
    give_up,
    works,
)
from mcore_parallel.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear

MOST_ROWS = 8
"""Most rows of a step: the narrow side of a tensor core tile."""
MOST_RANKS = 8
"""Most tensor ranks: the GPUs of one host."""
BUFFERS = 2
"""Buffers of partial sums, which exchanges use in turn (``join_ranks`` in whole_step.cu)."""
_TIMEOUT_CYCLES = 20_000_000_000
"""Clock cycles after which a wait for another rank ends with an error: about 10 s."""
_SOURCE = Path(__file__).with_suffix(".cu")
_WARPS, _COPIERS = 8, 4
_STAGE_BYTES = 16 * (1024 + 64)
_FEWEST_STAGES, _MOST_STAGES = 4, 16
_SHARED_BYTES = 226 * 2**10
"""Shared memory of a block on an H100 or H200, less the kernel's static arrays."""
_MOST_SPLITS = 16
_COMPUTED = {
    "num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "kv_channels",
    "ffn_hidden_size", "max_position_embeddings", "rotary_base",
    "rotary_seq_len_interpolation_factor", "use_rope_scaling", "rope_scaling_factor",
    "rope_scaling_low_freq_factor", "rope_scaling_high_freq_factor",
    "rope_scaling_original_max_position_embeddings", "norm_epsilon", "apply_layernorm_1p",
    "qk_layernorm", "add_qkv_bias", "softmax_scale", "embedding_multiplier",
    "embedding_layernorm", "logits_multiplier", "final_logit_softcapping",
    "untie_embeddings_and_output_weights", "hidden_dropout", "attention_dropout",
    "init_method_std", "embedding_init_method_std", "make_vocab_size_divisible_by",
    "mtp_num_layers", "mtp_loss_scaling_factor", "label_smoothing", "z_loss_coeff",
}  # fmt: skip
"""Config fields that the kernel supports, or that do not change its layers; all other fields
must have their defaults."""


def whole_step(
    model: LanguageModel, cache: PagedCache, inputs: DecodeTensors
) -> "WholeStep | None":
    """Return a runner of the steps of ``inputs``; None: the kernel does not support them.

    Runs one step of ``inputs`` to find failures that depend on the model's sizes. All tensor
    ranks must call this function together; it communicates over ``tp``, and either all ranks
    get a runner or none.
    """
    device, tp = inputs.tokens.device, model.tp
    if any_rank([not _supports(model, cache, inputs)], tp)[0]:
        return None
    assert isinstance(model, GPT)
    attention = _blocks(model)[0].attention
    code, tall = _matrix(attention.qkv)[1:]
    has_norms = attention.q_norm is not None
    kind = head_dim(model.config), code is not None, tall, has_norms, inputs.have_drafts
    kind = *kind, tp if tp.size > 1 else SINGLE
    if tp.size > 1:
        agree_on_kernels([(WHOLE_STEP_KERNEL, kind)], device, tp)
    if not works(WHOLE_STEP_KERNEL, device, *kind):
        return None
    return first_run(model, cache, inputs, kind)


def _supports(model: LanguageModel, cache: PagedCache, inputs: DecodeTensors) -> bool:
    """Return whether the kernel supports the device, model and rows; no communication."""
    capability = torch.cuda.get_device_capability(inputs.tokens.device)
    if capability < (9, 0) or inputs.tokens.shape[1] > MOST_ROWS:
        return False
    if not (isinstance(model, GPT) and computes(model, cache)):
        return False
    return _sizes(model, cache, inputs)["STAGES"] >= _FEWEST_STAGES


def first_run(
    model: GPT, cache: PagedCache, inputs: DecodeTensors, kind: tuple[Hashable, ...]
) -> "WholeStep | None":
    """Build the runner and run one step; on a failure, log a warning and return None.

    A failure on one tensor rank is a failure on all of them.
    """
    device = inputs.tokens.device
    try:
        step = WholeStep(model, cache, inputs)
        with raise_on_all_ranks(model.tp):
            step.hidden()
            torch.cuda.synchronize(device)
    except Exception as error:  # noqa: BLE001 - compiler and driver raise many types
        give_up(WHOLE_STEP_KERNEL, device, *kind, error=error)
        return None
    return step


class WholeStep:
    """Runs the decoding steps of one size of batch with the kernel."""

    def __init__(self, model: GPT, cache: PagedCache, inputs: DecodeTensors) -> None:
        """Compile the kernel for the rows of ``inputs``; the cache must be allocated.

        Communicates over ``tp``: ranks share memory, and raise together if one of them fails.
        """
        self.model, self.inputs = model, inputs
        with raise_on_all_ranks(model.tp):
            self._build(model, cache, inputs)
        tp, device = model.tp, inputs.tokens.device
        rows, width = inputs.tokens.shape[1], model.config.hidden_size
        self._inboxes = Inboxes(BUFFERS * tp.size * rows * width, tp, device)

    def _build(self, model: GPT, cache: PagedCache, inputs: DecodeTensors) -> None:
        device = inputs.tokens.device
        sizes = _sizes(model, cache, inputs)
        capability = "".join(map(str, torch.cuda.get_device_capability(device)))
        stages = sizes["STAGES"] * _STAGE_BYTES
        self._kernel = _Kernel(compiled(sizes, capability), stages + _other_shared_bytes(sizes))
        self._num_blocks = _num_blocks(device)
        rows, F, N, G, H = (sizes[name] for name in ("ROWS", "F", "HEADS", "GROUPS", "H"))
        like: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
        widths = (N + 2 * G) * H, N * H, F
        self._memory = [torch.empty(rows, width, **like) for width in widths]
        parts = rows * N * sizes["SPLITS"] * (H + 2)
        self._memory.append(torch.empty(parts, device=device))
        self._counters = torch.zeros(1 + rows * G, device=device, dtype=torch.int32)
        layers = [_pointers(block, cache) for block in _blocks(model)]
        self._layers = torch.tensor(layers, dtype=torch.int64).to(device)

    def hidden(self) -> Float[Tensor, "R 1 D"]:
        """Return the hidden state after each token of the inputs; the host does not wait."""
        inputs, model = self.inputs, self.model
        x = model.embedded(inputs.tokens, inputs.positions).contiguous()
        rotary = build_rotary(model.config, inputs.positions, x.dtype)
        assert rotary is not None
        self._counters.zero_()
        tensors = (self._layers, x, *self._memory, self._counters, *rotary)
        tensors += inputs.tables, inputs.lengths
        numbers = [tensor.data_ptr() for tensor in tensors]
        numbers += inputs.tables.shape[1], self._layers.shape[0], model.tp.rank
        numbers += self._inboxes.pointers
        self._kernel(self._num_blocks, 32 * (_WARPS + _COPIERS), *numbers)
        return model.final_norm(x)


class Inboxes:
    """Memory of each tensor rank to which the other ranks write partial sums.

    Attributes:
        pointers: addresses of this rank's number of exchanges so far, and of all ranks' inboxes
            in rank order; zeros for one rank.
    """

    def __init__(self, num_words: int, tp: Axis, device: torch.device) -> None:
        """Allocate an inbox of ``num_words`` words of 64 bits; exchange addresses over ``tp``.

        Raises:
            RuntimeError: on all ranks, if they are on several hosts, or if a rank cannot
                allocate symmetric memory.
        """
        self.pointers = [0, 0]
        if tp.size == 1:
            return
        if len(set(gather_json(socket.gethostname(), tp))) > 1:
            raise RuntimeError("the tensor ranks are on several hosts")
        with raise_on_all_ranks(tp):
            symmetric = import_module("torch.distributed._symmetric_memory")
            inbox = symmetric.empty(num_words, dtype=torch.int64, device=device)
            inbox.zero_()  # exchanges are counted from 1, so that 0 is the number of none
            torch.cuda.synchronize(device)
        handle = symmetric.rendezvous(inbox, tp.group)
        exchanges = torch.zeros(1, dtype=torch.int32, device=device)
        inboxes = [
            handle.get_remote_tensor(rank, inbox.shape, inbox.dtype) for rank in range(tp.size)
        ]
        self.pointers = [tensor.data_ptr() for tensor in (exchanges, *inboxes)]
        self._kept_alive = inbox, handle, exchanges, inboxes


class _Kernel:
    """A compiled kernel with one argument, a structure of 64-bit numbers."""

    def __init__(self, binary: bytes, shared_bytes: int) -> None:
        driver = import_module("cuda.bindings.driver")
        self._driver, self._shared_bytes = driver, shared_bytes
        image = ctypes.create_string_buffer(binary, len(binary))
        module = _checked(driver.cuModuleLoadData(ctypes.addressof(image)))
        self._function = _checked(driver.cuModuleGetFunction(module, b"whole_step"))
        name = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _checked(driver.cuFuncSetAttribute(self._function, name, shared_bytes))

    def __call__(self, blocks: int, threads: int, *numbers: int) -> None:
        """Launch on the current stream, cooperatively: the blocks wait for each other."""
        structure = (ctypes.c_int64 * len(numbers))(*numbers)
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(structure))
        _checked(
            self._driver.cuLaunchCooperativeKernel(
                self._function,
                *(blocks, 1, 1, threads, 1, 1, self._shared_bytes),
                self._driver.CUstream(torch.cuda.current_stream().cuda_stream),
                ctypes.addressof(pointers),
            )
        )


def _checked(result: tuple[Any, ...]) -> Any:
    failure, *values = result
    if failure:
        raise RuntimeError(f"CUDA's driver refused the kernel of whole steps: {failure.name}")
    return values[0] if values else None


def compiled(sizes: Mapping[str, int | float], capability: str) -> bytes:
    """Compile the kernel for the sizes that ``whole_step.cu`` lists; needs no GPU."""
    nvrtc = import_module("cuda.bindings.nvrtc")
    source = _SOURCE.read_bytes()
    _, program = nvrtc.nvrtcCreateProgram(source, _SOURCE.name.encode(), 0, None, None)
    options = [f"--gpu-architecture=sm_{capability}a", "--std=c++17"]
    for name, size in sizes.items():
        options.append(f"-D{name}={size}" + "f" * isinstance(size, float))
    (failure,) = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])
    if failure:
        log = b" " * nvrtc.nvrtcGetProgramLogSize(program)[1]
        nvrtc.nvrtcGetProgramLog(program, log)
        raise RuntimeError(log.decode())
    binary = b" " * nvrtc.nvrtcGetCUBINSize(program)[1]
    nvrtc.nvrtcGetCUBIN(program, binary)
    nvrtc.nvrtcDestroyProgram(program)
    return binary


def _sizes(model: GPT, cache: PagedCache, inputs: DecodeTensors) -> dict[str, Any]:
    """Return the values of the macros of ``whole_step.cu``."""
    config, block = model.config, _blocks(model)[0]
    rows, (N, G) = inputs.tokens.shape[1], _num_heads(block)
    _, scales, tall = _matrix(block.attention.qkv)
    # Splits of the keys: as many as leave rows x groups x splits within the number of blocks.
    max_splits = max(1, min(_MOST_SPLITS, _num_blocks(inputs.tokens.device) // (rows * G)))
    sizes = {
        "ROWS": rows,
        "D": config.hidden_size,
        "F": _ffn_size(block),
        "HEADS": N,
        "GROUPS": G,
        "H": head_dim(config),
        "PAGE": cache.page_tokens,
        "SPLITS": 1 << (max_splits.bit_length() - 1),
        "CODES": int(scales is not None),
        "TALL": tall,
        "DRAFTS": int(inputs.have_drafts),
        "EPSILON": float(config.norm_epsilon),
        "OFFSET": float(config.apply_layernorm_1p),
        "SCALE": float(block.attention.score_scale or head_dim(config) ** -0.5),
        "RANKS": model.tp.size,
        "BUFFERS": BUFFERS,
        "TIMEOUT_CYCLES": _TIMEOUT_CYCLES,
    }
    free_bytes = _SHARED_BYTES - _other_shared_bytes(sizes)
    return {**sizes, "STAGES": min(_MOST_STAGES, free_bytes // _STAGE_BYTES)}


def _other_shared_bytes(sizes: Mapping[str, Any]) -> int:
    """Return the bytes of shared memory besides the stages: sums, and inputs or attention."""
    N, G, H = (sizes[name] for name in ("HEADS", "GROUPS", "H"))
    inputs = sizes["ROWS"] * (2 * max(sizes["D"], sizes["F"], N * H) + 64)
    mixed = 16 * (H + 8) + 4 * _WARPS * (N // G) * (H + 2)
    return 8 * _WARPS * 128 + max(inputs, mixed)


def _num_heads(block: Any) -> tuple[int, int]:
    """Return the numbers of query heads and key/value heads of this rank."""
    queries, keys = block.attention.qkv.output_sizes[:2]
    H = head_dim(block.attention.config)
    return queries // H, keys // H


def _ffn_size(block: Any) -> int:
    """Return the width of the MLP on this rank."""
    fc2 = block.mlp.fc2
    return fc2.in_features // fc2.axis.size


def _num_blocks(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def computes(model: GPT, cache: PagedCache) -> bool:
    """Whether the kernel supports all layers of a model."""
    config, blocks = model.config, _blocks(model)
    is_plain = all(
        getattr(config, option.name) == option.default
        for option in fields(config)
        if option.name not in _COMPUTED
    )
    kinds = {
        _kind(linear) for block in blocks if _is_plain(block) for linear in _linears(block)
    }
    return (
        is_plain
        and not any(_is_changed(module) for module in model.modules())
        and all(_is_plain(block) for block in blocks)
        and len(kinds) == 1
        and None not in kinds
        and next(model.parameters()).dtype == torch.bfloat16
        and model.tp.size <= MOST_RANKS
        and not model.sequence_parallel
        and head_dim(config) in (64, 128)
        and _num_heads(blocks[0])[0] // _num_heads(blocks[0])[1] <= 8
        and not config.hidden_size % 64
        and not _ffn_size(blocks[0]) % 64
        and all(cache.layer(block.attention.layer).scales is None for block in blocks)
    )


def _is_changed(module: nn.Module) -> bool:
    """Whether hooks or a replaced ``forward`` change the module, as adapters do."""
    return bool(module._forward_hooks or module._forward_pre_hooks) or "forward" in vars(module)


def _is_plain(block: Any) -> bool:
    if type(block) is not TransformerBlock or block.mixers != ("attention", "mlp"):
        return False
    return type(block.attention) is Attention and type(block.mlp) in (MLP, RoundedGatedMLP)


def _blocks(model: GPT) -> list[Any]:
    return list(model.blocks.values())


def _linears(block: Any) -> list[Any]:
    return [block.attention.qkv, block.attention.proj, block.mlp.fc1, block.mlp.fc2]


def _kind(linear: Any) -> tuple[str, int] | None:
    """Return a weight's format and outputs per scale; None: the kernel does not support it."""
    if type(linear) not in (ColumnParallelLinear, RowParallelLinear):
        return None
    gemm = linear.gemm
    if type(gemm) is FewRowsGemm:
        return "", 0
    if type(gemm) is not QuantizedGemm or gemm.rounding.pre_quant_scale is not None:
        return None
    is_supported = gemm.layout.code == "e4m3" and not gemm.group[1]
    return ("e4m3", gemm.group[0]) if is_supported else None


def _matrix(linear: Any) -> tuple[Tensor, Tensor | None, int]:
    """Return a linear's weight or codes, its scales, and the number of outputs per scale."""
    kind = _kind(linear)
    if kind is None or not kind[0]:
        return linear.weight, None, 0
    return linear.gemm.packed, linear.gemm.scales, kind[1]


def _pointers(block: Any, cache: PagedCache) -> list[int]:
    """Return the pointers of ``struct Layer`` of ``whole_step.cu``."""
    attention = block.attention
    matrices = [_matrix(linear) for linear in _linears(block)]
    held = cache.layer(attention.layer).held
    norms = attention.q_norm, attention.k_norm
    tensors = (
        *(weight for weight, _, _ in matrices),
        *(scales for _, scales, _ in matrices),
        *(block.attention_norm.weight, block.mlp_norm.weight),
        *(None if norm is None else norm.weight for norm in norms),
        attention.qkv.bias,
        *(held.keys, held.values),
    )
    assert all(tensor is None or tensor.is_contiguous() for tensor in tensors)
    return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]


def _trial(
    device: torch.device,
    H: int,
    in_codes: bool,
    tall: int,
    has_norms: bool,
    have_drafts: bool,
    tp: Axis,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield results of the kernel and of torch for steps of two layers.

    Communicates over ``tp`` before the first result is yielded, because a rank whose results
    differ stops reading them.
    """
    config = TransformerConfig(
        num_layers=2,
        hidden_size=256,
        num_attention_heads=6 * tp.size,
        num_query_groups=2 * tp.size,
        kv_channels=H,
        ffn_hidden_size=640 * tp.size,
        max_position_embeddings=1024,
        qk_layernorm=has_norms,
    )
    ctx = ParallelContext.of_tensor_ranks(tp, device)
    model = GPT(config, ctx, vocab_size=64, device="meta", dtype=torch.bfloat16).eval()
    model.to_empty(device=device)
    results = []
    with torch.no_grad():
        # Normal numbers instead of ``wave``, whose sums cancel or grow so that torch's layers
        # in bfloat16 have errors of up to half of the largest element.
        of_all, of_rank = (torch.Generator(device).manual_seed(n) for n in (0, 1 + tp.rank))
        for weight in model.parameters():
            if weight.dim() > 1:  # split over tp
                weight.normal_(0, 0.1, generator=of_rank)
            else:
                weight.normal_(1, 0.1, generator=of_all)
        use_few_rows_gemm(model)
        if in_codes:
            _to_codes(model, tall)
        cache = PagedCache(24, 32)
        inputs = DecodeTensors(3, 8, device, num_drafts=int(have_drafts))
        inputs.fill(Step(()), cache.page_tokens, cache.padding)
        cache.step = inputs
        model(inputs.tokens, inputs.positions, cache)  # allocates the cache
        memories = [cache.layer(layer).held for layer in range(2)]
        pages: list[Any] = [x for memory in memories for x in (memory.keys, memory.values)]
        whole = WholeStep(model, cache, inputs)
        for lengths in ((70, 1, 160), (256, 33, 129)):
            chunks = [
                Chunk(i, i, length - 1, (5 + i,), tuple(range(i, 24, 3)), wants_token=True)
                for i, length in enumerate(lengths)
            ]
            inputs.fill(Step(tuple(chunks)), cache.page_tokens, cache.padding)
            for held in pages:
                held.normal_(generator=of_rank)
            hidden = whole.hidden()
            # All ranks must have the same bits; compared as int32, as NCCL has no int16.
            bits = hidden.view(torch.int32)[None]
            results.append((bits.expand(tp.size, -1, -1, -1), all_gather(bits, tp)))
            written = [held.clone() for held in pages]
            results.append((hidden, model(inputs.tokens, inputs.positions, cache)[0]))
            results += zip(written, [held.clone() for held in pages], strict=True)
    yield from results


def _to_codes(model: GPT, tall: int) -> None:
    """Quantize the linears of a model to e4m3, in place."""
    from mcore_infer.engine.kernels.skinny_gemm import in_codes

    layout = next(layout for layout in LAYOUTS.values() if layout.code == "e4m3")
    for block in _blocks(model):
        for linear in _linears(block):
            packed, scales, _ = in_codes(linear.weight, "e4m3", (tall, 0))
            linear.gemm = QuantizedGemm(layout, packed, scales, (tall, 0), InputRounding(""))


WHOLE_STEP_KERNEL = OptionalKernel(
    "the kernel of whole decoding steps", ("cuda-bindings",), _trial
)
"""Kind: channels of a head, whether weights are in e4m3, outputs that share a scale, whether
queries and keys have norms, whether rows may belong to one request, the tensor ranks."""
