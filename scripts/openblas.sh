#!/bin/sh
# MLX's own BLAS on Linux is some twenty times slower in float32 than OpenBLAS. Installs OpenBLAS where
# that is possible without asking; otherwise says so in a line and goes on, but fails where CI=true.
# `scripts/openblas.sh find` only prints the library's path, if there is one.
set -eu
[ "$(uname -s)" = Linux ] || exit 0
PATH=$PATH:/usr/sbin:/sbin
package=libopenblas0-pthread

library() {
    ldconfig -p | sed -n 's/^[[:space:]]*libopenblas\.so\.0 .* => //p' | head -n 1
}

path=$(library)
if [ "${1-}" = find ]; then
    echo "$path"
    exit 0
fi
if [ -z "$path" ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "omlx: installing $package"
    log=$(mktemp)
    export DEBIAN_FRONTEND=noninteractive
    { apt-get update && apt-get install -y --no-install-recommends "$package"; } >"$log" 2>&1 </dev/null ||
        tail -n 3 "$log" >&2
    rm -f "$log"
    path=$(library)
fi
[ -n "$path" ] && exit 0
echo "omlx: no OpenBLAS here, so MLX computes slowly: install it (Debian: sudo apt-get install $package)" >&2
[ "${CI-}" != true ]
