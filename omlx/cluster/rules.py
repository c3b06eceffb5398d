"""The rules of a check: each looks at two machines and what was tried between them, and says what it finds.

Pure. A rule is a function and a line in RULES. None raises: what could not be read is a finding of its own.
"""

from collections.abc import Callable, Iterator

import msgspec

from omlx.cluster.facts import Facts, Kind, Measured, ModelFiles, Reached
from omlx.cluster.findings import Finding, Level, LinkFinding, sort_findings
from omlx.cluster.planner import gigabytes

CLOCK_WARNS_S = 1.0
CLOCK_BLOCKS_S = 60.0
"""Beyond, certificates that were just made are not valid yet on the other machine."""
MEMORY_WARNS = 0.2
"""Share of the memory that ought to be free."""
WIRED_WARNS = 0.95
"""Share of the memory; macOS itself has hung with less than a twentieth left."""
DISK_WARNS_BYTES = 20 * 10**9
DISK_BLOCKS_BYTES = 10**9
ROUND_TRIP_WARNS_S = 0.005
LOCAL_NETWORK = "System Settings > Privacy & Security > Local Network"


class Case(msgspec.Struct, frozen=True):
    """What a rule may look at: both machines, and what was tried between them."""

    ours: Facts
    theirs: Facts
    clock_offset_s: float = 0.0
    """Theirs less ours."""
    clock_doubt_s: float = 0.0
    """Half of the round trip in which it was asked."""
    there: tuple[Reached, ...] = ()
    """From here to addresses of theirs."""
    back: tuple[Reached, ...] = ()
    """From there to addresses of ours."""
    links: tuple[LinkFinding, ...] = ()


Rule = Callable[[Case], Iterator[Finding]]


def judge(case: Case) -> tuple[Finding, ...]:
    """What every rule says, the worst first."""
    return sort_findings(finding for rule in RULES for finding in rule(case))


# ------------------------------------------------------------------ links


def links_of(
    ours: Facts,
    theirs: Facts,
    there: tuple[Reached, ...],
    measured: tuple[Measured, ...],
    back: tuple[Measured, ...],
) -> tuple[LinkFinding, ...]:
    """One for each address of theirs that was measured; `back` are addresses of ours, measured from there."""
    from_there = {one.address: one for one in back}
    local = {one.address: one.local for one in there}
    found = []
    for one in measured:
        own = local.get(one.address) or ""
        opposite = from_there.get(own)
        found.append(
            LinkFinding(
                ours=own,
                theirs=one.address,
                kind=slower(kind_of(ours, own), kind_of(theirs, one.address)),
                round_trip_s=one.round_trip_s,
                bytes_per_s_there=one.bytes_per_s,
                bytes_per_s_back=opposite.bytes_per_s if opposite else None,
            )
        )
    return tuple(found)


def kind_of(facts: Facts, address: str) -> Kind:
    return next((one.kind for one in facts.interfaces if one.address == address), "other")


def slower(one: Kind, other: Kind) -> Kind:
    order: tuple[Kind, ...] = ("other", "wifi", "ethernet", "thunderbolt")
    return min(one, other, key=order.index)


# ------------------------------------------------------------------ rules


def same_versions(case: Case) -> Iterator[Finding]:
    for name in ("omlx", "python", "mlx", "mlx-lm", "ray"):
        ours, theirs = case.ours.versions.get(name), case.theirs.versions.get(name)
        if name not in ("omlx", "python") and case.theirs.versions.get("omlx") is None:
            continue  # they come with it
        if ours is None:
            fix = f"install {name} here: pip install 'omlx-cluster[cluster]'"
        elif theirs is None:
            fix = f"pip install 'omlx-cluster[cluster]' there (looked into {case.theirs.executable})"
        elif name == "python":
            fix = f"make that machine's environment with Python {ours}; Ray asks for the very same one"
        else:
            fix = f"install {name} {ours} there, or {theirs} here"
        same = ours is not None and ours == theirs
        yield Finding(
            what=f"{name} version",
            level="fact" if same else "blocking",
            seen=theirs or "not installed",
            wanted=ours or f"any; it is not installed here{'' if theirs else ' either'}",
            fix="" if same else fix,
        )


