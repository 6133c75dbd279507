#!/usr/bin/env bash
# Formats, lints and type-checks the Python files that differ from a branch.
#
#   BASE_REF=main CHECK_ONLY=true SKIP_DOCS=false bash tools/autoformat.sh
#
# BASE_REF: branch or commit to compare with (main); uncommitted and new files count.
# CHECK_ONLY: true reports and changes nothing (false).
# SKIP_DOCS: true leaves out the rules about docstrings and the pages of docs/ (false).
set -euo pipefail
cd "$(dirname "$0")/.."

BASE_REF=${BASE_REF:-main}
CHECK_ONLY=${CHECK_ONLY:-false}
SKIP_DOCS=${SKIP_DOCS:-false}
for name in CHECK_ONLY SKIP_DOCS; do
    case ${!name} in
        true | false) ;;
        *)
            echo "autoformat.sh: $name must be true or false, not '${!name}'" >&2
            exit 2
            ;;
    esac
done
if ! base=$(git merge-base "$BASE_REF" HEAD 2>/dev/null); then
    echo "autoformat.sh: BASE_REF=$BASE_REF is no branch or commit of this repository" >&2
    exit 2
fi

mapfile -t files < <({
    git diff --name-only --diff-filter=d "$base" -- '*.py'
    git ls-files --others --exclude-standard -- '*.py'
} | sort -u)
if [ ${#files[@]} -eq 0 ]; then
    echo "no Python file differs from $BASE_REF"
    exit 0
fi
echo "${#files[@]} Python files differ from $BASE_REF"

lint=(uv run --locked ruff check)
format=(uv run --locked ruff format)
if [ "$CHECK_ONLY" = true ]; then
    format+=(--check)
else
    lint+=(--fix)
fi
if [ "$SKIP_DOCS" = true ]; then
    lint+=(--ignore D)
fi
failed=0
"${lint[@]}" "${files[@]}" || failed=1
"${format[@]}" "${files[@]}" || failed=1
uv run --locked lint-imports || failed=1
uv run --locked pyrefly check || failed=1
if [ "$SKIP_DOCS" = false ]; then
    uv run --locked pytest -q tests/docs/test_documents.py tests/docs/test_pages.py || failed=1
fi
exit $failed
