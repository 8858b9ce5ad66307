#!/usr/bin/env bash
# Real engines of every supported vLLM minor that has a CPU build on the package index, in a fresh environment each.
#
#   OSCAR_TEST_MODEL=FOLDER OSCAR_TEST_SIDECAR=FILE scripts/test_all_versions.sh [MINOR...]        MINOR: 0.31
#
# One at a time: about 5 minutes and 4 GB of disk each. Fails if a version that installs does not pass.
set -uo pipefail
cd "$(dirname "$0")/.."

# behind the files: every layer's output against the reference, prefix caching, a drafting head, and starts as the README
# has them, where vLLM chooses what nobody asked for
tests=(
    tests/unit/test_plugin.py tests/unit/test_seams.py tests/engine/test_startup.py tests/engine/test_capacity.py
    tests/engine/test_contract.py::test_mixed_batch
    tests/engine/test_scheduling.py::test_prefix_hit_miss_and_no_cache_give_the_same_text
    "tests/engine/test_heads.py::test_a_head[eagle3-2]"
    "tests/unit/test_docs.py::test_code_blocks[README.md]"
)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
results=()
failed=0

[ $# -gt 0 ] || set -- 0.26 0.27 0.28 0.29 0.30 0.31 0.32 0.33
for minor in "$@"; do
    if ! scripts/setup_env.sh "$scratch/venv" "$minor.*" >"$scratch/log" 2>&1; then
        tail -3 "$scratch/log"
        results+=("$minor: not tested, its CPU build does not install here")
    elif "$scratch/venv/bin/python" -m pytest -q "${tests[@]}"; then
        results+=("$minor: passed")
    else
        results+=("$minor: FAILED")
        failed=1
    fi
    rm -rf "$scratch/venv"
done
printf '%s\n' "${results[@]}"
exit "$failed"
