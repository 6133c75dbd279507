"""What one forward pass of a model cannot run: refused before anything is computed."""

from mcore_models.building.layouts import check_length
from mcore_models.config import TransformerConfig
from mcore_models.protocol import ModelState
from mcore_parallel.context_parallel.packed_sequences import Documents
from mcore_parallel.mesh import Axis


def check_inputs(
    size: tuple[int, int],
    state: ModelState | None = None,
    documents: Documents | None = None,
    *,
    config: TransformerConfig,
    axes: tuple[Axis, Axis],
    is_counted: bool = True,
    flag: str = "--seq-length",
) -> int:
    """Compare a pass's inputs with the model and its layout; no communication.

    Args:
        size: rows, and tokens of this context rank's part of each.
        state: what the layers remember of earlier tokens.
        documents: packed in the rows.
        config: of the model.
        axes: ranks that cut the sequence, and those that cut a rank's part again, one rank
            without sequence parallelism.
        is_counted: whether positions go on from the state's length; else they are given.
        flag: option that says how long sequences are.

    Returns:
        Tokens of the whole sequence, those of the state among them.

    Raises:
        ValueError: if the sequence is too long or cannot be cut, a state is given under context
            parallelism or with documents, or the documents are of other rows.
    """
    (num_rows, num_tokens), (cp, tp) = size, axes
    if state is not None and cp.size > 1:
        raise ValueError(
            f"a cache cannot be cut over --context-parallel-size {cp.size}: generate with 1."
        )
    remembered = 0 if state is None else state.length
    if is_counted:
        check_length(config, num_tokens * cp.size, remembered, flag)
    if num_tokens % tp.size:
        raise ValueError(
            f"--sequence-parallel cannot cut {num_tokens} tokens over "
            f"--tensor-model-parallel-size {tp.size}: use a {flag} that is a multiple."
        )
    if documents is not None:
        if state is not None:
            raise ValueError("a cache holds one document a row: generate without packing.")
        documents.check(num_rows, num_tokens * cp.size)
    return num_tokens * cp.size + remembered
