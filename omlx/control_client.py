"""The running server of this machine, asked over HTTP: its shard map, its offers, and what it shall do."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import quote

import httpx
import msgspec

from omlx.cluster.offer import Offer
from omlx.cluster.shard_map import ShardMap
from omlx.errors import BadSetting, Full, OmlxError, Refused
from omlx.settings import Settings

LOOK_WITHIN_S = 5.0
CONNECT_WITHIN_S = 3.0
MOVE_BEYOND_S = 60.0
"""What an order may take beyond the loads in it."""
EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Where a server that listens on every address is reached from here."""
MOST_QUOTED = 200
UNREACHED = (httpx.ConnectError, httpx.ConnectTimeout)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Look:
    """What the server says, or why there is nothing: one of both is None."""

    map: ShardMap | None
    why: str | None
    heard: bool
    """Something answered there."""


@dataclass(frozen=True, slots=True)
class Asked:
    """As `Look`, of an offer."""

    offer: Offer | None
    why: str | None
    heard: bool


class ControlClient:
    """A context. Orders are sent once, and waited for as long as they may take."""

    def __init__(self, settings: Settings, *, look_within_s: float = LOOK_WITHIN_S) -> None:
        """Raises BadSetting for what can be no host or key."""
        host = EVERYWHERE.get(settings.host, settings.host)
        self.place = f"[{host}]:{settings.port}" if ":" in host else f"{host}:{settings.port}"
        self._load_s = settings.load_timeout_s
        self._look_s = look_within_s
        # This machine: a proxy from the environment must not come between.
        try:
            self._http = httpx.Client(
                base_url=f"http://{self.place}/omlx/v1/",
                headers={"Authorization": f"Bearer {settings.api_key}"} if settings.api_key else {},
                trust_env=False,
            )
        except (httpx.InvalidURL, UnicodeError) as error:
            raise BadSetting(
                f"settings host = {settings.host!r}, api_key: no request can have these"
            ) from error

    def __enter__(self) -> "ControlClient":
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def look(self) -> Look:
        """Never raises for what the server does or is."""
        return Look(*self._get("cluster", ShardMap))

    def offer(self, model: str) -> Asked:
        """What it plans a model with, by its id or folder. Never raises, as `look`."""
        return Asked(*self._get("offer", Offer, model=model))

    def _get(self, path: str, kind: type[T], **query: str) -> tuple[T | None, str | None, bool]:
        """What it says; or why there is nothing, and whether something answered."""
        try:
            answer = self._http.get(path, params=query, timeout=self._look_s)
            self._check(answer)
            return msgspec.json.decode(answer.content, type=kind), None, True
        except httpx.HTTPError as error:
            return None, self._silence(error), not isinstance(error, UNREACHED)
        except msgspec.MsgspecError:
            return None, f"what answers at {self.place} is no omlx server of this version", True
        except OmlxError as error:
            return None, str(error), True

    def activate(self, model: str) -> dict[str, Any]:
        """Returns once it is loaded. Like all below raises Refused, Full, OmlxError as the server answers."""
        return self._order(f"models/{quote(model)}/activate", {}, self._load_s)

    def deactivate(self, model: str, within_s: float) -> dict[str, Any]:
        return self._order(f"models/{quote(model)}/deactivate", {"within_s": within_s}, within_s)

    def rebalance(self, model: str, *, dry_run: bool) -> dict[str, Any]:
        return self._order(f"models/{quote(model)}/rebalance", {"dry_run": dry_run}, self._load_s)

    def drain(self, node_id: str) -> dict[str, Any]:
        return self._order(f"nodes/{quote(node_id, safe='')}/drain", {}, self._load_s)

    def undrain(self, node_id: str) -> dict[str, Any]:
        return self._order(f"nodes/{quote(node_id, safe='')}/undrain", {}, self._load_s)

    def _order(self, path: str, body: Mapping[str, object], takes_s: float) -> dict[str, Any]:
        most = httpx.Timeout(takes_s + MOVE_BEYOND_S, connect=CONNECT_WITHIN_S)
        try:
            answer = self._http.post(path, json=body, timeout=most)
        except UNREACHED as error:
            raise BadSetting(self._silence(error)) from error
        except httpx.HTTPError as error:
            raise OmlxError(self._silence(error)) from error
        self._check(answer)
        try:
            said = answer.json()
        except ValueError:
            said = None
        if not isinstance(said, dict):
            raise Refused(f"what answers at {self.place} is no omlx server: {answer.text[:MOST_QUOTED]!r}")
        return said

    def _silence(self, error: httpx.HTTPError) -> str:
        match error:
            case httpx.ConnectError() | httpx.ConnectTimeout():
                where = f"no server answers at {self.place}"
                return (
                    f"{where}: start one with `omlx serve`, or say where it is (--port, OMLX_PORT, OMLX_HOST)"
                )
            case httpx.TimeoutException():
                return f"the server at {self.place} is silent: it has not answered in time"
            case _:
                return f"the server at {self.place} hung up without an answer ({type(error).__name__})"

    def _check(self, answer: httpx.Response) -> None:
        """Raises what an HTTP error means here, in the server's own sentence."""
        if answer.is_success:
            return
        code, said = _error(answer)
        place = f"the server at {self.place}"
        if answer.status_code == httpx.codes.UNAUTHORIZED:
            raise BadSetting(f"{place} asks for its key: set OMLX_API_KEY, or api_key in the settings")
        if said is None or code == "unknown_url":
            raise BadSetting(f"what answers at {self.place} is no omlx server of this version")
        if answer.status_code == httpx.codes.SERVICE_UNAVAILABLE:
            raise Full(f"{place}: {said}")
        if answer.is_client_error:
            raise Refused(f"{place}: {said}")
        raise OmlxError(f"{place}: {said}")


def _error(answer: httpx.Response) -> tuple[str | None, str | None]:
    """Code and sentence; None where it is not our shape."""
    try:
        found = answer.json()["error"]
        return found["code"], str(found["message"])
    except (ValueError, KeyError, TypeError):
        return None, None
