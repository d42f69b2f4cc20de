#!/usr/bin/env bash
# Run the Megatron tests against every supported megatron-core: `make test-matrix`.
#   scripts/test_matrix.sh [--only VERSION] [pytest arguments ...]
#
# One environment for each Python; a megatron-core is 2 MB of Python, so each version lies in a folder of its own that
# is put first on the path.
set -euo pipefail
cd "$(dirname "$0")/.."

python311_versions=(0.12.3 0.13.1 0.14.0 0.15.3 0.16.1)
python312_versions=(0.17.1 0.18.2 0.19.2)
only=""
if [ "${1:-}" = "--only" ]; then
    only=$2
    shift 2
fi

failed=()

run_versions() { # PYTHON_VERSION VENV MEGATRON_VERSION...
    local python_version=$1 venv=$2
    shift 2
    local python
    if ! python=$(scripts/find_python.sh "$python_version"); then
        failed+=("$* (no Python $python_version)")
        return
    fi
    make venv VENV="$venv" PYTHON="$python"
    for version in "$@"; do
        if [ -n "$only" ] && [ "$only" != "$version" ]; then
            continue
        fi
        local folder="$venv/megatron-core/$version"
        if [ ! -d "$folder/megatron" ]; then
            "$venv/bin/python" -m pip install --quiet --no-deps --target "$folder" "megatron-core==$version"
        fi
        echo "== megatron-core $version on Python $python_version"
        PYTHONPATH="$folder" MCORE_CKPT_TEST_MEGATRON="$version" \
            "$venv/bin/python" -m pytest -m "not slow" tests/megatron "${pytest_arguments[@]}" || failed+=("$version")
    done
}

pytest_arguments=("$@")
run_versions 3.11 .venv "${python311_versions[@]}"
run_versions 3.12 .venv312 "${python312_versions[@]}"

if [ ${#failed[@]} -gt 0 ]; then
    printf 'failed: %s\n' "${failed[@]}" >&2
    exit 1
fi
echo "all versions passed"
