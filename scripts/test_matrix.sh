#!/usr/bin/env bash
# Run the Megatron tests against every supported megatron-core, and let each version read what all of them have written:
# `make test-matrix`.
#   scripts/test_matrix.sh [--only VERSION]... [--keep DIRECTORY] [pytest arguments ...]
#
# One environment for each Python; a megatron-core is 2 MB of Python, so each version lies in a folder of its own that
# is put first on the path. Checkpoints and reports lie in DIRECTORY, if it is given; what is there already is not written
# or read again, so that an interrupted run can be taken up.
set -euo pipefail
cd "$(dirname "$0")/.."

tested=$(sed -n 's/^TESTED_VERSIONS = (\(.*\))$/\1/p' mcore_ckpt/megatron/versions.py | tr -d '",')
[ -n "$tested" ] || { echo "mcore_ckpt/megatron/versions.py has no TESTED_VERSIONS in one line" >&2; exit 2; }
python311_versions=()
python312_versions=()
for version in $tested; do # megatron-core needs Python 3.12 from 0.17 on
    case $version in
    0.1[2-6].*) python311_versions+=("$version") ;;
    *) python312_versions+=("$version") ;;
    esac
done
only=()
directory=""
while [ $# -gt 0 ]; do
    case $1 in
    --only) only+=("$2") && shift 2 ;;
    --keep) directory=$2 && shift 2 ;;
    *) break ;;
    esac
done
if [ -z "$directory" ]; then
    directory=$(mktemp -d)
    trap 'rm -rf "$directory"' EXIT
fi
mkdir -p "$directory"

failed=()
present=()          # versions that can be run
declare -A python_of folder_of

prepare() { # PYTHON_VERSION VENV MEGATRON_VERSION...
    local python_version=$1 venv=$2 version python
    shift 2
    local wanted=()
    for version in "$@"; do
        if [ ${#only[@]} -eq 0 ] || [[ " ${only[*]} " == *" $version "* ]]; then
            wanted+=("$version")
        fi
    done
    if [ ${#wanted[@]} -eq 0 ]; then
        return
    fi
    if ! python=$(scripts/find_python.sh "$python_version"); then
        failed+=("${wanted[*]} (no Python $python_version)")
        return
    fi
    make venv VENV="$venv" PYTHON="$python"
    for version in "${wanted[@]}"; do
        folder_of[$version]=$venv/megatron-core/$version
        python_of[$version]=$venv/bin/python
        if [ ! -d "${folder_of[$version]}/megatron" ]; then
            PIP_CONSTRAINT="" "$venv/bin/python" -m pip install --quiet --no-deps --target "${folder_of[$version]}" \
                "megatron-core==$version"
        fi
        present+=("$version")
    done
}

under() { # MEGATRON_VERSION PYTHON_ARGUMENT...
    local version=$1
    shift
    echo "== megatron-core $version: $*"
    PYTHONPATH="$PWD/${folder_of[$version]}:$PWD" MCORE_CKPT_TEST_MEGATRON="$version" "${python_of[$version]}" "$@"
}

prepare 3.11 .venv "${python311_versions[@]}"
prepare 3.12 .venv312 "${python312_versions[@]}"

for version in "${present[@]}"; do
    under "$version" -m pytest -m "not slow and not matrix" "$@" tests/megatron/test_install.py \
        tests/megatron/test_traps.py || failed+=("$version")
done
for version in "${present[@]}"; do
    if [ ! -f "$directory/$version-stock-model/outcome.txt" ]; then
        under "$version" -m tests.matrix.version_job write "$directory" || failed+=("$version, writing")
    fi
done
for version in "${present[@]}"; do
    under "$version" -m tests.matrix.version_job read "$directory" || failed+=("$version, reading")
done
if [ ${#present[@]} -gt 0 ]; then
    MCORE_CKPT_MATRIX="$directory" under "${present[0]}" -m pytest -m matrix "$@" tests/matrix || failed+=("reports")
    for kind in plain parallel model; do
        printf '\n%s\n' "$kind"
        under "${present[0]}" -m tests.matrix.table "$directory" "$kind"
    done
fi

if [ ${#failed[@]} -gt 0 ]; then
    printf 'failed: %s\n' "${failed[@]}" >&2
    exit 1
fi
echo "all versions passed"
