"""One schema for every setting. Command line > environment OMLX_* > ~/.omlx/settings.json > default."""

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError
from pydantic_settings import (
    BaseSettings,
    JsonConfigSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from omlx.errors import BadSetting

SETTINGS_FILE = Path("~/.omlx/settings.json").expanduser()


class Settings(BaseSettings):
    """Read once by the command line, checked once, handed down as the values that are needed."""

    model_config = SettingsConfigDict(
        env_prefix="OMLX_", json_file=SETTINGS_FILE, extra="forbid", frozen=True
    )

    models: Path = Path("~/.omlx/models")
    """A model folder, or a folder of model folders."""
    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=1, le=65535)
    api_key: str | None = Field(default=None, min_length=8)
    """Asked of every client; needed when `host` is not this machine alone."""
    allowed_hosts: tuple[str, ...] = ()
    """Further names that a client may write in its Host header."""
    max_body_bytes: int = Field(default=32 * 2**20, ge=1024)

    stages: int = Field(default=1, ge=1, le=64)
    """Stage processes per model on this machine."""
    link: Literal["tcp", "ring", "jaccl"] = "tcp"
    """How hidden states travel: our framed sockets, or mx.distributed's ring or JACCL."""
    max_concurrent_requests: int = Field(default=8, ge=1, le=1024)
    """Sequences that run at once, per model."""
    max_queued_requests: int = Field(default=64, ge=0, le=100_000)
    """Sequences that may wait beyond those; the next is refused with 503 and Retry-After."""
    step_tokens: int = Field(default=512, ge=1, le=65536)
    """Most prompt tokens computed in one step."""
    slowdown: float = Field(default=2.85, ge=1.1, le=100.0)
    """While prompts are computed, running answers' tokens come at most this many times slower."""
    context_tokens: int | None = Field(default=None, ge=16)
    """Longest prompt + answer; default: what the model's config says."""
    keepalive_s: float = Field(default=10.0, gt=0)
    """A stream that has nothing to say sends an SSE comment this often, in seconds."""
    load_timeout_s: float = Field(default=900.0, gt=0)
    step_timeout_s: float = Field(default=600.0, gt=0)
    """A step that takes longer counts as a stuck stage."""
    trace: Path | None = None
    """Folder for a timeline of every model's steps, to be opened in Perfetto."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """No dotenv file: one file of settings is enough to look into."""
        return init_settings, env_settings, JsonConfigSettingsSource(settings_cls)


def load_settings(**flags: Any) -> Settings:
    """The settings with `flags` on top; a flag of None was not given.

    Raises BadSetting with the name, the value and what is allowed.
    """
    try:
        return Settings(**{name: value for name, value in flags.items() if value is not None})
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            raise BadSetting(f"{SETTINGS_FILE}: unknown setting {name!r}") from error
        raise BadSetting(f"setting {name} = {first['input']!r}: {first['msg']}") from error
    except json.JSONDecodeError as error:
        raise BadSetting(f"{SETTINGS_FILE}, line {error.lineno}: not JSON ({error.msg})") from error