def same_system(case: Case) -> Iterator[Finding]:
    ours, theirs = (f"{one.system} {one.release}" for one in (case.ours, case.theirs))
    if case.ours.system == case.theirs.system:
        yield Finding("system", "fact", theirs)
    else:
        fix = "cluster machines of one kind, or expect texts to differ in the last bits of a number"
        yield Finding("system", "warning", theirs, f"the same as here ({ours})", fix)


def chip_and_memory(case: Case) -> Iterator[Finding]:
    theirs = case.theirs
    yield Finding("chip", "fact", theirs.chip)
    if theirs.memory_bytes is None or theirs.available_bytes is None:
        yield Finding("memory", "warning", "it could not be read", fix="look whether vm_stat runs there")
        return
    seen = f"{gigabytes(theirs.available_bytes)} free of {gigabytes(theirs.memory_bytes)}"
    wanted = theirs.memory_bytes * MEMORY_WARNS
    if theirs.available_bytes < wanted:
        fix = "close what takes the memory there, or give the machine a smaller part of the model"
        yield Finding("memory", "warning", seen, f"at least {gigabytes(int(wanted))} free", fix)
    else:
        yield Finding("memory", "fact", seen)


def wired_limit(case: Case) -> Iterator[Finding]:
    limit, memory = case.theirs.wired_limit_mb, case.theirs.memory_bytes
    if limit is None:
        return
    if memory and limit * 2**20 > memory * WIRED_WARNS:
        most = int(memory * WIRED_WARNS) >> 20
        fix = f"sudo sysctl iogpu.wired_limit_mb={most}"
        yield Finding(
            "GPU wired limit", "warning", f"{limit} MB", f"at most {most} MB, or macOS may hang", fix
        )
    else:
        yield Finding("GPU wired limit", "fact", f"{limit} MB" if limit else "the system's default")


def disk(case: Case) -> Iterator[Finding]:
    free = case.theirs.disk_free_bytes
    if free is None:
        yield Finding(
            "disk", "warning", "it could not be read", fix="look whether the cache folder can be made there"
        )
    elif free >= DISK_WARNS_BYTES:
        yield Finding("disk", "fact", f"{gigabytes(free)} free")
    else:
        level: Level = "blocking" if free < DISK_BLOCKS_BYTES else "warning"
        wanted = f"at least {gigabytes(DISK_BLOCKS_BYTES if level == 'blocking' else DISK_WARNS_BYTES)} free"
        yield Finding(
            "disk", level, f"{gigabytes(free)} free", wanted, "make room on the cache folder's disk there"
        )


def clock(case: Case) -> Iterator[Finding]:
    """Only what the offset must be at the least counts: the answer may have been on its way all the time."""
    offset, doubt = case.clock_offset_s, case.clock_doubt_s
    least = max(0.0, abs(offset) - doubt)
    seen = f"{abs(offset):.3f} s {'ahead of' if offset > 0 else 'behind'} ours (to {doubt:.3f} s)"
    if least <= CLOCK_WARNS_S:
        yield Finding("clock", "fact", seen)
        return
    blocks = least > CLOCK_BLOCKS_S
    wanted = f"within {CLOCK_BLOCKS_S if blocks else CLOCK_WARNS_S:g} s"
    why = "; certificates made here would not be valid there" if blocks else ""
    fix = f"let both machines set their clocks by the network (sudo sntp -sS time.apple.com){why}"
    yield Finding("clock", "blocking" if blocks else "warning", seen, wanted, fix)


def sleep(case: Case) -> Iterator[Finding]:
    if case.theirs.system != "Darwin":
        return
    minutes = case.theirs.sleep_minutes
    if minutes == 0:
        yield Finding("sleep", "fact", "never, with power")
    elif minutes is None:
        yield Finding("sleep", "fact", "it could not be read")
    else:
        fix = "sudo pmset -c sleep 0"
        yield Finding(
            "sleep", "warning", f"after {minutes} min, with power", "never: it leaves the cluster", fix
        )


def ports(case: Case) -> Iterator[Finding]:
    yield _way("ports from here to there", case.there, case.ours, "here", case.theirs.host)
    yield _way("ports from there to here", case.back, case.theirs, "there", case.ours.host)


