"""MODEL on the command line where it is a name of the Hugging Face hub: found here, or fetched, with a bar.

Only `org/name` and `org/name@revision` that are no path of this machine count; anything else is a folder.
"""

from pathlib import Path

from rich.console import Console

from omlx.node.hub import HubName, fetch, fetched_headers, find_here, parse_name
from omlx.node.manifest import ModelManifest, read_manifest
from omlx.settings import Settings, load_settings
from omlx.show import LoadBars

errors = Console(stderr=True, soft_wrap=True, highlight=False)


def named_on_hub(word: str) -> HubName | None:
    """None where it can be no name of the hub's, or there is such a path."""
    name = parse_name(word)
    return None if name is None or Path(word).exists() else name


def own_models() -> Path:
    """The folder for models that are fetched: the setting, unless that is a single model."""
    models = load_settings().models.expanduser()
    alone = (models / "config.json").exists()
    default: Path = Settings.model_fields["models"].default
    return (default if alone else models).expanduser().absolute()


def fetched(settings: Settings, word: str | None) -> Settings:
    """With a folder for `models`, where the argument `word` is a name of the hub's. Raises as `hub.fetch`."""
    name = None if word is None else named_on_hub(word)
    if name is None:
        return settings
    folder = find_here(name, own_models())
    if folder is None:
        with LoadBars(errors) as bars:
            folder = fetch(name, own_models(), bars.tell)
    return settings.model_copy(update={"models": folder})


def hub_manifest(word: str, kv_bits: int | None = None) -> ModelManifest | None:
    """Of a model of the hub, by what is here or by the headers of its files there; None where `word` is no
    name of the hub's. Raises as `hub.fetch`, and BadModel."""
    name = named_on_hub(word)
    if name is None:
        return None
    if (folder := find_here(name, own_models())) is not None:
        return read_manifest(folder, kv_bits)
    with errors.status(f"{name}: asking the hub what it weighs"), fetched_headers(name) as headers:
        return read_manifest(headers, kv_bits)
