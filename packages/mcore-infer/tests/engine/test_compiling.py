"""The kernels of decoding compile for an H100 or H200: no GPU is needed to see that."""

from itertools import product

import pytest

pytest.importorskip("triton")


def compiled(function, types, constants, **options):
    """Compile a Triton kernel for compute capability 9.0."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile
    from triton.experimental.gluon._runtime import GluonASTSource

    source = (GluonASTSource if function.is_gluon() else ASTSource)(
        fn=function,
        signature={**types, **dict.fromkeys(constants, "constexpr")},
        constexprs={(function.arg_names.index(n),): v for n, v in constants.items()},
        attrs={
            (function.arg_names.index(n),): [["tt.divisibility", 16]]
            for n, t in types.items()
            if t[0] == "*"
        },
    )
    return compile(source, target=GPUTarget("cuda", 90, 32), options=options)


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
TILE = {
    "ROWS": 8,
    "OUTS": 32,
    "STEP": 64,
    "STAGES": 2,
    "PRECISION": "tf32",
    "IS_PACKED": True,
}


def test_the_kernel_for_many_requests_takes_what_ran_on_a_gpu():
    import torch

    from mcore_infer.engine.decode_kernels import takes_many

    for in_fp8, fewest in ((False, 256), (True, 512)):
        for channels in (64, 96, 128, 256):
            kind = torch.bfloat16, channels, 4, in_fp8
            assert takes_many(fewest, 64, *kind, ("scale",)) == (channels < 256)
            assert not takes_many(fewest - 1, 64, *kind, ())
            assert not takes_many(fewest, 64, *kind, ("sinks",))
            assert not takes_many(fewest, 16, *kind, ())
    assert not takes_many(4096, 64, torch.bfloat16, 128, 16, False, ())


def test_the_kernels_of_decoding_compile():
    from mcore_infer.engine.kernels import (
        latent_attention,
        paged_attention,
        paged_attention_many,
        skinny_gemm,
    )
    from mcore_infer.engine.kernels import skinny_gemm_tiles as tiles
    from mcore_infer.quantization.kernels import _round_row

    names = ("q", "new_keys", "new_values", "keys", "values")
    types = {
        **dict.fromkeys((*names, "out"), "*bf16"),
        **dict.fromkeys(("tables", "lengths"), "*i64"),
        **dict.fromkeys(("sinks", "parts", "sums"), "*fp32"),
        **dict.fromkeys(("scale", "key_scale", "value_scale", "cap"), "fp32"),
        **dict.fromkeys(("window", "chunk", "table_size"), "i32"),
        **dict.fromkeys(("new_key_stride", "new_value_stride"), "i32"),
    }
    for held, is_fp8 in (("*bf16", False), ("*u8", True)):
        own = types | {"keys": held, "values": held}
        options = {**ATTENTION, "PRECISION": "tf32", "IS_FP8": is_fp8}
        options |= dict.fromkeys(("HAS_CAP", "HAS_SINKS"), is_fp8)
        assert compiled(paged_attention._attend, own, options)
        for name in ("PRECISION", "SPLITS", "HAS_CAP", "HAS_SINKS"):
            del options[name]
        for name in ("sinks", "parts", "sums", "chunk", "cap"):
            del own[name]
        options |= {"H": 64, "LANES": 64}
        options |= {"KEYS": 16, "STAGES": 3} if is_fp8 else {"KEYS": 32, "STAGES": 2}
        assert compiled(paged_attention_many._attend_many, own, options, num_warps=1)
    own = {**types, "table_size": "i32", "scale": "fp32"}
    own = {n: t for n, t in own.items() if n in latent_attention._attend_latent.arg_names}
    options = {"N": 16, "H": 576, "J": 512, "Z": 64, "LATENT": 512, "ROTATED": 64, "HEADS": 16}
    options |= {"KEYS": 64, "SPLITS": 2, "PRECISION": "tf32"}
    found = compiled(latent_attention._attend_latent, own, options, num_warps=4, num_stages=2)
    assert found.metadata.shared <= tiles.SHARED_BYTES
    types = {
        **dict.fromkeys(("x", "weight", "out"), "*bf16"),
        **dict.fromkeys(("scales", "parts"), "*fp32"),
        "counters": "*i32",
        **dict.fromkeys("MNDWS", "i32"),
    }
    most = tiles.MOST_ROWS
    outs, step, stages, _, _ = tiles.tiles_for(most, "", (4096, 4096))[0]
    large = {**TILE, "ROWS": most, "OUTS": outs, "STEP": step, "STAGES": stages}
    for code, group, splits, tile in (
        *(("", (0, 0), 1, large), ("e4m3", (0, 0), 2, TILE), ("int8", (1, 0), 1, TILE)),
        *(("int4", (1, 64), 2, TILE), ("e2m1", (1, 16), 1, TILE)),
    ):
        own = types | ({"weight": "*u8"} if code else {})
        options = {**tile, "CODE": code, "TALL": group[0], "WIDE": group[1], "SPLITS": splits}
        found = compiled(skinny_gemm._few_rows, own, {**options, "IS_EVEN": not code})
        assert found.metadata.shared <= tiles.SHARED_BYTES
    types = {"x": "*bf16", "known": "*fp32", "codes": "*fp8e4nv", "scales": "*fp32", "D": "i32"}
    options = {"LIMIT": 448.0, "IS_KNOWN": False, "IS_FLOAT": True}
    for kind, lanes in ((-1, 64), (0, 16384)):  # rows as they are, and gates of one layer
        assert compiled(_round_row, types, {**options, "KIND": kind, "LANES": lanes})
    for code, itemsize in product(("", "e4m3", "int8", "int4", "e2m1"), (2, 4)):
        for num_rows in range(1, tiles.MOST_ROWS + 1):
            for tile in tiles.tiles_for(num_rows, code, (4096, 4096), itemsize):
                assert tile.shared_bytes(num_rows, code, itemsize) <= tiles.SHARED_BYTES
