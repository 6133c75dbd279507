"""What goes into a step beside its tensors: JSON, small files, folders.

Looked at before anything is written, and JSON taken as it is then: a save in the background
ends long after the call.
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
    """What goes along; rank 0's counts."""

    extra: Mapping[str, Any] = field(default_factory=dict)
    """JSON kept in the index."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Small files by name, such as ``recipe.toml``."""
    folders: Mapping[str, Path] = field(default_factory=dict)
    """Folders to copy by name, such as ``tokenizer``."""

    def kept(self) -> "Attachments":
        """Return it as it is now, whatever the caller's objects become.

        Raises:
            ValueError: for what is no JSON, a name that is no plain one or belongs to the
                checkpoint itself, or a folder that is not there.
        """
        try:
            extra = json.loads(json.dumps(dict(self.extra)))
        except (TypeError, ValueError) as error:
            raise ValueError(f"extra must be JSON: {error}.") from None
        for name in (*self.files, *self.folders):
            if not name or name in (".", "..") or "/" in name or "\0" in name:
                raise ValueError(f"{name!r} goes along with a step: it must be a plain name.")
            if _OURS.fullmatch(name) or (name in self.files and name in self.folders):
                raise ValueError(
                    f"{name} cannot go along with a step: a checkpoint has one of that name "
                    "already. Give it another."
                )
        for name, folder in self.folders.items():
            if not Path(folder).is_dir():
                raise ValueError(f"{folder}, to go along as {name}, is no folder.")
        return Attachments(extra=extra, files=dict(self.files), folders=dict(self.folders))
