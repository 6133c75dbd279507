"""The batch sizes that a run has had before it continues, and a plan that counts by them."""

from collections.abc import Mapping
from typing import Any

from mcore_ckpt.storage.index import ADAPTER
from mcore_ckpt.storage.paths import is_hf_folder
from mcore_data.tracing.data_plan import PLAN_FILE, Stretch, parse_plan
from mcore_train.checkpoints.origin import checkpoint_extra, find_checkpoint, starting_point
from mcore_train.resolution import Plan


def continue_plan(plan: Plan) -> Plan:
    """Count a plan's lengths by the batch sizes of the run that it continues, if any.

    Reads the checkpoint's index.
    """
    options = starting_point(plan.config)
    folder = find_checkpoint(options.load, options.ckpt_step) if options.load else None
    if folder is None or options.finetune or is_hf_folder(folder):
        return plan
    extra, file = checkpoint_extra(folder), folder / PLAN_FILE
    is_base = plan.config.peft.peft != "none" and ADAPTER not in extra
    if is_base or "iteration" not in extra:  # its steps are not counted on
        return plan
    text = file.read_text("utf-8") if file.is_file() else ""
    return plan.continue_after(batch_sizes(extra, text), extra["iteration"])


def batch_sizes(extra: Mapping[str, Any], data_plan_text: str) -> list[Stretch]:
    """Return the batch sizes that the run of a checkpoint has had.

    Args:
        extra: the checkpoint's numbers.
        data_plan_text: its data plan, which has them too; empty where it has none.
    """
    if "stretches" in extra:
        return [Stretch(*numbers) for numbers in extra["stretches"]]
    return list(parse_plan(data_plan_text).stretches) if data_plan_text else []
