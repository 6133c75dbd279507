"""Triton kernels against their references in plain torch on the CPU, by Triton's interpreter.

Started by test_kernels_interpreted.py with the names of kernels, with TRITON_INTERPRET=1, which
Triton reads when it is imported, and with the hook that checks shapes, as tests on a GPU have
it. Every kernel runs its own samples, and the more awkward ones below; shapes are tiny. This
shows the arithmetic, masks and loops, not the compiled code.
"""

import sys

import torch
from kernel_samples import all_kernels, check
from torch.nn.functional import normalize
from triton_interpreter import prepare

from mcore_ckpt.formats.quantized_layouts import LAYOUTS
from mcore_infer.engine.fp8_cache import to_codes
from mcore_infer.engine.kernels import paged_attention as kernels_of_decoding
from mcore_infer.engine.kernels.latent_attention import latent_decode
from mcore_infer.engine.kernels.page_rounding import round_to_pages
from mcore_infer.engine.kernels.paged_attention import paged_decode
from mcore_infer.engine.kernels.skinny_gemm import few_rows_linear
from mcore_infer.engine.kernels.skinny_gemm_tiles import Tile
from mcore_infer.engine.plain_attention import reference_decode
from mcore_infer.quantization.gemms import InputRounding
from mcore_infer.quantization.kernels import rounded_rows, widened
from mcore_models.kernels import conv, delta, gated_fp8, gated_norm, norm, qk_norm_rope, rope
from mcore_models.kernels import ssd as state_space
from mcore_models.layers.norm import LayerNorm, RMSNorm
from mcore_moe.dispatch.permutation import RowPlan, permute_reference, unpermute_reference
from mcore_moe.kernels import gate, topk
from mcore_moe.kernels import rows as expert_rows
from mcore_parallel.autograd.grad_slot import grad_slot
from mcore_parallel.kernels import adam, embedding, fp8_cast, fp8_fine_cast, loss, rounding
from mcore_parallel.optional_kernels import Sample


def leaf(*shape, **options):
    return torch.randn(*shape, **options).requires_grad_()


def compare(got, want, rtol=1e-5, atol=2e-5):
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol, equal_nan=True)


def of_add_rows():
    for dtype in (torch.float32, torch.float64):
        ids = torch.randint(-2, 5, (57,))  # long runs, and ids that are no rows
        ids[3] = 99
        yield Sample(torch.randn(11, 70, dtype=dtype), ids, torch.randn(57, 70).bfloat16())


def of_adamw():
    main, grad, mean = (torch.randn(3000) for _ in range(3))
    options = {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.9, 0.95), "epsilon": 1e-8}
    for step, parameter in ((1, main.bfloat16()), (2, main)):
        scale = torch.tensor(0.3, dtype=torch.float64) if step == 2 else 0.5
        state = main, grad, mean, mean.square(), parameter
        for flag in (None, torch.tensor(True), torch.tensor(False)):
            yield Sample(*state, num_steps=step, grad_scale=scale, is_applied=flag, **options)


def of_rounding():
    wide = torch.randn(3000)
    wide[:4] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf])
    for salt in (0, 1, 0x7FFFFFFF):
        yield Sample(torch.empty(3000, dtype=torch.bfloat16), wide, salt)


def of_row_stats():
    logits, labels = torch.randn(3, 9000), torch.tensor([0, 8999, 30])
    for width in (9000, 8990, 5, 0):
        for has_plain in (True, False):
            yield Sample(logits, labels, width, 0, has_plain)


def of_softmax_gradient():
    logits, labels = torch.randn(3, 9000), torch.tensor([0, 8999, 30])
    weights = torch.tensor([1.0, 0.0, 0.5])
    yield Sample(logits, labels, logits.logsumexp(1), weights, 8990, 0, 0.1, 8990)


def of_norm(*more):
    x, weight, bias = leaf(5, 2, 130), leaf(130), leaf(130)
    yield Sample(x, *more, weight, None, epsilon=1e-5, offset=1.0)
    yield Sample(x, *more, weight, bias, epsilon=1e-5)
    yield Sample(x, *more, weight, torch.zeros(130), epsilon=1e-5)


def of_gated():
    for activation in gate.KINDS:
        yield Sample(leaf(6, 2 * 1500), activation)


def of_rotation():
    angle = torch.randn(4, 5)
    yield Sample(leaf(4, 2, 5 * 10), angle.cos(), angle.sin(), 3, 1)


