"""The models of a folder: ids on the outside, folders on the inside.

A client's string is only ever compared with ids found here; no path is made of it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from omlx.errors import BadModel, BadSetting, ModelNotFound
from omlx.ids import ModelId
from omlx.node.manifest import read_manifest

HUB_PREFIX = "models--"
OTHER_HUB_PREFIXES = ("datasets--", "spaces--")
MOST_NAMED = 10


@dataclass(frozen=True, slots=True)
class LibraryEntry:
    """One model on disk. `problem` is one sentence why it cannot be served; None: it can."""

    id: ModelId
    folder: Path
    problem: str | None


@dataclass(frozen=True, slots=True)
class Library:
    """The models found, sorted by id; an id that stands twice is served from the first place."""

    entries: tuple[LibraryEntry, ...]

    def find(self, model_id: str) -> LibraryEntry:
        """The entry of exactly that id. Raises ModelNotFound with the known ids (10 at most)."""
        for entry in self.entries:
            if entry.id == model_id:
                return entry
        asked = repr(model_id if len(model_id) <= 100 else model_id[:100] + "...")
        known = [entry.id for entry in self.entries if entry.problem is None]
        if not known:
            raise ModelNotFound(f"no model {asked} here; no model is served")
        more = f" and {len(known) - MOST_NAMED} more" if len(known) > MOST_NAMED else ""
        names = ", ".join(known[:MOST_NAMED])
        raise ModelNotFound(f"no model {asked} here; known are: {names}{more}")


def scan(root: Path) -> Library:
    """The models at `root`: itself a model folder, or model folders one or two levels down.

    Ids are `Name` and `Org/Name`; the layout of the Hugging Face cache (`models--Org--Name`) is read
    through its refs/main. Hidden folders are skipped; links in `root` are followed. Headers of weight
    files are read to tell whether a model is complete. Nothing outside `root` and its links is looked at.

    Raises BadSetting when `root` is no folder or cannot be read.
    """
    root = root.expanduser()
    if not root.is_dir():
        state = "is not a folder" if root.exists() else "does not exist"
        raise BadSetting(f"models folder {root} {state}; make it, or name another one")
    try:
        found = list(_found(root))
    except OSError as error:
        raise BadSetting(f"models folder {error.filename}: cannot be read ({error.strerror})") from error
    entries: list[LibraryEntry] = []
    place_of: dict[ModelId, Path] = {}
    # A folder's own name goes before the hub's cache where both make the same id.
    for entry in sorted(found, key=lambda e: (e.id, e.folder.parent.name == "snapshots", e.folder)):
        first = place_of.setdefault(entry.id, entry.folder)
        if first != entry.folder:
            problem = f"{entry.folder}: the id {entry.id} is taken by {first}; rename one of the folders"
            entry = LibraryEntry(entry.id, entry.folder, problem)
        entries.append(entry)
    return Library(tuple(entries))


def _found(root: Path) -> Iterator[LibraryEntry]:
    if _is_model(root):
        yield _entry(_own_id(root), root)
        return
    if root.resolve().name.startswith(HUB_PREFIX):
        yield _hub_entry(root)
        return
    for folder in _folders(root):
        try:
            yield from list(_below(folder))
        except PermissionError as error:
            problem = f"{error.filename}: cannot be read ({error.strerror})"
            yield LibraryEntry(ModelId(folder.name), folder, problem)


def _below(folder: Path) -> Iterator[LibraryEntry]:
    if folder.name.startswith(HUB_PREFIX):
        yield _hub_entry(folder)
    elif folder.name.startswith(OTHER_HUB_PREFIXES):
        return
    elif _is_model(folder):
        yield _entry(folder.name, folder)
    else:
        for inner in _folders(folder):
            if _is_model(inner):
                yield _entry(f"{folder.name}/{inner.name}", inner)


def _folders(parent: Path) -> list[Path]:
    return sorted(path for path in parent.iterdir() if not path.name.startswith(".") and path.is_dir())


def _is_model(folder: Path) -> bool:
    """Weights without config.json count: the reason why it is not served is then shown."""
    return (folder / "config.json").exists() or any(folder.glob("model*.safetensors"))


def _entry(name: str, folder: Path) -> LibraryEntry:
    try:
        read_manifest(folder)
    except BadModel as error:
        return LibraryEntry(ModelId(name), folder, str(error))
    return LibraryEntry(ModelId(name), folder, None)


def _own_id(folder: Path) -> str:
    """A snapshot of the hub's cache has a hash for a name; the model's name stands two levels up."""
    resolved = folder.resolve()
    repository = resolved.parent.parent.name
    if resolved.parent.name == "snapshots" and repository.startswith(HUB_PREFIX):
        return _hub_id(repository)
    return resolved.name


def _hub_id(name: str) -> str:
    return name.removeprefix(HUB_PREFIX).replace("--", "/")


def _hub_entry(folder: Path) -> LibraryEntry:
    # A root of "." has its name only once resolved; a link named like a repository keeps its own.
    name = folder.name if folder.name.startswith(HUB_PREFIX) else folder.resolve().name
    model_id = ModelId(_hub_id(name))
    ref = folder / "refs" / "main"
    try:
        revision = ref.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return LibraryEntry(model_id, folder, f"{ref} cannot be read; download the model again")
    # The file may hold anything; only a plain name may become part of a path.
    if not revision.isalnum() or not (folder / "snapshots" / revision).is_dir():
        return LibraryEntry(model_id, folder, f"{ref} names no snapshot that is here; download it again")
    return _entry(model_id, folder / "snapshots" / revision)
