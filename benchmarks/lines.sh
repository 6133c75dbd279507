# Sourced by many_gpus.sh and one_gpu.sh: their options, and how a line is run and kept.
#
# $world is set before; a line whose JSON is in the folder already is left out, so that several
# calls of ten minutes go through the list; one that fails is named and the next one begins. PY
# names the Python, COMMIT the source where there is no git.
cd "$(dirname "${BASH_SOURCE[0]}")/.."
minutes=10 out=benchmarks/results only=. list= small=
while [ $# -gt 0 ]; do
  case $1 in
    --world) world=$2; shift 2 ;;
    --minutes) minutes=$2; shift 2 ;;
    --output) out=$2; shift 2 ;;
    --only) only=$2; shift 2 ;;
    --small) small=1; shift ;;
    --list) list=1; shift ;;
    *) echo "unknown option $1" >&2; exit 2 ;;
  esac
done
if ! [[ $minutes =~ ^[0-9]+$ ]]; then
  echo "--minutes $minutes: give whole minutes, such as 2" >&2
  exit 2
fi
minutes=$((10#$minutes))  # 08 would be octal
PY=${PY:-python}
COMMIT=${COMMIT:-$(git rev-parse --short HEAD 2>/dev/null)}
PYTHONPATH=$(ls -d "$PWD"/packages/*/src | tr '\n' ':')$PWD/benchmarks:${PYTHONPATH:-}
export PYTHONPATH PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
mkdir -p "$out"
logs=$(mktemp -d)
trap 'rm -r "$logs"' EXIT
end=$((SECONDS + 60 * minutes - 10))

launch() {  # NAME LIMIT_S RANKS SCRIPT WORDS...; 0 ranks: the script starts its own, or needs none
  local name=$1 limit=$2 ranks=$3; shift 3
  [[ $name =~ $only ]] || return
  [ -n "$list" ] && { echo "$name: $*"; return; }
  [ -e "$out/$name.json" ] && return
  local left=$((end - SECONDS)) begin=$SECONDS
  if [ "$left" -lt "$limit" ]; then
    echo "$name: needs up to $limit s, and $left s are left: call again"
    return
  fi
  local start="-m torch.distributed.run --nproc-per-node $ranks --master-port $((29500 + RANDOM % 400))"
  [ "$ranks" -gt 0 ] || start=
  timeout -k 10 "$limit" "$PY" $start "$@" > "$logs/$name.txt" 2>&1
  local code=$?
  if [ $code -eq 0 ]; then
    echo "$name: $((SECONDS - begin)) s"
    [ -e "$out/$name.json" ] || grep -h '^{' "$logs/$name.txt" | tail -1 > "$out/$name.json"
    cat "$out/$name.json" | tr -d '\n' | cut -c1-900; echo
  else
    echo "$name: FAILED with $code after $((SECONDS - begin)) s"
    grep -hE "Error|error:" "$logs/$name.txt" | tail -3 | cut -c1-300
    grep -hE '^[^{"]+ \{"flags"' "$logs/$name.txt" | cut -c1-900  # ways that ended before it
  fi
}
