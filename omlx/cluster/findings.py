"""What a check of another machine found: findings, and the report that holds them. Pure.

A machine may join when nothing blocks; a warning costs speed or comfort, a fact is for whoever looks.
"""

from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from omlx.cluster.facts import Facts, Kind

Level = Literal["blocking", "warning", "fact"]
LEVELS: tuple[Level, ...] = ("blocking", "warning", "fact")


class Finding(msgspec.Struct, frozen=True):
    """One thing looked at. `seen` and `wanted` in words; `fix`: what to do, empty where nothing is wrong."""

    what: str
    level: Level
    seen: str
    wanted: str = ""
    fix: str = ""

    @property
    def blocking(self) -> bool:
        return self.level == "blocking"


class LinkFinding(msgspec.Struct, frozen=True):
    """A pair of addresses that works, measured both ways. None: it broke off while it was measured."""

    ours: str
    theirs: str
    kind: Kind
    """The slower of both ends' interfaces."""
    round_trip_s: float | None
    bytes_per_s_there: float | None
    bytes_per_s_back: float | None


class Report(msgspec.Struct, frozen=True):
    """All that one check of one machine found, the worst first."""

    host: str
    user: str
    port: int
    fingerprint: str | None
    """Of the host key that it showed; None: it came to none."""
    findings: tuple[Finding, ...]
    facts: Facts | None = None
    links: tuple[LinkFinding, ...] = ()

    @property
    def fit(self) -> bool:
        return not any(finding.blocking for finding in self.findings)


def sort_findings(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Blocking ones, warnings, facts; among these as they came."""
    return tuple(sorted(findings, key=lambda finding: LEVELS.index(finding.level)))


def to_json(report: Report) -> dict[str, Any]:
    """Plain values, `fit` among them."""
    return {"fit": report.fit, **msgspec.to_builtins(report)}
