# What torchrun needs on each host, for the scripts in the folders here to source.
#
# Reads NNODES (default: the script's DEFAULT_NNODES), NODE_RANK, GPUS_PER_NODE, MASTER_ADDR,
# MASTER_PORT, LAUNCH and SCRIPT; sets NNODES, LAUNCH and DISTRIBUTED_ARGS. In a job of Slurm the hosts
# are the job's, and the batch script starts itself once on each of them.

if [ -n "${SLURM_JOB_ID:-}" ]; then
    NNODES=${NNODES:-$SLURM_JOB_NUM_NODES}
    if [ -z "${MASTER_ADDR:-}" ]; then
        MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
    fi
    export NNODES MASTER_ADDR
    # SLURM_STEP_ID is set within srun only.
    if [ -z "${SLURM_STEP_ID:-}" ]; then
        exec srun --ntasks-per-node=1 bash "$SCRIPT" "$@"
    fi
fi
NNODES=${NNODES:-$DEFAULT_NNODES}
LAUNCH=${LAUNCH:-torchrun}
if [ "$NNODES" -gt 1 ] && [ -z "${MASTER_ADDR:-}" ]; then
    echo "give MASTER_ADDR, the name of the first of $NNODES hosts, or NNODES=1" >&2
    exit 2
fi
DISTRIBUTED_ARGS=(
    --nproc_per_node "${GPUS_PER_NODE:-8}"
    --nnodes "$NNODES"
    --node_rank "${NODE_RANK:-${SLURM_NODEID:-0}}"
    --master_addr "${MASTER_ADDR:-localhost}"
    --master_port "${MASTER_PORT:-29500}"
)
