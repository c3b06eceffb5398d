#!/bin/sh
# Puts oMLX into ~/.omlx/venv and has `omlx node` always run: sh install.sh [--system] [--no-service] [WHEEL_OR_FOLDER]
# --system: for the whole machine, by sudo, running under this account without anybody logged in.
# Again: brings both up to date. Out of a checkout it installs that checkout, else what PyPI has.
set -eu

say() { echo "omlx: $*" >&2; }

system= service=yes package=
for word in "$@"; do
    case $word in
    --system) system=yes ;;
    --no-service) service= ;;
    -*) say "there is no option $word; there are --system and --no-service"; exit 2 ;;
    *) package=$word ;;
    esac
done

if [ -n "${SUDO_USER-}" ]; then
    say "start it without sudo, or root owns what is yours; with --system it calls sudo itself"
    exit 2
fi

if [ -n "$package" ]; then
    [ -e "$package" ] || { say "there is no $package: name a wheel or a checkout"; exit 2; }
    # An absolute path is no option to pip, whatever it is called.
    package=$(cd "$(dirname -- "$package")" && pwd)/$(basename -- "$package")
else
    case $0 in */*) here=${0%/*} ;; *) here=. ;; esac
    if [ -f "$here/../pyproject.toml" ] && [ -f "$here/../omlx/cli.py" ]; then
        package=$(cd "$here/.." && pwd)
    else
        package=omlx-cluster
    fi
fi
extras=cluster
[ "$(uname -s)" = Darwin ] || extras=cluster,cpu

serves='import sys, ensurepip, venv; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))'
python=
for name in python3.13 python3.12 python3.11 python3; do
    # Run it, not only look for it: a version manager's shim may stand for nothing.
    if "$name" -c "$serves" 2>/dev/null; then
        python=$name
        break
    fi
done
if [ -z "$python" ]; then
    say "no Python 3.11, 3.12 or 3.13 that can make virtual environments" \
        "(macOS: brew install python@3.13; Debian: apt-get install python3-venv)"
    exit 2
fi

folder=$HOME/.omlx
[ -d "$folder" ] || mkdir -m 700 "$folder"
venv=$folder/venv
if ! "$venv/bin/python" -c "import pip; $serves" 2>/dev/null; then
    say "making $venv with $("$python" -V)"
    "$python" -m venv --clear "$venv"
fi
say "installing $package[$extras] into $venv"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --upgrade "$package[$extras]"

if [ -z "$service" ]; then
    say "done: $venv/bin/omlx"
elif [ -n "$system" ] && [ "$(id -u)" != 0 ]; then
    sudo -- "$venv/bin/omlx" node install
else
    "$venv/bin/omlx" node install
fi
