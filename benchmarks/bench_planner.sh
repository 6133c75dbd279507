#!/usr/bin/env bash
# The planner on the GPUs of this host: constants, then layouts that were predicted before.
#
#   benchmarks/bench_planner.sh [OUTPUT]
#
# Writes system.toml of one GPU and of all, and a result for each layout of
# planner_predictions.json that this host has the GPUs for.
set -eu
cd "$(dirname "$0")/.."
out=${1:-benchmarks/results}
gpus=$(python -c "import torch; print(torch.cuda.device_count())")
python -m mcore_train plan --calibrate "$out/system-x1.toml"
if [ "$gpus" -gt 1 ]; then
  torchrun --nproc-per-node "$gpus" -m mcore_train plan --calibrate "$out/system-x$gpus.toml"
fi
python - <<'PYTHON' | while IFS=$'\t' read -r name world flags; do
import json
for name, row in json.load(open("benchmarks/planner_predictions.json"))["layouts"].items():
    print(name, row["gpus"], row["flags"], sep="\t")
PYTHON
  if [ "$world" -le "$gpus" ]; then
    # shellcheck disable=SC2086
    torchrun --nproc-per-node "$world" benchmarks/bench_train_step.py --name "$name" \
      --output "$out" --profiled-steps 1 -- $flags < /dev/null
  fi
done
