"""Contents of a step in addition to its tensors: JSON, small files and folders.

Attachments are checked before anything is written. JSON is copied at the same time, because a
background save ends long after the call.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mcore_ckpt.storage.paths import INDEX

_OURS = re.compile(rf"{re.escape(INDEX)}|(rank_|model).*\.safetensors(\.index\.json)?")


@dataclass(frozen=True, kw_only=True, slots=True)
class Attachments:
    """JSON, files and folders of a step; those of rank 0 are saved."""

    extra: Mapping[str, Any] = field(default_factory=dict)
    """JSON kept in the index."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Small files by name, such as ``recipe.toml``."""
    folders: Mapping[str, Path] = field(default_factory=dict)
    """Folders to copy by name, such as ``tokenizer``."""

    def kept(self) -> "Attachments":
        """Return a checked copy that later changes of the caller's objects do not affect.

        Raises:
            ValueError: for values that are not JSON, names that contain a path or that the
                checkpoint uses itself, and missing folders.
        """
        try:
            extra = json.loads(json.dumps(dict(self.extra)))
        except (TypeError, ValueError) as error:
            raise ValueError(f"extra must be JSON: {error}.") from None
        for name in (*self.files, *self.folders):
            if not name or name in (".", "..") or "/" in name or "\0" in name:
                raise ValueError(
                    f"{name!r} cannot be a file of a step: use a name without folders."
                )
            if _OURS.fullmatch(name) or (name in self.files and name in self.folders):
                raise ValueError(
                    f"{name} cannot be a file of a step: the checkpoint has a file of that "
                    "name. Use another name."
                )
        for name, folder in self.folders.items():
            if not Path(folder).is_dir():
                raise ValueError(f"{folder}, to be saved as {name}, is not a folder: give one.")
        return Attachments(extra=extra, files=dict(self.files), folders=dict(self.folders))
