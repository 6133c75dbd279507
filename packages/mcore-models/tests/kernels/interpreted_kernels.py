"""Every Triton kernel against its reference in plain torch on the CPU, by Triton's interpreter.

Started by test_kernels_interpreted.py with TRITON_INTERPRET=1, which Triton reads when it is
imported, and with the hook that checks shapes, as tests on a GPU have it. Shapes are tiny:
this shows the arithmetic, masks and loops, not the compiled code.
"""

import torch
from torch.nn.functional import normalize
from triton_interpreter import prepare

from mcore_ckpt.formats.quantized_layouts import LAYOUTS
from mcore_infer.engine.fp8_cache import to_codes
from mcore_infer.engine.kernels import paged_attention as kernels_of_decoding
from mcore_infer.engine.kernels.latent_attention import latent_decode
from mcore_infer.engine.kernels.paged_attention import paged_decode
from mcore_infer.engine.kernels.skinny_gemm import few_rows_linear
from mcore_infer.engine.kernels.skinny_gemm_tiles import Tile
from mcore_infer.engine.plain_attention import reference_decode
from mcore_infer.quantization.kernels import widened
from mcore_models.config import KernelConfig, TransformerConfig
from mcore_models.kernel_choice import optional_kernels
from mcore_models.kernels import delta as kernels_of_delta
from mcore_models.kernels import gated_fp8
from mcore_models.kernels import ssd as kernels_of_ssd
from mcore_models.kernels.conv import fused_conv_silu
from mcore_models.kernels.delta import fused_delta_rule
from mcore_models.kernels.gated_norm import fused_gated_norm
from mcore_models.kernels.norm import fused_add_and_norm, fused_norm
from mcore_models.kernels.qk_norm_rope import fused_norm_rotary_split
from mcore_models.kernels.rope import fused_rotary_split
from mcore_models.kernels.ssd import fused_ssd
from mcore_models.layers.fp8_gated_mlp import GatedCast
from mcore_models.layers.norm import LayerNorm, RMSNorm
from mcore_models.layers.recurrent.causal_conv import causal_conv
from mcore_models.layers.recurrent.delta_rule import delta_rule_plain
from mcore_models.layers.recurrent.gated_norm import GatedNorm
from mcore_models.layers.recurrent.ssd import SSD_KERNELS, ssd_plain
from mcore_models.layers.rope import rotate
from mcore_moe.activations import gated, weighted_gated
from mcore_moe.dispatch.permutation import (
    ROWS_KERNELS,
    permute_reference,
    plan_rows_plain,
    unpermute_reference,
)
from mcore_moe.kernels.gate import fused_gated, fused_weighted_gated
from mcore_moe.kernels.rows import copy_to_rows, fused_plan, sum_rows
from mcore_moe.kernels.topk import fused_top_experts
from mcore_moe.routing.topk import TOP_KERNEL, top_experts_plain
from mcore_parallel.grad_slot import grad_slot
from mcore_parallel.kernels import fp8_fine_cast
from mcore_parallel.kernels.adam import fused_adamw
from mcore_parallel.kernels.embedding import add_rows
from mcore_parallel.kernels.fp8_cast import cast_by, largest
from mcore_parallel.kernels.fp8_cast import narrow as cast_flat
from mcore_parallel.kernels.fp8_cast import widen as dequantize_flat
from mcore_parallel.kernels.loss import row_stats, softmax_gradient_
from mcore_parallel.kernels.rounding import fused_round
from mcore_parallel.mesh import SINGLE
from mcore_parallel.optimizers.adamw import adamw_plain
from mcore_parallel.optimizers.rounding import ROUNDING_KERNEL, round_stochastically_plain
from mcore_parallel.optional_kernels import kernel_failure
from mcore_parallel.precision.fp8_cast import cast_plain
from mcore_parallel.precision.fp8_fine_cast import cast_blocks_plain, cast_lines_plain
from mcore_parallel.tensor_parallel.embedding import add_rows_plain
from mcore_parallel.tensor_parallel.linear_cross_entropy import (
    row_stats_plain,
    softmax_gradient_plain,
)


