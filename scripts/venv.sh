#!/bin/sh
# Makes .venv with the newest Python that serves, or says in one line what is missing.
# `find` only prints that Python; `sweep` only drops the stamps of a .venv that no longer serves.
set -eu
cd "$(dirname "$0")/.."

serves='import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))'
old= bare=
find_python() {
    for name in python3.13 python3.12 python3.11 python3; do
        # Run it, not only look for it: a version manager's shim may stand for nothing.
        "$name" -c '' 2>/dev/null || continue
        "$name" -c "$serves" || { old=$name; continue; }
        "$name" -c 'import ensurepip, venv' 2>/dev/null || { bare=$name; continue; }
        echo "$name"
        return 0
    done
    if [ -n "$bare" ]; then
        echo "omlx: $bare cannot make virtual environments: install its venv package (Debian: apt-get install python3-venv) and try again" >&2
    elif [ -n "$old" ]; then
        echo "omlx: $("$old" -V) is not 3.11, 3.12 or 3.13: install one of them (macOS: brew install python@3.13) and try again" >&2
    else
        echo "omlx: no python3 found: install Python 3.13, 3.12 or 3.11 (macOS: brew install python@3.13; Debian: apt-get install python3 python3-venv) and try again" >&2
    fi
    return 1
}

venv_serves() {
    .venv/bin/python -c "import pip; $serves" 2>/dev/null
}

case ${1-} in
find)
    find_python
    ;;
sweep)
    venv_serves || rm -f .venv/*.stamp
    ;;
*)
    venv_serves && exit 0
    python=$(find_python)
    echo "omlx: making .venv with $("$python" -V)"
    "$python" -m venv --clear .venv
    ;;
esac
