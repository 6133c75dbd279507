#!/usr/bin/env bash
# Makes the environment of this workspace: in an image, in a container or on a bare host.
#
#   bash docker/common/install.sh --environment dev|lts [--venv DIR] [--python PYTHON]
#
# dev: the packages, what tests and linting need, and nox. lts: the packages and the tests.
# Versions are those of uv.lock. A torch that PYTHON already has, as in NVIDIA's images, stays:
# the environment sees the system's packages, and the lock's torch and CUDA are left out.
set -euo pipefail

usage() {
    sed -n '4s/^# *//p' "$0" >&2
    exit 2
}

ENVIRONMENT='' VENV=/opt/venv PYTHON=''
while [ $# -gt 0 ]; do
    [ $# -ge 2 ] || usage
    case $1 in
        --environment) ENVIRONMENT=$2 ;;
        --venv) VENV=$2 ;;
        --python) PYTHON=$2 ;;
        *) usage ;;
    esac
    shift 2
done
case $ENVIRONMENT in
    dev) GROUPS_WANTED=(--group dev --group test --group training --group mlm) ;;
    lts) GROUPS_WANTED=(--no-default-groups --group lts --group test) ;;
    *)
        echo "install.sh: --environment must be dev or lts, not '$ENVIRONMENT'" >&2
        usage
        ;;
esac
cd "$(dirname "$0")/../.."

if ! command -v uv >/dev/null; then
    base=${PYTHON:-python3}
    "$base" -m pip --version >/dev/null 2>&1 || {
        echo "install.sh: no uv, and no pip in $base to install it with" >&2
        exit 1
    }
    # In a folder of its own: the system's Python stays as it is.
    "$base" -m pip install --quiet --target "$VENV-uv" uv
    export PATH="$VENV-uv/bin:$PATH"
fi

keep=()
venv=(uv venv --quiet --allow-existing)
find_torch='import importlib.metadata as m; print(m.version("torch"))'
if present=$("${PYTHON:-python3}" -c "$find_torch" 2>/dev/null); then
    echo "install.sh: keeping torch $present of ${PYTHON:-python3}"
    venv+=(--system-site-packages --python "$(command -v "${PYTHON:-python3}")")
    # What belongs to a build of torch, by the names that the lock gives it.
    while read -r name; do
        keep+=(--no-install-package "$name")
    done < <(sed -n 's/^name = "\(torch\|triton\|nvidia-.*\|cuda-.*\)"$/\1/p' uv.lock)
elif [ -n "$PYTHON" ]; then
    venv+=(--python "$PYTHON")
fi
"${venv[@]}" "$VENV"
export UV_PROJECT_ENVIRONMENT=$VENV
uv sync --locked --quiet --python "$VENV/bin/python" "${GROUPS_WANTED[@]}" "${keep[@]}"
"$VENV/bin/python" -c '
import mcore_train, torch
print("install.sh: torch", torch.__version__, "from", torch.__path__[0])'
echo "install.sh: $ENVIRONMENT in $VENV; activate with: source $VENV/bin/activate"
