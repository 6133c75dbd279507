#!/usr/bin/env bash
# The script beside this one, by the name that older documents give it.
exec bash "$(dirname "$0")/train_llama3_8b_h100_fp8.sh" "$@"
