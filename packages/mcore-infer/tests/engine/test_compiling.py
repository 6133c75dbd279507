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


def test_the_kernels_of_decoding_compile():
    from mcore_infer.engine import few_rows, kernels

    bf16 = ("q", "new_keys", "new_values", "keys", "values")
    types = {
        **dict.fromkeys(bf16, "*bf16"),
        **dict.fromkeys(("tables", "lengths"), "*i64"),
        **dict.fromkeys(("parts", "sums"), "*fp32"),
        "scale": "fp32",
        **dict.fromkeys(("window", "table_size"), "i32"),
        **dict.fromkeys(("new_key_stride", "new_value_stride"), "i32"),
    }
    sizes = {"N": 4, "G": 2, "H": 16, "Z": 16, "LANES": 16, "HEADS": 16, "KEYS": 16}
    assert compiled(kernels._attend, types, {**sizes, "SPLITS": 2, "PRECISION": "tf32"})
    types = {
        "x": "*bf16",
        "weight": "*bf16",
        "out": "*bf16",
        "M": "i32",
        "F": "i32",
        "D": "i32",
    }
    tile = {"ROWS": 16, "FEATURES": 16, "CHANNELS": 32, "STAGES": 2}
    assert compiled(few_rows._multiply, types, tile)