def _way(what: str, tried: tuple[Reached, ...], asking: Facts, where: str, towards: str) -> Finding:
    works = [one.address for one in tried if one.error is None]
    fails = [f"{one.address} {one.error}" for one in tried if one.error is not None]
    if works:
        beside = f" (not over {', '.join(fails)})" if fails else ""
        return Finding(what, "fact", f"reached over {', '.join(works)}{beside}")
    wanted = "a port of the other machine answers on one of its addresses"
    if asking.system == "Darwin" and any(one.error == "EHOSTUNREACH" for one in tried):
        seen = f"{', '.join(fails)}: macOS refuses it with errno 65"
        fix = f"allow {asking.executable} {where} in {LOCAL_NETWORK}, then start it again"
        return Finding(what, "blocking", seen, wanted, fix)
    fix = (
        f"let {towards}'s firewall take connections to its Python, and look whether a switch keeps them apart"
    )
    return Finding(what, "blocking", ", ".join(fails) or "it has no address to try", wanted, fix)


def links(case: Case) -> Iterator[Finding]:
    for link in case.links:
        kind = {"wifi": "Wi-Fi", "thunderbolt": "Thunderbolt", "ethernet": "Ethernet", "other": "other"}[
            link.kind
        ]
        what = f"link {link.ours} - {link.theirs}"
        seen = f"{kind}, {_milliseconds(link.round_trip_s)}, {_rates(link)}"
        slow = link.round_trip_s is not None and link.round_trip_s > ROUND_TRIP_WARNS_S
        if link.round_trip_s is None:
            yield Finding(
                what, "warning", seen, "it bears traffic", "look at the cable, the port and the switch"
            )
        elif slow and link.kind != "wifi":
            wanted = f"a round trip below {_milliseconds(ROUND_TRIP_WARNS_S)}"
            yield Finding(what, "warning", seen, wanted, "connect both machines directly, or by one switch")
        else:
            yield Finding(what, "fact", seen)
    if case.links and all(link.kind == "wifi" for link in case.links):
        fix = "connect both machines by Thunderbolt or Ethernet; every token waits for this link"
        yield Finding("network", "warning", "Wi-Fi alone", "a cable", fix)


def _milliseconds(seconds: float | None) -> str:
    return "broke off" if seconds is None else f"{seconds * 1000:.2f} ms"


def _rates(link: LinkFinding) -> str:
    there, back = (
        "not measured" if rate is None else f"{rate / 1e6:,.0f} MB/s"
        for rate in (link.bytes_per_s_there, link.bytes_per_s_back)
    )
    return f"{there} there, {back} back"


def model(case: Case) -> Iterator[Finding]:
    ours, theirs = case.ours.model, case.theirs.model
    if ours is None or theirs is None:
        return
    if not theirs.files:
        fix = "copied there when it is needed; nothing to do"
        yield Finding("model", "fact", f"not in {theirs.folder}", f"{gigabytes(ours.bytes)}", fix)
        return
    seen = f"{len(theirs.files)} weight files, {gigabytes(theirs.bytes)}, in {theirs.folder}"
    if wrong := model_difference(ours, theirs):
        fix = f"delete {theirs.folder} there; it is copied again when it is needed"
        yield Finding("model", "blocking", f"{seen}; {wrong}", "the same weights as here", fix)
        return
    known = all(file.digest and ours.files[name].digest for name, file in theirs.files.items())
    yield Finding("model", "fact", f"{seen}; {'digests' if known else 'sizes'} are the same as here")


def model_difference(ours: ModelFiles, theirs: ModelFiles) -> str | None:
    """What tells two copies apart; None: nothing that is known of both. Missing files are no difference:
    a machine needs those of its own layers alone."""
    for name, file in sorted(theirs.files.items()):
        own = ours.files.get(name)
        if own is None:
            return f"{name} is not part of the model here"
        if own.bytes != file.bytes:
            return f"{name} has {file.bytes:,} bytes, here {own.bytes:,}"
        if own.digest and file.digest and own.digest != file.digest:
            return f"{name} has other contents than here"
    if theirs.config is not None and theirs.config != ours.config:
        return "config.json says something else than here"
    return None


RULES: tuple[Rule, ...] = (
    same_versions,
    ports,
    clock,
    disk,
    chip_and_memory,
    wired_limit,
    sleep,
    same_system,
    links,
    model,
)
