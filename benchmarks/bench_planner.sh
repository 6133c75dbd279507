#!/usr/bin/env bash
# The planner, the doctor and the memory tools on the GPUs of this host; writes one JSON file.
#
#   benchmarks/bench_planner.sh [--output DIR] [--only REGEX] [--minutes N] [--small]
#
# Each part has a time limit, and all end within --minutes: constants by plan --calibrate; doctor;
# the layouts of planner_predictions.json for as many GPUs; --micro-batch-size auto with a snapshot
# of memory, and what memory prints of it; a run that must run out of memory, with its snapshot,
# triage and doctor RUN. A part that fails is kept with its exit code and the end of its output.
# --small rehearses on a CPU what needs no GPU.
set -u
. "$(dirname "$0")/lines.sh"
world=$("$PY" -c "import torch; print(torch.cuda.device_count() or 1)")
parts=$(mktemp -d)
trap 'rm -r "$logs" "$parts"' EXIT

part() {  # NAME LIMIT_S RANKS WORDS...: of python; 0 ranks: one process without a launcher
  local name=$1 limit=$2 ranks=$3 begin=$SECONDS left=$((end - SECONDS)) start=; shift 3
  [[ $name =~ $only ]] || return
  [ "$left" -lt "$limit" ] && limit=$((left > 5 ? left : 5))
  [ "$ranks" -gt 1 ] && start="-m torch.distributed.run --nproc-per-node $ranks --master-port $((29500 + RANDOM % 400))"
  timeout -k 5 "$limit" "$PY" $start "$@" > "$parts/$name.out" 2> "$parts/$name.err" < /dev/null
  echo "$? $((SECONDS - begin))" > "$parts/$name.end"
  echo "$name: exit code and seconds $(cat "$parts/$name.end")"
}

train="-m mcore_train gpt --bf16 --mock-data --lr 1e-4 --log-interval 1"
model="--model llama-3.2-1b --seq-length 4096 --global-batch-size 16"
recorded="--record-memory-history --memory-snapshot-step 2 --memory-snapshot-path $logs/auto.pickle"
[ -n "$small" ] && train="${train/--bf16/--device cpu}" recorded= \
  model="--model tiny --seq-length 64 --global-batch-size 4"

part calibrate $((50 + 10 * world)) "$world" -m mcore_train plan --calibrate "$logs/system.toml"
part doctor 40 "$world" -m mcore_train doctor --json
while IFS=$'\t' read -r name gpus flags; do
  if [ -n "$small" ]; then
    part "$name" 60 0 -m mcore_train gpt $flags --dry-run --world-size "$gpus"
  elif [ "$gpus" -eq "$world" ]; then
    part "$name" $((60 + 15 * world)) "$world" benchmarks/bench_train_step.py --name "$name" \
      --output "$out" --commit "$COMMIT" --warmup 4 --steps 8 --profiled-steps 1 -- $flags
  fi
done < <("$PY" -c '
import json
for name, row in json.load(open("benchmarks/planner_predictions.json"))["layouts"].items():
    print(name, row["gpus"], row["flags"], sep="\t")')
part micro-batch-auto 100 "$world" $train $model --train-iters 4 --micro-batch-size auto $recorded
if [ -z "$small" ]; then
  part memory 25 0 -m mcore_train memory "$logs/auto.rank0.pickle" --json
  part out-of-memory 80 "$world" $train --model llama-3.2-1b --seq-length 8192 --train-iters 4 --micro-batch-size 32 \
    --global-batch-size $((32 * world)) --save "$logs/run" --record-memory-history \
    --memory-snapshot-path "$logs/full.pickle"
  part memory-when-full 25 0 -m mcore_train memory "$logs/full.rank0.pickle" --json
  mkdir -p "$logs/run/logs"
  cat "$parts"/out-of-memory.{out,err} > "$logs/run/logs/rank_0.log" 2> /dev/null
  part triage 10 0 -m mcore_train triage "$logs/run/logs"
  part doctor-run 10 0 -m mcore_train doctor "$logs/run"
fi
"$PY" - "$parts" "$logs/system.toml" "$out/planner-x$world.json" "$COMMIT" <<'PYTHON'
import argparse
import json
import sys
import tomllib
from pathlib import Path

from reporting import versions

parts, system, file = map(Path, sys.argv[1:4])
table = {"name": file.stem, **versions(argparse.Namespace(commit=sys.argv[4]))}
if system.exists():
    table["system"] = tomllib.loads(system.read_text())
for end in sorted(parts.glob("*.end"), key=lambda path: path.stat().st_mtime):
    code, seconds = map(int, end.read_text().split())
    out, err = (end.with_suffix(kind).read_text(errors="replace") for kind in (".out", ".err"))
    row = {"exit_code": code, "seconds": seconds}
    try:
        row["result"] = json.loads(out)
    except ValueError:
        row["output"] = out[-6000:]
    if code:
        row["errors"] = err[-3000:]
    table[end.stem] = row
file.write_text(json.dumps(table, indent=1) + "\n")
print(file)
PYTHON
