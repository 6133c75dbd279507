"""Exported folders in the hands of those who made the formats; `nox -s "extras(loaders)"`.

compressed-tensors and transformers compute with one form, modelopt writes the other itself.
"""

import copy
import json
import warnings

import pytest
import torch
from safetensors.torch import load_file

from mcore_data.tokenizers.plain import ByteTokenizer
from mcore_infer.cli import main
from mcore_infer.loading import load_model
from mcore_infer.quantization.loading import linears
from mcore_parallel.mesh import ParallelContext
from mcore_parallel.precision.gemm import PLAIN_GEMM

pytestmark = pytest.mark.filterwarnings("ignore")  # of packages that are not ours
transformers = pytest.importorskip("transformers")

TOKENS = torch.tensor([list(b"and the word was")])
TEXT = "In the beginning was the word, and the word was with what it says. " * 12
SIZES = {
    "hidden_size": 128,
    "num_hidden_layers": 1,
    "intermediate_size": 256,
    "vocab_size": 257,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 64,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
DENSE = ("fp8", "fp8-channel", "fp8-block", "int8", "w8a8", "awq", "gptq", "nvfp4", "mxfp4")
SPARSE = ("fp8", "fp8-channel", "int8", "awq", "gptq")
"""transformers loses second scales of experts, and takes blocks of none."""
ROUNDS_INPUTS = ("fp8", "fp8-channel")
BF16 = 1.6e-2


@pytest.fixture(scope="module")
def quantized(tmp_path_factory, save_random, quantize_folder):
    """A model of each kind and its quantized folders, made when first asked for."""
    path = tmp_path_factory.mktemp("loaders")
    (path / "text.txt").write_text(TEXT)
    ByteTokenizer().save(path / "bytes")

    def make(kind, method, form="compressed-tensors"):
        plain, folder = path / kind, path / f"{kind}-{method}-{form}"
        sizes = SIZES | (EXPERTS if kind == "Qwen3Moe" else {})
        save_random(plain, kind, sizes, std=0.15)
        if not folder.exists():
            group = ["--group-size", 32] if method in ("awq", "gptq") else []
            quantize_folder(path, plain, folder, method, form, *group)
        return plain, folder

    return make


def exported(folder, output, form):
    words = ["--load", str(folder), "--output", str(output), "--format", form]
    assert main(["export", *words]) == 0
    return output


def logits_of(folder, *, rounds_inputs):
    model = load_model(folder, ParallelContext.single(), dtype=torch.float32).model
    for linear in () if rounds_inputs else linears(model).values():
        linear.gemm = PLAIN_GEMM
    with torch.no_grad():
        return model.logits(model(TOKENS)[0])[:, 0, :257]


def tensors_of(folder):
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


@pytest.mark.parametrize(
    ("kind", "method"),
    [("Llama", method) for method in DENSE] + [("Qwen3Moe", method) for method in SPARSE],
)
def test_transformers_computes_with_compressed_tensors_what_we_do(
    quantized, tmp_path, kind, method
):
    pytest.importorskip("compressed_tensors")
    _, output = quantized(kind, method)
    for dequantize in (True, False) if method in ROUNDS_INPUTS else (True,):
        theirs, said = transformers.AutoModelForCausalLM.from_pretrained(
            output,
            dtype="float32",
            output_loading_info=True,
            quantization_config=transformers.CompressedTensorsConfig(dequantize=dequantize),
        )
        unread = {name.rpartition(".")[2] for name in said.pop("unexpected_keys")}
        assert unread <= {"input_scale", "input_global_scale"}  # of inputs left as they are
        assert not any(said.values()), said
        with torch.no_grad():
            got = theirs.eval()(TOKENS).logits[0]
        # Experts round no inputs there.
        rounds = not dequantize and kind == "Llama"
        if rounds or dequantize:
            want = logits_of(output, rounds_inputs=rounds)
            error = (got - want).norm() / want.norm()
            assert error < (BF16 if "fp4" in method else 1e-5)  # their decoders write bf16


@pytest.mark.parametrize(
    "method", ["fp8", "fp8-channel", "fp8-block", "int8", "w8a8", "gptq", "nvfp4", "mxfp4"]
)
def test_compressed_tensors_decodes_every_expert(quantized, method):
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig
    from readers.compressed import read

    _, output = quantized("Qwen3Moe", method)
    config, want, _ = read(output)
    scheme = QuantizationConfig(**config["quantization_config"]).config_groups["group_0"]
    decoder = BaseCompressor.get_value_from_registry(scheme.format)
    tensors, num_matrices = tensors_of(output), 0
    for name in [name for name in tensors if name.endswith(".weight_scale")]:
        module = name.removesuffix(".weight_scale")
        mine = {
            one.rpartition(".")[2]: tensor
            for one, tensor in tensors.items()
            if one.rpartition(".")[0] == module
        }
        got = decoder.decompress(mine, scheme)["weight"].float()
        error = (got - want[f"{module}.weight"]).norm() / got.norm()
        assert error < (BF16 if "fp4" in method else 1e-6)
        num_matrices += 1
    assert num_matrices == 4 + 3 * EXPERTS["num_experts"]


FORMATS = {
    "fp8": "FP8_DEFAULT_CFG",
    "fp8-channel": "FP8_PER_CHANNEL_PER_TOKEN_CFG",
    "fp8-block": "FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG",
    "int8": "INT8_WEIGHT_ONLY_CFG",
    "w8a8": "INT8_SMOOTHQUANT_CFG",
}
"""Of modelopt; it takes a GPU to calibrate those of four bits in blocks."""
SAME_LOGITS = {"fp8": BF16, "fp8-channel": BF16, "int8": 1e-5}
"""fp8 inputs are multiplied by 448 / amax there, divided by amax / 448 here: a few round
elsewhere. Without rounding them the logits change by 0.1."""


@pytest.mark.parametrize("method", FORMATS)
def test_modelopt_writes_the_unified_folder_as_we_do_and_we_compute_with_its(
    quantized, tmp_path, method
):
    quantization = modelopt("modelopt.torch.quantization")
    plain, ours = quantized("Llama", method, "hf-quant")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(plain, dtype="float32").eval()
    ids = torch.tensor([list(TEXT[:64].encode())])
    with torch.no_grad():
        recipe = copy.deepcopy(getattr(quantization, FORMATS[method]))
        quantization.quantize(theirs, recipe, lambda model: model(ids))
        want = theirs(TOKENS).logits[0]
        write = modelopt("modelopt.torch.export").export_hf_checkpoint
        write(theirs, export_dir=tmp_path / "theirs")
    written, found = tensors_of(tmp_path / "theirs"), tensors_of(ours)
    assert written.keys() == found.keys()
    for name, tensor in written.items():
        if tensor.numel() > 1:  # it drops the dimensions of a single block
            assert found[name].shape == tensor.shape, name
        if name.endswith("proj.weight"):
            assert found[name].dtype == tensor.dtype, name
    said = [
        json.loads((one / "hf_quant_config.json").read_text())["quantization"]
        for one in (tmp_path / "theirs", ours)
    ]
    assert said[0]["quant_algo"] == said[1]["quant_algo"]
    if method in SAME_LOGITS:
        got = logits_of(tmp_path / "theirs", rounds_inputs=True)
        assert (got - want).norm() / want.norm() < SAME_LOGITS[method]


ALGOS = {
    "fp8": "fp8",
    "fp8-channel": "fp8_pc_pt",
    "fp8-block": "fp8_pb_wo",
    "int8": "int8_wo",
    "gptq": "int4_awq",
    "nvfp4": "nvfp4",
}


@pytest.mark.parametrize("method", ALGOS)
def test_modelopt_rounds_what_our_bytes_stand_for_to_the_same_bytes(
    quantized, tmp_path, method
):
    pack = modelopt("modelopt.torch.export.quant_utils").to_quantized_weight
    flat = modelopt("modelopt.torch.export.convert_hf_config").convert_hf_quant_config_format
    _, folder = quantized("Llama", method)  # of compressed-tensors
    ours = exported(folder, tmp_path / "ours", "hf-quant")
    said = json.loads((ours / "hf_quant_config.json").read_text())
    inline = json.loads((ours / "config.json").read_text())["quantization_config"]
    assert flat(said).items() <= inline.items()
    model = load_model(ours, ParallelContext.single(), dtype=torch.float32).model
    module, tensors = "model.layers.0.self_attn.o_proj", tensors_of(ours)
    wide = model.blocks["0"].attention.proj.weight
    block = {"gptq": 32, "nvfp4": 16, "fp8-block": 128}.get(method)
    again = pack(
        wide.detach(),
        tensors[f"{module}.weight_scale"],
        ALGOS[method],
        tensors.get(f"{module}.weight_scale_2"),
        block,
    )
    pair = [codes.view(torch.uint8) for codes in (again, tensors[f"{module}.weight"])]
    if method == "nvfp4":
        pair = [positive_zeros(codes) for codes in pair]
    assert torch.equal(*pair)


def positive_zeros(codes):
    """Split bytes into two codes of e2m1 each, none of which is -0."""
    halves = torch.stack((codes & 15, codes >> 4), -1)
    return torch.where(halves == 8, 0, halves)


def modelopt(name):
    """Import a part of it, which warns and logs as it comes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(name)
