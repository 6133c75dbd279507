"""Compiles a structure in a process with limits of time and memory, before the engine does.

llguidance cannot be interrupted, and some short schemas never compile (``multipleOf`` of a
large prime) or take seconds a token. A separate process compiles the grammar and generates a
few random texts. If the process exceeds a limit, the operating system ends it, and the server
runs on.
"""

import json
import random
import resource
import subprocess
import sys
import time
import weakref
from collections.abc import Sequence
from dataclasses import asdict
from tempfile import TemporaryDirectory
from typing import Any

from mcore_data.tokenizers.building import load_tokenizer
from mcore_data.tokenizers.protocol import Tokenizer
from mcore_infer.writing.grammars import (
    Structure,
    Vocabulary,
    build_grammar,
    error_of,
    open_vocabulary,
)

COMPILE_S = 2
"""Processor seconds to compile one structure."""
STEP_S = 0.05
"""Processor seconds for the next tokens of one text."""
_MEMORY_BYTES = 2 << 30
_NUM_WALKS, _NUM_TOKENS = 8, 64
_ENDED = "the process ended"


class GrammarTrial:
    """Checks structures in a separate process, started for the first one; for one thread."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, ends: Sequence[int]) -> None:
        self._arguments = tokenizer, vocab_size, tuple(ends)
        self._process: subprocess.Popen[bytes] | None = None

    def check(self, structure: Structure) -> None:
        """Compile a structure in the separate process.

        Raises:
            ValueError: if no text matches the structure, or compiling takes too long or too
                much memory; the message has the reason.
        """
        refusal = self._answer_to(asdict(structure))
        if refusal is _ENDED:
            refusal = (
                f"this structure cannot be enforced: compiling its grammar takes more than "
                f"{COMPILE_S} seconds or {_MEMORY_BYTES >> 30} GiB. Use smaller counts and "
                "fewer parts."
            )
        if refusal:
            raise ValueError(refusal)

    def _answer_to(self, question: Any) -> str:
        """Send one line of JSON to the process, starting it if needed; return its answer."""
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-c", f"from {__name__} import main; main()"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C ends the server, not this process
            )
            weakref.finalize(self, _end, self._process)
            tokenizer, *sizes = self._arguments
            with TemporaryDirectory() as folder:
                tokenizer.save(folder)
                if self._answer_to([folder, *sizes]) is _ENDED:
                    raise ValueError("structures cannot be checked: the process for it failed.")
        pipes = self._process.stdin, self._process.stdout
        assert None not in pipes
        to, answers = pipes
        to.write(json.dumps(question).encode() + b"\n")  # pyrefly: ignore
        to.flush()  # pyrefly: ignore
        if line := answers.readline():  # pyrefly: ignore
            return json.loads(line)
        _end(self._process)  # no answer: the process exceeded a limit
        self._process = None
        return _ENDED


def main() -> None:
    """Read structures from standard input until EOF; write the refusal of each, or ''."""
    vocabulary = None
    for line in sys.stdin.buffer:
        question = json.loads(line)
        if vocabulary is None:
            folder, vocab_size, ends = question
            vocabulary = open_vocabulary(load_tokenizer(folder), vocab_size, ends)
            _limit_memory()
            refusal = ""
        else:
            # RLIMIT_CPU counts from the start of the process: add the time used so far.
            used = resource.getrusage(resource.RUSAGE_SELF)
            until = int(used.ru_utime + used.ru_stime) + COMPILE_S + 1
            hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
            resource.setrlimit(resource.RLIMIT_CPU, (until, hard))
            refusal = refusal_of(Structure(**question), vocabulary)
        sys.stdout.buffer.write(json.dumps(refusal).encode() + b"\n")
        sys.stdout.buffer.flush()


def refusal_of(structure: Structure, vocabulary: Vocabulary) -> str:
    """Return why a structure is refused; empty: it is accepted."""
    begin = time.process_time()
    try:
        matcher = vocabulary.compile(build_grammar(structure), structure.kind)
    except ValueError as error:
        return str(error)
    if time.process_time() - begin > COMPILE_S:
        return (
            f"this structure cannot be enforced: compiling its grammar takes more than "
            f"{COMPILE_S} seconds. Use smaller counts and fewer parts."
        )
    generator, dead_end = random.Random(0), ""
    for _ in range(_NUM_WALKS):
        dead_end = _walk(matcher.deep_copy(), generator)
        if not dead_end:
            return ""
        if dead_end.startswith("too slow"):
            break
    return f"this structure cannot be enforced: {dead_end}"


def _walk(matcher: Any, generator: random.Random) -> str:
    """Generate a text of random allowed tokens; return why no token follows, or empty."""
    for _ in range(_NUM_TOKENS):
        begin = time.process_time()
        allowed = int.from_bytes(matcher.compute_bitmask(), "little")
        if time.process_time() - begin > STEP_S:
            return f"too slow: the next token takes more than {STEP_S * 1000:g} ms."
        if matcher.is_error():
            return error_of(matcher)
        if matcher.is_stopped():
            return ""
        # Take the first allowed token from a random position on, or the first of all.
        begin = generator.randrange(allowed.bit_length())
        rest = allowed >> begin << begin or allowed
        matcher.consume_token((rest & -rest).bit_length() - 1)
        if matcher.is_error():
            return error_of(matcher)
    return ""


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()


def _limit_memory() -> None:
    with open("/proc/self/statm", encoding="ascii") as file:
        used_bytes = int(file.read().split()[0]) * resource.getpagesize()
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (used_bytes + _MEMORY_BYTES, hard))
