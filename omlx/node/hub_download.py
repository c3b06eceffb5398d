"""The process that fetches a model from the Hugging Face hub. The only importer of huggingface_hub.

    python -m omlx.node.hub_download whole|headers REPOSITORY REVISION FOLDER

Says on standard output how far it is and how it ended, a line of JSON each (`hub.py`). The library's
snapshot_download begins a file anew that was cut off, and compares no digest; so its http_get writes into
`.part` files of ours, which are gone on with, and a file gets its name when its digest is right.
"""

import errno
import fcntl
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from pathlib import Path

import httpx2
import msgspec
from huggingface_hub import HfApi, constants, hf_hub_url
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.file_download import http_get
from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined] # exported lazily

from omlx.errors import BadModel, Refused
from omlx.node.hub import Arrived, Failed, Fetched, HubName, Message

WEIGHTS = "model*.safetensors"
"""What mlx-lm loads; some repositories hold the same weights a second time under another name."""
TEXTS = ("*.json", "*.model", "*.txt", "*.jinja")
ANSWER_WITHIN_S = 30.0
AT_ONCE = 4
TELL_EVERY_S = 0.2
HASH_BYTES = 1 << 20
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
AGAIN = "try again: it goes on from there"


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One file of a commit. Large ones have a SHA-256, the others git's own digest."""

    name: str
    size: int
    sha256: str | None
    git: str | None

    def is_right(self, path: Path) -> bool:
        digest = hashlib.sha256() if self.sha256 is not None else hashlib.sha1(b"blob %d\0" % self.size)
        with path.open("rb") as file:
            while block := file.read(HASH_BYTES):
                digest.update(block)
        return digest.hexdigest() == (self.sha256 or self.git)


@dataclass(frozen=True, slots=True)
class Listing:
    """What a revision is, and its files that are wanted here."""

    repository: str
    commit: str
    files: tuple[RemoteFile, ...]

    @property
    def bytes(self) -> int:
        return sum(file.size for file in self.files)


def main() -> None:
    what, repository, revision, folder = sys.argv[1:]
    name = HubName(repository, revision)
    try:
        listing = list_files(name)
        whole = what == "whole"
        place = fetch(name, listing, Path(folder)) if whole else fetch_headers(listing, Path(folder))
        tell(Fetched(str(place)))
    except Refused as error:
        tell(Failed(str(error)))
    except (OSError, httpx2.HTTPError) as error:
        tell(explain(error, name))
    # After a failure other files are still on their way, in threads that nobody can end.
    os._exit(0)


def tell(message: Message) -> None:
    try:
        sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        os._exit(1)  # whoever asked is gone


# ------------------------------------------------------------------ what there is


def list_files(name: HubName) -> Listing:
    """Raises BadModel where nothing of it can be served, and what the library raises."""
    info = HfApi().model_info(
        name.repository, revision=name.revision, files_metadata=True, timeout=ANSWER_WITHIN_S
    )
    files = tuple(
        RemoteFile(one.rfilename, one.size or 0, one.lfs.sha256 if one.lfs else None, one.blob_id)
        for one in info.siblings or ()
        if is_wanted(one.rfilename)
    )
    names = {file.name for file in files}
    lacking = [
        pattern for pattern in ("config.json", WEIGHTS) if not any(fnmatch(one, pattern) for one in names)
    ]
    if lacking or info.sha is None:
        raise BadModel(
            f"{constants.ENDPOINT}/{name.repository} has no {' and no '.join(lacking) or 'commit'}: "
            "only models as mlx-lm saves them can be served"
        )
    return Listing(name.repository, info.sha, files)


def is_wanted(file: str) -> bool:
    """Folders in a repository hold other forms of the same model."""
    if "/" in file or file.startswith("."):
        return False
    return any(fnmatch(file, pattern) for pattern in (WEIGHTS, *TEXTS))


# ------------------------------------------------------------------ all of it


def fetch(name: HubName, listing: Listing, models: Path) -> Path:
    """The snapshot's folder. Raises Refused, OSError, and what the library raises."""
    kept = models / name.folder_name
    kept.mkdir(parents=True, exist_ok=True)
    with alone(kept / ".lock"):
        place = kept / "snapshots" / listing.commit
        if not place.is_dir():
            arriving = kept / "arriving" / listing.commit
            arriving.mkdir(parents=True, exist_ok=True)
            refuse_full(listing, arriving)
            load_all(listing, arriving)
            place.parent.mkdir(exist_ok=True)
            arriving.rename(place)
            # What was begun of commits that the branch has left behind.
            shutil.rmtree(kept / "arriving")
        if name.revision != listing.commit:
            write_ref(kept / "refs" / name.revision, listing.commit)
    return place


@contextmanager
def alone(lock: Path) -> Iterator[None]:
    """Two that add to one file would spoil it. Raises Refused."""
    with lock.open("w") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Refused("another omlx is fetching it now: wait for that one, or end it") from None
        yield


def refuse_full(listing: Listing, arriving: Path) -> None:
    """Raises Refused."""
    lacking = listing.bytes - arrived(listing, arriving)
    free = shutil.disk_usage(arriving).free
    if lacking > free:
        raise Refused(
            f"it needs {lacking / 1e9:,.1f} GB more where {free / 1e9:,.1f} GB are free, in {arriving}: "
            "make room, or set OMLX_MODELS to a folder on another disk"
        )


