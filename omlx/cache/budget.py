"""How many bytes a tier may take: sizes as people write them, and what a volume keeps free. Pure."""

import re
from decimal import Decimal

from omlx.errors import BadSetting

UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
NUMBER = r"(?P<number>\d{1,18}(\.\d{1,9})?)\s*"
SIZE = re.compile(NUMBER + r"(?P<unit>[A-Za-z]*)", re.ASCII)
SHARE = re.compile(NUMBER + "%", re.ASCII)
MOST_FLOOR_BYTES = 20 * 10**9


def bytes_of(text: str) -> int | None:
    """`64GB`: GB is 10^9, GiB 2^30; also B, kB, MB, TB, KiB, MiB, TiB and plain bytes. None: no size."""
    match = SIZE.fullmatch(text.strip())
    if match is None or match["unit"].upper() not in UNITS:
        return None
    return int(Decimal(match["number"]) * UNITS[match["unit"].upper()])


def parse_size(text: str, whole_bytes: int, name: str) -> int:
    """The bytes that setting `name` asks for: as in `bytes_of`, or a share of `whole_bytes` such as `10%`.

    Whether a text is a size does not depend on whole_bytes. Raises BadSetting in one line.
    """
    share = SHARE.fullmatch(text.strip())
    if share is not None and Decimal(share["number"]) <= 100:
        return int(whole_bytes * Decimal(share["number"]) / 100)
    size = bytes_of(text)
    if size is None:
        shown = repr(text if len(text) <= 40 else f"{text[:40]}...")
        raise BadSetting(
            f"setting {name} = {shown}: must be bytes such as 8GB (or MB, TB, GiB), a share from 0% to 100%, "
            "or 0 for none"
        )
    return size


def free_floor_bytes(volume_bytes: int) -> int:
    """What the cold tier leaves free on a volume of so many bytes, for everybody else."""
    return min(volume_bytes // 10, MOST_FLOOR_BYTES)
