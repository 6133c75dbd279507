"""The kernels around fp8 casts compile for an H100 or H200 and spill no register."""

import subprocess
from itertools import product
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")

TILE = {
    **dict.fromkeys(("x", "grad"), "*bf16"),
    **dict.fromkeys(("amax", "scale_inv"), "*fp32"),
    **dict.fromkeys(("columns", "seen"), "*i32"),
    **dict.fromkeys(("num_rows", "width"), "i32"),
    "rows": "*u8",
}
NORM = {
    **dict.fromkeys(("x", "branch", "weight", "bias", "total", "out"), "*bf16"),
    **dict.fromkeys(("dout", "dtotal", "dx"), "*bf16"),
    **dict.fromkeys(("means", "scales", "weight_parts", "bias_parts"), "*fp32"),
    **dict.fromkeys(("offset", "epsilon"), "fp32"),
    **dict.fromkeys(("width", "rows"), "i32"),
}
ROTARY = {
    **dict.fromkeys(("packed", "q", "k", "v"), "*bf16"),
    **dict.fromkeys(("cos", "sin"), "*fp32"),
    **dict.fromkeys(("batch", "n", "g", "half"), "i32"),
}
FORMAT = {"LIMIT": 448.0, "SMALLEST": 2.0**-100, "IS_E4M3": True, "COMPILED": True}


def usage(function, types, constants, folder, **options):
    """Compile a kernel for compute capability 9.0; return registers and bytes of stack."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    places = {name: (at,) for at, name in enumerate(function.arg_names)}
    own = {name: kind for name, kind in types.items() if name in places}
    constants = {name: value for name, value in constants.items() if name in places}
    # Pointers, and sizes as the GEMMs take them.
    aligned = [n for n, kind in own.items() if kind[0] == "*" or n in ("num_rows", "width")]
    source = ASTSource(
        fn=function,
        signature={**own, **dict.fromkeys(constants, "constexpr")},
        constexprs={places[name]: value for name, value in constants.items()},
        attrs={places[name]: [["tt.divisibility", 16]] for name in aligned},
    )
    found = compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    (folder / "kernel.cubin").write_bytes(found.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    said = subprocess.run(
        [tool, "-res-usage", folder / "kernel.cubin"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    words = dict(word.split(":", 1) for word in said.split() if ":" in word)
    return int(words["REG"]), int(words["STACK"])


def test_the_kernels_compile_and_spill_nothing(tmp_path):
    from mcore_models.kernels import gated_fp8, norm, rope
    from mcore_parallel.kernels import fp8_cast

    found = {}
    for seen in (False, True):
        options = {**FORMAT, "HAS_ROWS": True, "HAS_SEEN": seen, "TILE": fp8_cast._TILE}
        warps = {"num_warps": fp8_cast._TILE_WARPS}
        found["cast", seen] = usage(fp8_cast._cast, TILE, options, tmp_path, **warps)
    for grad, seen in product((False, True), (False, True)):
        words, columns, warps = gated_fp8._TILES[grad]
        options = {**FORMAT, "HAS_ROWS": True, "HAS_SEEN": seen, "KIND": 0, "IS_GRAD": grad}
        options |= {"WORDS": words, "COLUMNS": columns}
        place = tmp_path
        made = usage(gated_fp8._gate_and_cast, TILE, options, place, num_warps=warps)
        found["gate", grad, seen] = made
    options = {"KIND": 0, "IS_GRAD": True, "LANES": gated_fp8._LANES}
    found["note"] = usage(gated_fp8._gate_and_note, TILE, options, tmp_path, num_warps=4)
    options = {"HAS_BRANCH": True, "HAS_DTOTAL": True, "CENTERED": False, "BLOCK": 4096}
    found["norm"] = usage(norm._forward, NORM, options, tmp_path, num_warps=8)
    found["norm backward"] = usage(norm._backward, NORM, options, tmp_path, num_warps=4)
    options = {"INVERSE": True, "HALF": 64, "HEADS": 16}
    found["rotary"] = usage(rope._rotate, ROTARY, options, tmp_path, num_warps=4)
    assert not [name for name, (_, stack) in found.items() if stack], found
    assert found["norm backward"][0] <= 168, found  # three programs on a processor together
