"""One schema for every setting. Command line > environment OMLX_* > ~/.omlx/settings.json > default."""

import json
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, TypeAdapter, ValidationError, field_validator, model_validator
from pydantic_settings import (
    BaseSettings,
    JsonConfigSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from omlx.cache.budget import parse_size
from omlx.errors import BadSetting

SETTINGS_FILE = Path("~/.omlx/settings.json").expanduser()
OF_THE_CACHE = (
    "hot_cache_max_size",
    "paged_ssd_cache_dir",
    "paged_ssd_cache_max_size",
    "cache_block_tokens",
    "cache_snapshot_tokens",
)
SWITCH = TypeAdapter(bool)
Size = Annotated[str, Field(coerce_numbers_to_str=True)]
"""As `omlx.cache.budget.parse_size` reads it; in the file it may be a number of bytes."""


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
    cluster: bool = True
    """Whether models may run on the machines that joined this one's cluster too."""
    nodes: dict[str, str] = {}
    """What a machine of the cluster gives, by its name: `headless` (0.9 of its memory), `workstation` (0.65,
    as without a word), a share such as 50%, or a size such as 12GB."""
    objective: Literal["single", "throughput"] = "single"
    """What a plan over several machines is best for: one stream, or many at once."""
    ray_port: int = Field(default=6399, ge=1024, le=65535)
    """Of Ray's head, for the machines of the cluster alone."""
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
    kv_bits: Literal[4, 8] | None = None
    """Of each number in keys and values of layers that keep every token; none: as the model computes them."""
    cache: bool = True
    """Whether keys and values of prompts are kept. Without, no other setting of the cache is looked at."""
    hot_cache_max_size: Size = "10%"
    """RAM for them: bytes, or a share of what all models may take; 0: none."""
    paged_ssd_cache_dir: Path = Path("~/.omlx/cache")
    paged_ssd_cache_max_size: Size = "10%"
    """For all models: bytes, or a share of that folder's volume; 0: nothing is written."""
    cache_block_tokens: int = Field(default=256, ge=16, le=8192)
    """What is kept, found and given up together."""
    cache_snapshot_tokens: int = Field(default=1024, ge=16)
    """Recurrent layers' states are kept this often; a multiple of the block."""
    keepalive_s: float = Field(default=10.0, gt=0)
    """A stream that has nothing to say sends an SSE comment this often, in seconds."""
    load_timeout_s: float = Field(default=900.0, gt=0)
    step_timeout_s: float = Field(default=600.0, gt=0)
    """A step that takes longer counts as a stuck stage."""
    trace: Path | None = None
    """Folder for a timeline of every model's steps, to be opened in Perfetto."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    @model_validator(mode="before")
    @classmethod
    def _without_a_cache(cls, given: dict[str, Any]) -> dict[str, Any]:
        """--no-cache is the way out when something is wrong with the cache, its settings included."""
        try:
            cache = SWITCH.validate_python(given.get("cache", True))
        except ValidationError:
            return given  # the field itself says what is wrong
        return given if cache else {name: value for name, value in given.items() if name not in OF_THE_CACHE}

    @field_validator("kv_bits", mode="before")
    @classmethod
    def _number(cls, given: Any) -> Any:
        """The environment has text."""
        return int(given) if isinstance(given, str) and given.isdecimal() else given

    @field_validator("paged_ssd_cache_dir")
    @classmethod
    def _absolute(cls, folder: Path) -> Path:
        """It means the same folder in every process."""
        try:
            return folder.expanduser().absolute()
        except RuntimeError as error:
            raise BadSetting(
                f"setting paged_ssd_cache_dir = '{folder}': there is no such home folder"
            ) from error

    @model_validator(mode="after")
    def _check_the_cache(self) -> Self:
        parse_size(self.hot_cache_max_size, 0, "hot_cache_max_size")
        parse_size(self.paged_ssd_cache_max_size, 0, "paged_ssd_cache_max_size")
        if self.cache_snapshot_tokens % self.cache_block_tokens:
            raise BadSetting(
                f"setting cache_snapshot_tokens = {self.cache_snapshot_tokens}: must be a multiple of "
                f"cache_block_tokens, which is {self.cache_block_tokens}"
            )
        return self

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
