#!/usr/bin/env bash
# Print the first interpreter that runs and is one of the wanted minor versions, in the order given.
#   scripts/find_python.sh 3.11 3.12 3.10
set -u
for wanted in "$@"; do
    for candidate in "python$wanted" "$HOME"/.pyenv/versions/"$wanted".*/bin/python python3 python; do
        # A pyenv shim exists for every version ever installed and fails when run; so run it.
        found=$("$candidate" -c 'import ensurepip, sys, venv; print("%d.%d" % sys.version_info[:2], sys.executable)' \
            2>/dev/null) || continue
        if [ "${found%% *}" = "$wanted" ]; then
            printf '%s\n' "${found#* }"
            exit 0
        fi
    done
done
printf 'no Python %s with venv found on PATH or in ~/.pyenv; install one, or pass PYTHON=/path/to/python\n' "$*" >&2
exit 1
