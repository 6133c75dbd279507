#!/usr/bin/env bash
# Runs tests/unit_tests on ranks of this host, with torchrun; what follows the options goes to pytest.
#
#   bash tests/unit_tests/run_unit_tests.sh [--nproc N] [--assets DIR] [--nnodes N --node-rank N
#       --master-addr HOST] [--master-port PORT] [PYTEST ARGUMENTS]
#
# Each rank's output goes to DIR/logs/1/RANK, that of ranks 0 and 3 to the terminal as well.
set -euo pipefail

NPROC='' ASSETS=assets NNODES=1 NODE_RANK=0 MASTER_ADDR='' MASTER_PORT=29500
while [ $# -ge 2 ]; do
    case $1 in
        --nproc) NPROC=$2 ;;
        --assets) ASSETS=$2 ;;
        --nnodes) NNODES=$2 ;;
        --node-rank) NODE_RANK=$2 ;;
        --master-addr) MASTER_ADDR=$2 ;;
        --master-port) MASTER_PORT=$2 ;;
        *) break ;;
    esac
    shift 2
done
if [ "$NNODES" -gt 1 ] && [ -z "$MASTER_ADDR" ]; then
    echo "run_unit_tests.sh: --nnodes $NNODES needs --master-addr, the first of the hosts" >&2
    exit 2
fi
if [ -z "$NPROC" ]; then
    NPROC=$(python -c 'import torch; print(torch.cuda.device_count() or 2)')
fi
if [ "$NNODES" -gt 1 ]; then
    rendezvous=(--nnodes "$NNODES" --node-rank "$NODE_RANK"
        --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT")
else
    rendezvous=(--standalone)
fi
logs=$ASSETS/logs
mkdir -p "$logs"
here=$(cd "$(dirname "$0")" && pwd)
status=0
OMP_NUM_THREADS=1 python -m torch.distributed.run "${rendezvous[@]}" --nproc-per-node "$NPROC" \
    --log-dir "$logs/torchrun" --redirects 3 --tee 3 --local-ranks-filter 0,3 \
    -m pytest -q -p no:cacheprovider "$here" "$@" || status=$?
# torchrun names its folders after the run and the attempt: one place for all of them.
rm -rf "$logs/1"
mkdir -p "$logs/1"
for rank in "$logs"/torchrun/*/attempt_0/*/; do
    cp -r "$rank" "$logs/1/$(basename "$rank")"
done
rm -rf "$logs/torchrun"
exit "$status"
