"""The command ``mcore-infer``: subcommands and exit codes; printing help imports no torch."""

import logging
import sys
from collections.abc import Callable, Sequence

from mcore_base.command_line import parse
from mcore_base.entry_point import run_program
from mcore_infer.commands.chatting import chat
from mcore_infer.commands.evaluating import evaluate
from mcore_infer.commands.folders import export, quantize
from mcore_infer.commands.generating import generate
from mcore_infer.commands.serving import serve

ABOUT = """Write and judge text with a trained model.

examples:
  mcore-infer generate --load runs/tiny --prompt "In the beginning"
  mcore-infer generate --load runs/tiny --prompt "Once" --num-tokens 50 --top-k 40 --seed 7
  mcore-infer chat --load Llama-3.2-1B-Instruct
  mcore-infer serve --load runs/tiny --port 5000
  mcore-infer eval --load runs/tiny --valid-data chapter.txt
  mcore-infer quantize --load runs/tiny --method fp8 --calibration-data chapter.txt --output fp8
  mcore-infer export --load runs/tiny --output for-trtllm --format trtllm

pages:
  docs/serving.md        generate chat serve
  docs/evaluation.md     eval
  docs/quantization.md   quantize
  docs/deployment.md     export"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return 0 when done, 1 when it failed, 2 for bad input."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    return run_program("mcore-infer", ABOUT, COMMANDS, argv, exit_code, parse)


def exit_code(error: BaseException) -> int:
    """Return 2 for bad input, 1 for failed files or devices, 0 for an error in the program."""
    if isinstance(error, (ValueError, FileNotFoundError)):
        return 2
    return int(
        isinstance(error, OSError) or (isinstance(error, RuntimeError) and _is_outside(error))
    )


def _is_outside(error: RuntimeError) -> bool:
    """Whether files, the device's memory or a logged engine failed, and not the program."""
    from torch import OutOfMemoryError

    from mcore_ckpt.errors import CheckpointError
    from mcore_infer.errors import EngineError, StructureError

    outside = (CheckpointError, OutOfMemoryError, EngineError, StructureError)
    return isinstance(error, outside)


COMMANDS: dict[str, tuple[str, Callable[..., int]]] = {
    "generate": ("continue a prompt", generate),
    "chat": ("a conversation in the terminal", chat),
    "serve": ("text over HTTP: PUT /api and OpenAI's interfaces", serve),
    "eval": ("loss and perplexity of texts; WIKITEXT103 and LAMBADA", evaluate),
    "export": ("a folder for TensorRT-LLM or vLLM", export),
    "quantize": ("a folder of quantized weights, with a receipt", quantize),
}