def of_norm_and_rotation():
    angle = torch.randn(5, 5)
    tables = angle.cos(), angle.sin()
    qkv = leaf(5, 2, 7 * 10)
    yield Sample(qkv, leaf(10), leaf(10), *tables, 3, 2, epsilon=1e-5, offset=1.0)


def of_top_experts():
    for num_tokens, num_experts, k in ((0, 3, 1), (1, 1, 1), (44, 5, 3), (7, 9, 9)):
        scores = torch.randn(num_tokens, num_experts).mul(2).round()  # many are equal
        scores[scores == 1] = -0.0
        yield Sample(scores, k)


def of_plan():
    for num_tokens, num_experts, k in ((0, 3, 1), (1, 1, 1), (44, 5, 3), (7, 9, 9)):
        ids = torch.rand(num_tokens, num_experts).argsort(1)[:, :k]
        yield Sample(ids, num_experts, has_all=True)
        dropped = ids.where(torch.rand(ids.shape) < 0.7, num_experts)
        most = int(dropped.flatten().bincount(minlength=num_experts + 1)[:-1].max())
        yield Sample(dropped, num_experts, most + 2)


def fp8_matrices():
    x = 9e-6 * torch.randn(132, 150)
    x[3, 5] = 1e-4
    yield x
    for strange in (float("inf"), float("nan")):
        x = x.clone()
        x[7, 7] = strange
        yield x


def of_largest():
    for x in fp8_matrices():
        yield Sample(x)


def of_cast():
    for x in fp8_matrices():
        for narrow in (torch.float8_e4m3fn, torch.float8_e5m2):
            amax = x.abs().max().view(1)
            yield Sample(x, amax, narrow)
            if amax.isfinite():  # by an earlier scale, with what was seen now
                yield Sample(x, amax / 4, narrow, seen=amax / 2)


def stacked():
    for x in fp8_matrices():
        x = x.bfloat16()  # noqa: PLW2901
        yield x
        yield torch.stack([x, 2 * x.flip(0)])


def of_line_tops():
    for x in stacked():
        yield Sample(x)


def of_line_casts():
    for x in stacked():
        for narrow in (torch.float8_e4m3fn, torch.float8_e5m2):
            yield Sample(x, x.abs().amax(-1).float(), x.abs().amax(-2).float(), narrow)


def of_block_casts():
    for x in fp8_matrices():
        blocks = torch.zeros(256, 384, dtype=torch.bfloat16)
        blocks[100:232, 100:250] = x
        for narrow in (torch.float8_e4m3fn, torch.float8_e5m2):
            for is_square in (False, True):
                yield Sample(blocks, narrow, is_square=is_square)


def of_state_space():
    state_space.CHUNK = 16
    for length, first, packed in ((20, True, True), (16, False, False)):
        x = torch.randn(length, 2, 4 * 16 + 5)[..., :64].unflatten(-1, (4, 16))
        dt, A = torch.rand(length, 2, 4) * 0.5, -torch.rand(4) * 4
        B, C = torch.randn(2, length, 2, 2, 32)
        inputs = [t.requires_grad_() for t in (x, dt, A, B, C, torch.randn(4))]
        state = leaf(2, 4, 16, 32) if first else None
        starts = torch.rand(length, 2) < 0.1 if packed else None
        yield Sample(*inputs, starts=starts, state=state)


def of_convolution():
    for length, width, packed in ((37, 4, True), (2, 3, False)):
        x = torch.randn(length, 2, 141)[..., :133].requires_grad_()
        bias = None if packed else leaf(133)
        starts = torch.rand(length, 2) < 0.2 if packed else None
        yield Sample(x, leaf(133, 1, width), bias, starts=starts)


def of_gated_norm():
    for first in (True, False):
        z = torch.randn(5, 2, 90)[..., :80].requires_grad_()
        options = {"group_size": 40, "epsilon": 1e-5, "gates_first": first}
        yield Sample(leaf(5, 2, 80), z, leaf(80), **options)


def of_gated_casts():
    # More than a tile either way.
    x, dy = torch.randn(68, 300).half(), torch.randn(68, 150).half()
    for activation in gate.KINDS:
        for grad, narrow in ((None, torch.float8_e4m3fn), (dy, torch.float8_e5m2)):
            amax = gated_fp8.largest_gated.reference(x, grad, activation)
            yield Sample(x, grad, activation, amax, narrow, seen=amax / 2)


