"""The kernels of decoding compile for an H100 or H200: no GPU is needed to see that."""

import pytest

pytest.importorskip("triton")


def compiled(function, types, constants):
    """Compile a Triton kernel for compute capability 9.0."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    source = ASTSource(
        fn=function,
        signature={**types, **dict.fromkeys(constants, "constexpr")},
        constexprs={(function.arg_names.index(n),): v for n, v in constants.items()},
    )
    return compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]


ATTENTION = {
    "N": 4,
    "G": 2,
    "H": 16,
    "Z": 16,
    "LANES": 16,
    "HEADS": 8,
    "KEYS": 32,
    "SPLITS": 2,
}
TILE = {"ROWS": 8, "OUTS": 32, "STEP": 64, "STAGES": 2, "PRECISION": "tf32", "IS_PACKED": True}


def test_the_kernels_of_decoding_compile():
    from mcore_infer.engine import few_rows, kernels
    from mcore_infer.quantization.kernels import _round_row

    names = ("q", "new_keys", "new_values", "keys", "values")
    types = {
        **dict.fromkeys(names, "*bf16"),
        **dict.fromkeys(("tables", "lengths"), "*i64"),
        **dict.fromkeys(("parts", "sums"), "*fp32"),
        **dict.fromkeys(("scale", "key_scale", "value_scale"), "fp32"),
        **dict.fromkeys(("window", "table_size"), "i32"),
        **dict.fromkeys(("new_key_stride", "new_value_stride"), "i32"),
    }
    for held, is_fp8 in (("*bf16", False), ("*u8", True)):
        own = types | {"keys": held, "values": held}
        options = {**ATTENTION, "PRECISION": "tf32", "IS_FP8": is_fp8}
        assert compiled(kernels._attend, own, options)
    types = {
        **dict.fromkeys(("x", "weight", "out"), "*bf16"),
        **dict.fromkeys(("scales", "parts"), "*fp32"),
        "counters": "*i32",
        **dict.fromkeys("MNDWS", "i32"),
    }
    for code, group, splits in (
        *(("", (0, 0), 1), ("e4m3", (0, 0), 2), ("int8", (1, 0), 1)),
        *(("int4", (1, 64), 2), ("e2m1", (1, 16), 1)),
    ):
        own = types | ({"weight": "*u8"} if code else {})
        tile = {**TILE, "CODE": code, "TALL": group[0], "WIDE": group[1], "SPLITS": splits}
        assert compiled(few_rows._few_rows, own, {**tile, "IS_EVEN": not code})
    types = {"x": "*bf16", "known": "*fp32", "codes": "*fp8e4nv", "scales": "*fp32", "D": "i32"}
    options = {"LIMIT": 448.0, "IS_KNOWN": False, "IS_FLOAT": True, "LANES": 64}
    assert compiled(_round_row, types, options)