def load_all(listing: Listing, arriving: Path) -> None:
    """Several files at once, telling how far it is. What goes wrong with one ends it for all."""
    headers = build_hf_headers(headers={"Accept-Encoding": "identity"})  # a part's size is its bytes here
    jobs = [partial(load, listing, file, arriving, headers) for file in listing.files]
    work(jobs, lambda: tell(Arrived(arrived(listing, arriving), listing.bytes)))


def work(jobs: Sequence[Callable[[], None]], tick: Callable[[], None]) -> None:
    # Not a context: that would wait for the other files when one has failed.
    pool = ThreadPoolExecutor(AT_ONCE)
    left = {pool.submit(job) for job in jobs}
    while left:
        done, left = wait(left, TELL_EVERY_S, FIRST_COMPLETED)
        for one in done:
            one.result()
        tick()
    pool.shutdown()


def load(listing: Listing, file: RemoteFile, arriving: Path, headers: dict[str, str]) -> None:
    """Raises Refused where other bytes came than the hub promised, and what the library raises."""
    whole, part = arriving / file.name, part_of(file, arriving)
    if whole.exists():
        return
    there = size_of(part)
    if there > file.size:
        part.unlink()
        there = 0
    url = hf_hub_url(listing.repository, file.name, revision=listing.commit)
    with part.open("ab") as sink:
        http_get(url, sink, resume_size=there, headers=headers, expected_size=file.size)
    if not file.is_right(part):
        part.unlink()
        raise Refused(f"{file.name} came with other bytes than the hub says; it was deleted, try again")
    part.replace(whole)


def part_of(file: RemoteFile, arriving: Path) -> Path:
    return arriving / f"{file.name}.part"


def arrived(listing: Listing, arriving: Path) -> int:
    """Bytes that are here already."""
    return sum(
        size_of(arriving / file.name) or min(size_of(part_of(file, arriving)), file.size)
        for file in listing.files
    )


def size_of(path: Path) -> int:
    """0 where it is not there."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def write_ref(ref: Path, commit: str) -> None:
    """Whole or not at all."""
    ref.parent.mkdir(parents=True, exist_ok=True)
    beside = ref.with_name(f".{ref.name}.new")
    beside.write_text(commit, encoding="ascii")
    beside.replace(ref)


# ------------------------------------------------------------------ headers alone


def fetch_headers(listing: Listing, folder: Path) -> Path:
    """A folder of the JSON files, and of weight files whose header is followed by a hole."""
    place = folder / listing.repository.replace("/", "--")
    place.mkdir()
    texts = tuple(file for file in listing.files if file.name.endswith(".json"))
    weights = [file for file in listing.files if fnmatch(file.name, WEIGHTS)]
    load_all(Listing(listing.repository, listing.commit, texts), place)
    jobs = [partial(load_header, listing, file, place) for file in weights]
    work(jobs, lambda: tell(Arrived(0, listing.bytes)))
    return place


def load_header(listing: Listing, file: RemoteFile, place: Path) -> None:
    found = HfApi().parse_safetensors_file_metadata(
        listing.repository, file.name, revision=listing.commit, timeout=ANSWER_WITHIN_S
    )
    tensors = {
        name: {"dtype": one.dtype, "shape": one.shape, "data_offsets": list(one.data_offsets)}
        for name, one in found.tensors.items()
    }
    header = json.dumps(tensors).encode()
    end = max((one.data_offsets[1] for one in found.tensors.values()), default=0)
    with (place / file.name).open("wb") as sink:
        sink.write(len(header).to_bytes(8, "little") + header)
        sink.truncate(8 + len(header) + end)


# ------------------------------------------------------------------ what went wrong


def explain(error: OSError | httpx2.HTTPError, name: HubName) -> Failed:
    """In half a sentence: what, where, what to do."""
    hub, page = constants.ENDPOINT, f"{constants.ENDPOINT}/{name.repository}"
    match error:
        case GatedRepoError():
            return Failed(f"it is gated: accept its terms at {page}, and set HF_TOKEN to a token of yours")
        case RepositoryNotFoundError():
            return Failed(f"{hub} shows no such model: check the name; a private one needs HF_TOKEN", True)
        case RevisionNotFoundError():
            return Failed(f"{page} has no revision {name.revision!r}: name a branch, tag or commit", True)
        case HfHubHTTPError():
            return Failed(f"{hub} {refusal(error.response.status_code)}")
        case OfflineModeIsEnabled():
            return Failed("HF_HUB_OFFLINE is set: unset it, or name a model folder")
        case OSError() if error.errno in FULL:
            return Failed(f"the disk is full ({error.strerror}): make room, and {AGAIN}")
        case OSError() if error.filename is not None:
            return Failed(f"{error.filename} cannot be written ({error.strerror})")
        case _:
            first = (str(error) or type(error).__name__).splitlines()[0]
            return Failed(f"{hub} cannot be reached, or broke off ({first}): check the network, and {AGAIN}")


def refusal(status: int) -> str:
    match status:
        case 401:
            return "does not accept the token: set HF_TOKEN to a valid one, or unset it"
        case 403:
            return "says that the token may not read it (403): set HF_TOKEN to one that may"
        case 429:
            return "asks for patience (429): try again in some minutes, or set HF_TOKEN"
        case _:
            return f"answers with {status}: {AGAIN}"


if __name__ == "__main__":
    main()