def of_rounding_to_pages():
    # Views of one GEMM's output, scales that are no powers of two, NaN and infinities.
    qkv = torch.randn(40, 8, 16).mul(300)
    qkv[0, :, :3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    pages = [torch.zeros(4, 16, 4, 16, dtype=torch.uint8) for _ in range(2)]
    for dtype in (torch.bfloat16, torch.float32):
        for scales in ((1.0, 1.0), (0.05, 3.0)):
            places = torch.randperm(64)[:40]
            yield Sample(*qkv.to(dtype).split(4, 1), *pages, places, *scales)


MORE_SAMPLES = {
    round_to_pages: of_rounding_to_pages,
    embedding.add_rows_: of_add_rows,
    adam.adamw_update: of_adamw,
    rounding.round_by_salt_: of_rounding,
    loss.row_stats: of_row_stats,
    loss.softmax_gradient_: of_softmax_gradient,
    norm.norm: of_norm,
    norm.add_and_norm: lambda: of_norm(leaf(5, 2, 130)),
    gate.gated: of_gated,
    rope.rotary_split: of_rotation,
    qk_norm_rope.norm_rotary_split: of_norm_and_rotation,
    topk.top_experts: of_top_experts,
    expert_rows.plan_choices: of_plan,
    fp8_cast.largest_magnitude: of_largest,
    fp8_cast.cast_by: of_cast,
    fp8_fine_cast.largest_of_lines: of_line_tops,
    fp8_fine_cast.cast_lines_by: of_line_casts,
    fp8_fine_cast.cast_blocks: of_block_casts,
    state_space.ssd: of_state_space,
    conv.conv_silu: of_convolution,
    gated_norm.gated_norm: of_gated_norm,
    gated_fp8.cast_gated: of_gated_casts,
}
# Rounded to 16 bits between activation and cast, from the last bits of different exponentials.
TOLERANCES = {
    gated_fp8.largest_gated: {"rtol": 1e-3},
    gated_fp8.cast_gated: {"rtol": 1e-3, "share": 0.01},
}


def check_gradients_of_norms_into_main_gradients():
    for module in (RMSNorm(130, zero_centered=True), LayerNorm(130)):
        parameters = list(module.parameters())
        for parameter in parameters:
            torch.nn.init.normal_(parameter)
        x, dy = leaf(5, 2, 130), torch.randn(5, 2, 130)
        expected = torch.autograd.grad(module(x), parameters, dy)
        for parameter in parameters:
            grad_slot(parameter).main = torch.ones_like(parameter)
        options = {"epsilon": module.epsilon, "offset": float(module.zero_centered)}
        norm.norm.launch(x, *module.parameters_of_kernel(x), **options).backward(dy)
        assert all(parameter.grad is None for parameter in parameters)
        compare([grad_slot(parameter).main - 1 for parameter in parameters], expected)


def check_masked_updates_bit_by_bit():
    options = {"num_steps": 2, "lr": 1e-2, "weight_decay": 0.1}
    options |= {"betas": (0.9, 0.95), "epsilon": 1e-8}
    for moments in (torch.float32, torch.bfloat16):
        for parameter in (torch.float32, torch.bfloat16):
            main, grad, mean = (torch.randn(300) for _ in range(3))
            before = [main, grad, mean.to(moments), mean.square().to(moments)]
            before += [main if parameter == torch.float32 else main.to(parameter)]
            results = []
            for flag in (None, torch.tensor(True), torch.tensor(False)):
                tensors = [tensor.clone() for tensor in before]
                if parameter == torch.float32:
                    tensors[4] = tensors[0]
                adam.adamw_update.launch(*tensors, is_applied=flag, **options)
                results.append(tensors)
            assert not torch.equal(results[0][0], main)
            compare(results[1], results[0], rtol=0, atol=0)
            compare(results[2], before, rtol=0, atol=0)


def check_gates_of_rows_in_use():
    x, weight, dy = leaf(6, 2 * 1500), leaf(6), torch.randn(6, 1500)
    end = torch.tensor(5)  # the last row is of no expert
    for activation in gate.KINDS:
        forms = gate.weighted_gated.launch, gate.weighted_gated.reference
        got, want = (form(x, weight, end, activation) for form in forms)
        compare([got[:5]], [want[:5]])
        grads = [torch.autograd.grad(y, [x, weight], dy) for y in (got, want)]
        compare(*([grad[:5] for grad in each] for each in grads), atol=1e-4)


def check_rows_of_dropped_choices():
    for num_tokens, num_experts, k in ((0, 3, 1), (44, 5, 3), (7, 9, 9)):
        ids = torch.rand(num_tokens, num_experts).argsort(1)[:, :k]
        dropped = ids.where(torch.rand(ids.shape) < 0.7, num_experts)
        for chosen in (ids, dropped):
            has_all = chosen is ids
            choices, slots, offsets = expert_rows.plan_choices.launch(
                chosen, num_experts, has_all=has_all
            )
            want = expert_rows.plan_choices.reference(chosen, num_experts, has_all=has_all)
            plan = RowPlan(*want, has_all)
            num_rows = plan.choices.numel()  # kernels have rows of no expert at the end
            got = choices[:num_rows], slots.clamp(max=num_rows), offsets
            compare(got, [plan.choices.int(), plan.slots.int(), plan.offsets], rtol=0, atol=0)
            x, y = torch.randn(num_tokens, 1030), torch.randn(num_rows, 1030)
            copied = expert_rows.copy_to_rows.launch(x, choices[:num_rows], got[1], has_all)
            compare([copied], [permute_reference(x, plan)])
            compare([expert_rows.sum_rows.launch(y, got[1])], [unpermute_reference(y, plan)])


def check_delta_rule_of_narrow_heads():
    delta.CHUNK = 32
    for length, heads, packed in ((37, 2, True), (16, 1, False)):
        q, k = normalize(torch.randn(2, length, 1, 1, 16), dim=-1)
        # Keys that hardly differ: powers of their system are huge, its inverse is not.
        k = normalize(k[:1] + 0.1 * k, dim=-1)
        v = torch.randn(length, 1, heads * 16 + 5)[..., : heads * 16].unflatten(-1, (-1, 16))
        decay, share = -torch.rand(length, 1, heads) * 0.1, torch.rand(length, 1, heads)
        leaves = [t.requires_grad_() for t in (q, k, v, decay, share)]
        given = {}
        if packed:
            given = {"state": leaf(1, heads, 16, 16), "starts": torch.rand(length, 1) < 0.1}
        results = [
            rule(*leaves, **given) for rule in (delta.launch_widths, delta.delta_rule_plain)
        ]
        weights = [torch.randn_like(y) for y in results[1]]
        roots = [*leaves, given["state"]] if packed else leaves
        options = {"materialize_grads": True}
        grads = [torch.autograd.grad(y, roots, weights, **options) for y in results]
        for a, b in zip((*results[0], *grads[0]), (*results[1], *grads[1]), strict=True):
            scale = b.abs().max().clamp(min=1)
            compare([a / scale], [b / scale])


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
    x = 2 * torch.randn(5, 144).bfloat16()
    for code, activation in (("e4m3", ""), ("e4m3", "silu"), ("int8", "gelu_tanh")):
        for known in (None, torch.tensor(0.02)):
            codes, of_rows = rounded_rows(x, code, known, activation=activation, multiple=4)
            assert len(codes) == len(of_rows) == 8
            want = InputRounding(code, known).rounded(
                gate.gated.launch(x, activation) if activation else x
            )
            compare(
                [(codes[:5].float() * of_rows[:5, None]).bfloat16()], [want], rtol=0, atol=0
            )
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


CHECKS = (
    check_gradients_of_norms_into_main_gradients,
    check_masked_updates_bit_by_bit,
    check_gates_of_rows_in_use,
    check_rows_of_dropped_choices,
    check_delta_rule_of_narrow_heads,
    check_quantized_weights,
    check_attention_to_codes,
    check_latent_attention,
)


def main(names):
    prepare()
    kernels = all_kernels()
    for name in names:
        if name not in kernels:
            continue
        kernel, options = kernels[name], TOLERANCES.get(kernels[name], {})
        torch.manual_seed(0)
        check(kernel, kernel.samples(torch.device("cpu")), **options)
        if kernel in MORE_SAMPLES:
            check(kernel, MORE_SAMPLES[kernel](), **options)
        print(f"{name}: equal")
    for function in CHECKS:
        if function.__name__ in names or ("checks" in names and function in CHECKS[2:]):
            torch.manual_seed(0)
            function()
            print(f"{function.__name__}: equal")


if __name__ == "__main__":
    main(sys.argv[1:])
