"""What HOST is: seen, checked, and a node of this Mac's cluster."""

import socket
from contextlib import suppress
from typing import Any

from tests.mac.machines import Failed, Mlx, mlx_here, omlx_json
from tests.mac.sizes import gb
from tests.mac.steps import Run, Skipped, step

DISCOVER_S = 5
CHECK_WITHIN_S = 120.0


@step("this machine: macOS, Apple silicon, MLX on Metal")
def this_machine(run: Run) -> str:
    run.here = here = mlx_here()
    if not here.shows_macos:
        raise Skipped(f"{here.system} on {here.machine}, {'Metal' if here.metal else 'no Metal'}: not a Mac")
    return f"{described(here)}, macOS {here.release}"


def described(mlx: Mlx) -> str:
    return f"{mlx.name}, {gb(mlx.memory_bytes)}, of which the GPU ought to have {gb(mlx.most_bytes)} at most"


@step("HOST is seen by mDNS")
def seen(run: Run) -> str:
    host = run.asked.host
    heard = omlx_json("cluster", "discover", "--seconds", str(DISCOVER_S), within_s=DISCOVER_S + 30)["nodes"]
    there = [node for node in heard if not node["said_goodbye"]]
    addresses = addresses_of(host)
    for node in there:
        if is_host(node, host, addresses):
            versions = ", ".join(node["differing_versions"])
            differ = f"other versions of {versions}" if versions else "the versions of here"
            return f"{node['name']} at {', '.join(node['addresses'][:4])}, with {differ}"
    names = ", ".join(node["name"] for node in there) or "nobody"
    raise Failed(
        f"{host} was not heard within {DISCOVER_S} s, {names} was: is `omlx node install` done there, and "
        "does System Settings > Privacy & Security > Local Network allow it there, and this program here?"
    )


def addresses_of(host: str) -> set[str]:
    """Its own name's; none where the name is known to nobody."""
    with suppress(OSError):
        return {str(info[4][0]) for info in socket.getaddrinfo(host, None)}
    return set()


def is_host(node: dict[str, Any], host: str, addresses: set[str]) -> bool:
    """Whether what was heard is the machine that was named."""
    if addresses & set(node["addresses"]):
        return True
    return str(node["name"]).partition(".")[0].lower() == host.partition(".")[0].lower()


@step("HOST passes `omlx cluster check`")
def checked(run: Run) -> str:
    words = ("cluster", "check", run.asked.host, *login(run))
    (run.report,) = omlx_json(*words, within_s=CHECK_WITHIN_S, codes=(0, 1))
    findings = run.report["findings"]
    if blocking := [told(one) for one in findings if one["level"] == "blocking"]:
        raise Failed("; ".join(blocking))
    links = [told(one) for one in findings if one["what"].startswith("link")]
    warnings = [f"warning: {told(one)}" for one in findings if one["level"] == "warning"]
    if not any(link["kind"] == "thunderbolt" for link in run.report["links"]):
        links.append("no link by Thunderbolt")
    return "; ".join(dict.fromkeys([*links, *warnings]))


def login(run: Run) -> tuple[str, ...]:
    vouched = () if run.asked.fingerprint is None else ("--fingerprint", run.asked.fingerprint)
    return ("--user", run.asked.user, *vouched)


def told(finding: dict[str, Any]) -> str:
    fix = f" -> {finding['fix']}" if finding["fix"] else ""
    return f"{finding['what']}: {finding['seen']}{fix}"


@step("HOST is a node of this cluster")
def member(run: Run) -> str:
    id = run.facts()["node_id"]
    run.node = found = listed(id)
    if found is not None:
        days = found["certificate_days"]
        return f"{found['name']} ({found['id'][:8]}) was one already; its certificate lasts {days} days"
    words = ("cluster", "join", run.asked.host, *login(run))
    (joined,) = omlx_json(*words, within_s=CHECK_WITHIN_S, codes=(0, 1))
    if not joined["joined"]:
        raise Failed("it did not join: " + "; ".join(joined["why"]))
    run.node = listed(joined["node_id"])
    if run.node is None:
        raise Failed("it joined, and `omlx cluster status` does not list it")
    return f"{run.node['name']} ({joined['node_id'][:8]}) has joined now"


def listed(id: str | None) -> dict[str, Any] | None:
    """The member with that id."""
    nodes = omlx_json("cluster", "status", within_s=CHECK_WITHIN_S)["nodes"]
    return next((node for node in nodes if node["id"] == id), None)