def compare(got, want, rtol=1e-5, atol=2e-5):
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol, equal_nan=True)


def check_rows():
    for dtype in (torch.float32, torch.float64):
        got = torch.randn(11, 70, dtype=dtype)
        want = got.clone()
        ids = torch.randint(-2, 5, (57,))  # long runs, and ids that are no rows
        ids[3] = 99
        rows = torch.randn(57, 70).bfloat16()
        add_rows(got, ids, rows)
        add_rows_plain(want, ids, rows)
        compare([got], [want])


def check_adamw():
    for parameter in (torch.bfloat16, None):
        fused = [torch.randn(3000), torch.randn(3000), torch.zeros(3000), torch.zeros(3000)]
        plain = [t.clone() for t in fused]
        for tensors in (fused, plain):
            main = tensors[0]
            tensors.append(main.to(parameter, copy=True) if parameter else main)
        for step in (1, 2):
            scale = torch.tensor(0.3, dtype=torch.float64) if step == 2 else 0.5
            for update, tensors in ((fused_adamw, fused), (adamw_plain, plain)):
                constants = {"betas": (0.9, 0.95), "epsilon": 1e-8, "grad_scale": scale}
                update(*tensors, num_steps=step, lr=1e-2, weight_decay=0.1, **constants)
        compare(fused[:4], plain[:4], rtol=1e-6, atol=1e-6)
        # The interpreter cuts to bfloat16, hardware rounds.
        compare([fused[4].float()], [fused[0]], rtol=2**-7 if parameter else 0.0, atol=0.0)


def check_rounding():
    wide = torch.randn(3000)
    wide[:4] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf])
    for salt in (0, 1, 0x7FFFFFFF):
        got, want = (torch.empty(3000, dtype=torch.bfloat16) for _ in range(2))
        fused_round(got, wide, salt)
        round_stochastically_plain(want, wide, salt)
        assert torch.equal(got.view(torch.int16), want.view(torch.int16))


def check_loss():
    logits = torch.randn(3, 9000)
    labels = torch.tensor([0, 8999, 30])
    for width in (9000, 8990, 5, 0):
        for has_plain in (True, False):
            arguments = (logits, labels, width, 0, has_plain)
            compare([row_stats(*arguments)], [row_stats_plain(*arguments)], atol=1e-3)
    got, want = logits.clone(), logits.clone()
    others = (labels, logits.logsumexp(1), torch.tensor([1.0, 0.0, 0.5]), 8990, 0, 0.1, 8990)
    softmax_gradient_(got, *others)
    softmax_gradient_plain(want, *others)
    compare([got], [want])


def check_norms():
    for norm in (RMSNorm(130, zero_centered=True), LayerNorm(130), LayerNorm(130, bias=False)):
        parameters = list(norm.parameters())
        for parameter in parameters:
            torch.nn.init.normal_(parameter)
        own = norm.parameters_of_kernel()
        options = {"epsilon": norm.epsilon, "offset": float(norm.zero_centered)}
        x, branch, dy, dtotal = (torch.randn(5, 2, 130) for _ in range(4))
        x.requires_grad_()
        branch.requires_grad_()
        want = norm.add_and_norm(x, branch)
        got = fused_add_and_norm(x, branch, *own, **options)
        compare(got, want)
        grads = [
            torch.autograd.grad(y, [x, branch, *parameters], [dy, dtotal]) for y in (got, want)
        ]
        compare(*grads)
        want, got = norm(x), fused_norm(x, *own, **options)
        expected = torch.autograd.grad(want, [x, *parameters], dy)
        compare([got, *torch.autograd.grad(got, [x, *parameters], dy)], [want, *expected])
        for parameter in parameters:
            grad_slot(parameter).main = torch.ones_like(parameter)
        fused_norm(x, *own, **options).backward(dy)
        assert all(parameter.grad is None for parameter in parameters)
        compare([grad_slot(parameter).main - 1 for parameter in parameters], expected[1:])


