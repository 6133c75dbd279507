"""Reads pickles of other programs as data, without calling anything in them.

A normal unpickler imports and calls any name in a file. The unpickler here has a short list of
allowed names, replaces each by an inert record, and refuses every other name, so that a hostile
file cannot run code. The arguments of a record can be inspected.
"""

import pickle
from collections import OrderedDict
from collections.abc import Callable
from io import BufferedIOBase, BytesIO
from typing import Any

from mcore_ckpt.errors import CheckpointError
from mcore_ckpt.storage.index import TORCH_WORDS

_DTYPES = {word: name for name, word in TORCH_WORDS.items()}
"""Safetensors' name of each dtype, by torch's."""

STORAGE_DTYPES: dict[str, str] = {
    "DoubleStorage": "F64",
    "FloatStorage": "F32",
    "HalfStorage": "F16",
    "BFloat16Storage": "BF16",
    "BoolStorage": "BOOL",
    "LongStorage": "I64",
    "IntStorage": "I32",
    "ShortStorage": "I16",
    "CharStorage": "I8",
    "ByteStorage": "U8",
    "Float8_e4m3fnStorage": "F8_E4M3",
    "Float8_e5m2Storage": "F8_E5M2",
    "ComplexFloatStorage": "C64",
    "UntypedStorage": "U8",
}
"""Safetensors' name of the dtype of each of torch's storage classes."""

_KNOWN_MODULES = (
    "torch.distributed.checkpoint.",
    "torch.distributed.tensor.",
    "megatron.",
    "transformer_engine.",
)
"""Prefixes of modules whose names become records; nothing is imported."""

_KNOWN_NAMES = {
    *("argparse.Namespace", "types.SimpleNamespace", "torch.device", "torch.Generator"),
    *("torch._utils._rebuild_tensor", "torch._utils._rebuild_tensor_v2"),
    *("torch._utils._rebuild_parameter", "torch.serialization._get_layout"),
    *("torch._tensor._rebuild_from_type_v2", "torch.nn.parameter.Parameter", "torch.Tensor"),
    *("numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct"),
    *("numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar"),
    *("numpy.ndarray", "numpy.dtype", "_codecs.encode", "datetime.timedelta"),
    *("collections.defaultdict", "collections.deque", "enum.Enum", "copyreg._reconstructor"),
    *("pathlib.Path", "pathlib.PosixPath", "pathlib._local.PosixPath", "builtins.object"),
    *("signal.Signals", "builtins.getattr", "__builtin__.getattr", "__builtin__.object"),
}

_PLAIN: dict[str, Any] = {
    "collections.OrderedDict": OrderedDict,
    "torch.Size": tuple,
    **{
        f"{module}.{kind.__name__}": kind
        for module in ("builtins", "__builtin__")
        for kind in (set, frozenset)
    },
}
"""Containers that are created normally; a few bytes cannot make them large."""


class Record:
    """An inert foreign object: its class name, its arguments and its state."""

    name = ""

    def __init__(self, *args: Any, **named: Any) -> None:
        self.args = args
        self.state: Any = named

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        self.state = {**(self.state or {}), key: value}

    def append(self, value: Any) -> None:
        """Keep an item of a foreign list."""
        self.args = (*self.args, value)

    def extend(self, values: Any) -> None:
        """Keep items of a foreign list."""
        self.args = (*self.args, *values)

    def get(self, name: str, default: Any = None) -> Any:
        """Return a field of the state."""
        return self.state.get(name, default) if isinstance(self.state, dict) else default

    def fields(self) -> dict[str, Any]:
        """Return the state if it is a dictionary."""
        return dict(self.state) if isinstance(self.state, dict) else {}


def record_class(full_name: str) -> type[Record]:
    """Return the class of records for one foreign class or function name."""
    return type("Record", (Record,), {"name": full_name})


class InertUnpickler(pickle.Unpickler):
    """Reads a pickle without calling anything in it."""

    def __init__(
        self,
        file: BufferedIOBase,
        where: str,
        persistent: Callable[[Any], Any] | None = None,
        special: dict[str, Any] | None = None,
    ) -> None:
        """Prepare an unpickler; ``load`` reads one pickle.

        Args:
            file: positioned at the pickle.
            where: file name for messages.
            persistent: resolves torch's references to storages.
            special: replacements of certain full names, instead of a record.
        """
        super().__init__(file, encoding="latin1")
        self._where = where
        self._persistent = persistent
        self._special = special or {}

    def find_class(self, module: str, name: str) -> Any:
        """Return the replacement of a name in the pickle."""
        full = f"{module}.{name}"
        if full in self._special:
            return self._special[full]
        if full in _PLAIN:
            return _PLAIN[full]
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        if module in ("torch", "torch.storage") and name in STORAGE_DTYPES:
            return STORAGE_DTYPES[name]
        if full in _KNOWN_NAMES or module.startswith(_KNOWN_MODULES):
            return record_class(full)
        raise CheckpointError(
            f"{self._where} holds a pickle with the name {full}, which is not on the list of "
            "names that checkpoints need: the file is refused, and nothing in it was run."
        )

    def persistent_load(self, pid: Any) -> Any:
        """Resolve a reference."""
        if self._persistent is None:
            raise CheckpointError(
                f"{self._where} holds a damaged pickle: it has references to no storage."
            )
        return self._persistent(pid)


def load_inert(
    content: bytes | BufferedIOBase,
    where: str,
    persistent: Callable[[Any], Any] | None = None,
    special: dict[str, Any] | None = None,
) -> Any:
    """Return the content of one pickle as data.

    Args:
        content: bytes of the pickle, or a file positioned at the pickle.
        where: file name for messages.
        persistent: resolves torch's references to storages.
        special: replacements of certain full names, instead of a record.
    """
    file = BytesIO(content) if isinstance(content, bytes) else content
    try:
        return InertUnpickler(file, where, persistent, special).load()
    except CheckpointError:
        raise
    except Exception as error:
        # A damaged pickle may raise any exception.
        raise CheckpointError(f"{where} holds a damaged pickle: {error!r}") from error
