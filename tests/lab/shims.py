"""Commands that a Mac has and Linux lacks, with a Mac's answers."""

import shlex


def mac_shims(chip: str = "Apple M4 Max", memory_gib: int = 64, macos: str = "15.5") -> dict[str, str]:
    """Names of commands and the shell scripts that answer for them, first in a host's PATH."""
    return {"sysctl": _sysctl(chip, memory_gib << 30, macos), "sw_vers": _sw_vers(macos)}


def _sysctl(chip: str, memory_bytes: int, macos: str) -> str:
    return f"""#!/bin/sh
bare=
for name; do
  case "$name" in
    -n) bare=1; continue ;;
    -*) continue ;;
    machdep.cpu.brand_string) value={shlex.quote(chip)} ;;
    hw.memsize) value={memory_bytes} ;;
    hw.model) value=Mac16,9 ;;
    hw.optional.arm64) value=1 ;;
    kern.osproductversion) value={shlex.quote(macos)} ;;
    *) echo "sysctl: unknown oid '$name'" >&2; exit 1 ;;
  esac
  if [ "$bare" ]; then echo "$value"; else echo "$name: $value"; fi
done
"""


def _sw_vers(macos: str) -> str:
    version = shlex.quote(macos)
    return f"""#!/bin/sh
case "$1" in
  -productVersion|--productVersion) echo {version} ;;
  -productName|--productName) echo macOS ;;
  *) printf 'ProductName:\\t\\tmacOS\\nProductVersion:\\t\\t%s\\n' {version} ;;
esac
"""