def check_gates():
    x = torch.randn(6, 2 * 1500, requires_grad=True)
    weight, dy = torch.rand(6, requires_grad=True), torch.randn(6, 1500)
    for activation in ("silu", "gelu_tanh"):
        got, want = fused_gated(x, activation), gated(x, activation)
        compare([got], [want])
        compare(*[torch.autograd.grad(y, [x], dy) for y in (got, want)])
        end = torch.tensor(5)  # the last row is of no expert
        got = fused_weighted_gated(x, weight, end, activation)
        want = weighted_gated(x, weight, end, activation)
        compare([got[:5]], [want[:5]])
        grads = [torch.autograd.grad(y, [x, weight], dy) for y in (got, want)]
        compare(*([grad[:5] for grad in each] for each in grads), atol=1e-4)


def check_rotation():
    n, g, size = 3, 1, 10
    qkv = torch.randn(4, 2, (n + 2 * g) * size, requires_grad=True)
    angle = torch.randn(4, size // 2)
    tables = angle.cos(), angle.sin()
    got = fused_rotary_split(qkv, *tables, n, g)
    q, k, v = qkv.view(4, 2, n + 2 * g, size).split([n, g, g], 2)
    want = rotate(q, tables), rotate(k, tables), v
    compare(got, want)
    grads = [torch.randn_like(t) for t in want]
    own, expected = [torch.autograd.grad(y, [qkv], grads) for y in (got, want)]
    compare(own, expected)


def check_norm_and_rotation():
    n, g, size = 3, 2, 10
    qkv = torch.randn(5, 2, (n + 2 * g) * size, requires_grad=True)
    norms = [RMSNorm(size, zero_centered=True) for _ in range(2)]
    weights = [norm.weight for norm in norms]
    for weight in weights:
        torch.nn.init.normal_(weight)
    angle = torch.randn(5, size // 2)
    tables = angle.cos(), angle.sin()
    got = fused_norm_rotary_split(qkv, *weights, *tables, n, g, epsilon=1e-5, offset=1.0)
    q, k, v = qkv.view(5, 2, n + 2 * g, size).split([n, g, g], 2)
    want = rotate(norms[0](q), tables), rotate(norms[1](k), tables), v
    compare(got, want)
    grads = [torch.randn_like(t) for t in want]
    compare(*[torch.autograd.grad(y, [qkv, *weights], grads) for y in (got, want)], atol=1e-4)


def check_experts_of_tokens():
    for num_tokens, num_experts, topk in ((0, 3, 1), (1, 1, 1), (44, 5, 3), (7, 9, 9)):
        scores = torch.randn(num_tokens, num_experts).mul(2).round()  # many are equal
        scores[scores == 1] = -0.0
        ids = top_experts_plain(scores, topk)
        assert torch.equal(fused_top_experts(scores, topk), ids)
        dropped = ids.where(torch.rand(ids.shape) < 0.7, num_experts)
        most = int(dropped.flatten().bincount(minlength=num_experts + 1)[:-1].max())
        for chosen, capacity in ((ids, 0), (dropped, 0), (dropped, most + 2)):
            has_all = chosen is ids
            choices, slots, offsets = fused_plan(chosen, num_experts, capacity, has_all=has_all)
            plan = plan_rows_plain(chosen, num_experts, capacity, has_all=has_all)
            num_rows = plan.choices.numel()
            got = choices[:num_rows], slots.clamp(max=num_rows), offsets
            compare(got, [plan.choices.int(), plan.slots.int(), plan.offsets], rtol=0, atol=0)
            x, rows = torch.randn(num_tokens, 1030), torch.randn(num_rows, 1030)
            copied = copy_to_rows(x, slots, num_rows, plan.is_complete)
            compare([copied], [permute_reference(x, plan)])
            compare([sum_rows(rows, slots)], [unpermute_reference(rows, plan)])


def check_fp8_casts():
    for narrow in (torch.float8_e4m3fn, torch.float8_e5m2):
        # Numbers that fp8 holds: the interpreter rounds others wrongly.
        x = (9 * torch.randn(132, 150)).to(narrow).float() * 2.0**-20
        x[3, 5] = -torch.finfo(narrow).max * 2.0**-20
        assert largest(x) == x.abs().max()
        compare(
            [part.float() for part in cast_by(x, largest(x), narrow)],
            [part.float() for part in cast_plain(x, x.abs().max().view(1), narrow)],
            rtol=0,
            atol=0,
        )
        # By an earlier scale, with what was seen now.
        earlier, seen = x.abs().max().view(1) / 4, x.abs().max().view(1) / 2
        got = cast_by(x, earlier, narrow, seen=seen)
        want = cast_plain(x, earlier, narrow)
        compare([part.float() for part in got], [part.float() for part in want], 0, 0)
        assert seen == x.abs().max()
        check_fine_casts(x.bfloat16(), narrow)
        flat, back = torch.empty(x.numel(), dtype=narrow), torch.empty(x.numel())
        cast_flat(x.view(-1), earlier, flat)
        dequantize_flat(flat, earlier, back)
        scaled = cast_plain(x, earlier, narrow)
        compare([flat.float()], [scaled.rows.float().view(-1)], 0, 0)
        compare([back], [flat.float() * scaled.scale_inv], 0, 0)
    for strange in (float("inf"), float("nan")):
        x[7, 7] = strange
        assert cast_by(x, largest(x), torch.float8_e5m2)[2].isnan()
        check_fine_casts(x.bfloat16(), torch.float8_e5m2)


def check_fine_casts(x, narrow):
    pairs = []
    for lines in (x, torch.stack([x, 2 * x.flip(0)])):
        tops = fp8_fine_cast.largest_of_lines(lines)
        compare(tops, (lines.abs().amax(-1).float(), lines.abs().amax(-2).float()), 0, 0)
        got = fp8_fine_cast.cast_lines(lines, *tops, narrow)
        pairs.append((got, cast_lines_plain(lines, *tops, narrow)))
    blocks = x.new_zeros(256, 384)
    blocks[100:232, 100:250] = x
    for is_square in (False, True):
        got = fp8_fine_cast.cast_blocks(blocks, narrow, is_square=is_square)
        pairs.append((got, cast_blocks_plain(blocks, narrow, is_square=is_square)))
    for got, want in pairs:
        for order in (0, 2):
            compare([got[order + 1]], [want[order + 1]], 0, 0)
            lost = want[order].float().isnan()
            # The interpreter rounds some numbers wrongly, and some NaN to infinity.
            assert not got[order].float()[lost].isfinite().any()
            differs = (got[order].float() != want[order].float()) & ~lost
            assert differs.float().mean() < 0.1


def compare_with_gradients(got, want, leaves):
    """Compare results and the gradients of leaves, relative to the largest of each tensor."""
    weights = [torch.randn_like(y) for y in want]
    grads = [
        torch.autograd.grad(y, leaves, weights, materialize_grads=True) for y in (got, want)
    ]
    for a, b in zip((*got, *grads[0]), (*want, *grads[1]), strict=True):
        scale = b.abs().max().clamp(min=1)
        compare([a / scale], [b / scale])


def check_state_space():
    kernels_of_ssd.CHUNK = 16
    for length, first, packed in ((20, True, True), (16, False, False)):
        x = torch.randn(length, 2, 4 * 16 + 5)[..., :64].unflatten(-1, (4, 16))
        dt, A = torch.rand(length, 2, 4) * 0.5, -torch.rand(4) * 4
        B, C = torch.randn(2, length, 2, 2, 32)
        inputs = [t.requires_grad_() for t in (x, dt, A, B, C, torch.randn(4))]
        state = torch.randn(2, 4, 16, 32, requires_grad=True) if first else None
        starts = torch.rand(length, 2) < 0.1 if packed else None
        results = [form(*inputs, starts=starts, state=state) for form in (fused_ssd, ssd_plain)]
        leaves = [*inputs, *([] if state is None else [state])]
        compare_with_gradients(*results, leaves)


def check_delta_rule():
    kernels_of_delta.CHUNK = 32
    for length, heads, packed in ((37, 2, True), (16, 1, False)):
        q, k = normalize(torch.randn(2, length, 1, 1, 16), dim=-1)
        # Keys that hardly differ: powers of their system are huge, its inverse is not.
        k = normalize(k[:1] + 0.1 * k, dim=-1)
        v = torch.randn(length, 1, heads * 16 + 5)[..., : heads * 16].unflatten(-1, (-1, 16))
        decay, share = -torch.rand(length, 1, heads) * 0.1, torch.rand(length, 1, heads)
        leaves = [t.requires_grad_() for t in (q, k, v, decay, share)]
        given = {}
        if packed:
            state = torch.randn(1, heads, 16, 16, requires_grad=True)
            given = {"state": state, "starts": torch.rand(length, 1) < 0.1}
        results = [rule(*leaves, **given) for rule in (fused_delta_rule, delta_rule_plain)]
        compare_with_gradients(*results, [*leaves, state] if packed else leaves)


def check_convolution_and_gated_norm():
    for length, width, packed in ((37, 4, True), (2, 3, False)):
        x = torch.randn(length, 2, 141)[..., :133].requires_grad_()
        weight = torch.randn(133, 1, width, requires_grad=True)
        bias = None if packed else torch.randn(133, requires_grad=True)
        starts = torch.rand(length, 2) < 0.2 if packed else None
        got = fused_conv_silu(x, weight, bias, starts=starts)
        want = torch.nn.functional.silu(causal_conv(x, weight, bias, starts=starts))
        compare_with_gradients([got], [want], [x, weight, *([] if bias is None else [bias])])
    for first in (True, False):
        norm = GatedNorm(80, 2, epsilon=1e-5, axis=SINGLE, holders=SINGLE, gates_first=first)
        torch.nn.init.normal_(norm.weight)
        y, z = torch.randn(5, 2, 80), torch.randn(5, 2, 90)[..., :80]
        leaves = [y.requires_grad_(), z.requires_grad_(), norm.weight]
        got = fused_gated_norm(*leaves, group_size=40, epsilon=1e-5, gates_first=first)
        compare_with_gradients([got], [norm.plain(y, z)], leaves)


def check_gated_casts():
    # More than a tile either way; the interpreter rounds to fp8 wrongly, but always alike.
    x, dy = torch.randn(68, 300).half(), torch.randn(68, 150).half()
    for activation in ("silu", "gelu_tanh"):
        for grad, narrow in ((None, torch.float8_e4m3fn), (dy, torch.float8_e5m2)):
            matrix = GatedCast(x, grad, activation).make()
            amax = matrix.abs().amax().float().view(1)
            compare([gated_fp8.largest(x, grad, activation)], [amax], rtol=1e-3)
            seen = amax / 2
            got = gated_fp8.cast_by(x, grad, activation, amax, narrow, seen=seen)
            want = cast_by(matrix, amax, narrow)
            compare([seen, got.scale_inv], [amax, want[2]], rtol=1e-3)
            for a, b in zip(got[:2], want[:2], strict=True):
                assert (a.float() == b.float()).double().mean() > 0.99


def check_quantized_weights():
    for algo, rows in (("FP8", 20), ("W8A16", 1), ("W4A16_AWQ", 2), ("NVFP4", 2)):
        layout = LAYOUTS[algo]
        weight = torch.randn(70, 256) * torch.randn(70, 1).exp()
        scales = layout.scales(weight)
        packed = layout.packed(layout.quantized(weight, scales))
        kind = packed, layout.wide_scales(scales), layout.code, layout.group
        want = layout.dequantized(packed, scales)
        compare([widened(*kind, torch.float32)], [want], rtol=1e-6)
        x = torch.randn(rows, 256)
        codes = {
            "code": layout.code,
            "group": layout.group,
            "tile": Tile(32, 128, 2, 2, min(rows, 2)),
        }
        got = few_rows_linear(x, packed, layout.wide_scales(scales), **codes)
        compare([got], [x @ want.t()], atol=1e-3)
    x, weight = torch.randn(2, 3, 72), torch.randn(40, 72)
    compare([few_rows_linear(x, weight)], [x @ weight.t()], atol=1e-4)


def check_attention_to_codes():
    q, k, v = torch.randn(2, 4, 16), torch.randn(2, 2, 16), torch.randn(2, 2, 16)
    pages = [to_codes(torch.randn(3, 32, 2, 16), scale) for scale in (0.02, 0.5)]
    tables, lengths = torch.tensor([[2, 1], [0, 0]]), torch.tensor([40, 1])
    where = (*pages, tables, lengths)
    sinks = torch.rand(4)
    for window, programs in ((-1, 4), (5, 264)):  # in one split, and in many
        kernels_of_decoding._PROGRAMS = programs
        for more in ({"chunk": 16, "softcap": 2.0} if window < 0 else {}, {"sinks": sinks}):
            rules = {"window": window, "kv_scales": (0.02, 0.5), **more}
            # The kernel writes to the pages, where the interpreter's casts are not to the
            # nearest.
            got = paged_decode(q, k, v, *where, **rules)
            compare([got], [reference_decode(q, *where, **rules)], atol=1e-5)


def check_latent_attention():
    keys = torch.randn(4, 32, 1, 24)
    tables, lengths = torch.tensor([[2, 1, 3], [0, 0, 0]]), torch.tensor([70, 1])
    for heads, programs in ((3, 264), (40, 1)):  # in many splits, and in two blocks of heads
        kernels_of_decoding._PROGRAMS = programs
        q, where = torch.randn(2, heads, 24), (tables, lengths)
        got = latent_decode(q, keys, *where, value_dim=16)
        compare([got], [reference_decode(q, keys, keys[..., :16], *where)], atol=1e-5)


def check_trials():
    config = TransformerConfig(
        num_layers=2,
        hidden_size=64,  # too narrow for the norms' kernels, whose trial takes long here
        num_attention_heads=8,
        hybrid_override_pattern="M[*-]",
        mamba_head_dim=16,
        mamba_state_dim=16,
    )
    device = torch.device("cpu")
    wanted = optional_kernels(config, KernelConfig(), device, torch.float32)
    wanted += [(SSD_KERNELS, (torch.float32, 16, 16)), (ROUNDING_KERNEL, ())]
    wanted += [(ROWS_KERNELS, ()), (TOP_KERNEL, ())]
    failures = {kernel.name: kernel_failure(kernel, device, *kind) for kernel, kind in wanted}
    assert len(failures) == 11
    assert not any(failures.values()), failures


if __name__ == "__main__":
    prepare()
    for check in (
        check_rows,
        check_adamw,
        check_rounding,
        check_loss,
        check_norms,
        check_gates,
        check_rotation,
        check_norm_and_rotation,
        check_experts_of_tokens,
        check_fp8_casts,
        check_gated_casts,
        check_quantized_weights,
        check_attention_to_codes,
        check_latent_attention,
        check_state_space,
        check_delta_rule,
        check_convolution_and_gated_norm,
        check_trials,
    ):
        torch.manual_seed(0)
        check()
        print(f"{check.__name__}: equal")
