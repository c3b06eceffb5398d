"""A host turns slow: its layers go to the others until no split is much better. One gets another address."""

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations, takewhile
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from cryptography import x509
from prometheus_client.parser import text_string_to_metric_families

from omlx.cluster.members import read_members
from omlx.node.manifest import read_manifest
from tests.lab.clustered import Running, Server, Streams, gifts, move, processes, serving, wait
from tests.lab.conftest import NewHosts
from tests.lab.dial import get
from tests.lab.every_split import PLANNED, Paces, Stages, layers_of, slowest, splits, tokens_per_s
from tests.lab.fleet import Fleet
from tests.lab.host import NET, Host

pytestmark = pytest.mark.slow

STREAMS, TOKENS = PLANNED, 120
"""The load that plans for throughput are made for."""
GIVEN = {"mac-a": "700MB", "mac-b": "700MB", "mac-c": "700MB"}
"""None of them holds SmolLM2 alone, and memory binds no split over two or three."""
SLOW = 0.25
"""Of a core."""
ENOUGH, STEADY_S, LOOK_EVERY_S = 5, 12.0, 2.0
"""Windows, and seconds since the first of them, in which the layers lay as they lie now."""
LEAST_PLANS = 8
WITHIN = 1.10
SETTLED_WITHIN_S = 300.0
USED_WITHIN_S = 120.0
ELSEWHERE = f"{NET}.112"


@pytest.fixture(scope="module")
def three(hosts: NewHosts) -> Fleet:
    """No Macs, so nothing is known of their chips: only measuring tells them apart."""
    return hosts(3, shims={})


@pytest.fixture(scope="module")
def server(three: Fleet, nodes: dict[str, Running], smollm2: Path) -> Iterator[Server]:
    flags = ["--objective", "throughput", "--max-concurrent-requests", str(STREAMS), "--no-cache"]
    with serving(three.hosts[0], smollm2, *flags, *gifts(GIVEN)) as running:
        yield running


def in_use(server: Server, host: Host) -> bool:
    return host.name in server.shards()


def texts(streams: Streams) -> list[str]:
    ended = streams.ended()
    assert all(one["error"] is None and one["finish"] for one in ended), ended
    return [one["text"] for one in ended]


# ---------------------------------------------------------------- what the server tells of its stages


@dataclass(frozen=True, slots=True)
class Look:
    """Its figures at one moment."""

    at: float
    epoch: int
    stages: Stages
    busy_s: tuple[float, ...]
    """Of each stage, since its layers were loaded."""
    plans: float
    prompt_tokens: float
    drawn_tokens: float
    costs: tuple[tuple[float, float], ...]
    """Of each stage, as fitted: seconds of a step, and of each row of it."""


@dataclass(frozen=True, slots=True)
class Window:
    """Some seconds of nothing but decoding: every plan asked the same of each stage's layers."""

    at: float
    stages: Stages
    step_s: tuple[float, ...]
    """Busy seconds of each stage, a plan."""
    tokens_per_s: float
    costs: tuple[tuple[float, float], ...]


def look(server: Server) -> Look | None:
    """None while stages change."""
    (model,) = server.get("/omlx/v1/cluster")["models"]
    metrics = get(server.host, server.port, "/metrics")
    samples = [one for family in text_string_to_metric_families(metrics) for one in family.samples]

    def total(name: str) -> float:
        return sum(one.value for one in samples if one.name == name)

    def of_stages(name: str, part: str | None = None) -> list[float]:
        found = [one for one in samples if one.name == name and one.labels.get("part") == part]
        return [one.value for one in sorted(found, key=lambda one: int(one.labels["stage"]))]

    stages = tuple((stage["node"], stage["end"] - stage["start"]) for stage in model["stages"])
    fixed, row = (of_stages("omlx_stage_cost_seconds", part) for part in ("fixed", "row"))
    busy_s = tuple(of_stages("omlx_stage_busy_seconds_total"))
    if model["state"] != "ready" or not len(busy_s) == len(fixed) == len(stages):
        return None
    return Look(
        at=time.monotonic(),
        epoch=model["epoch"],
        stages=stages,
        busy_s=busy_s,
        plans=total("omlx_plans_total"),
        prompt_tokens=total("omlx_prompt_tokens_total"),
        drawn_tokens=total("omlx_drawn_tokens_total"),
        costs=tuple(zip(fixed, row, strict=True)),
    )


def window(before: Look | None, after: Look | None) -> Window | None:
    """None where something else than decoding happened in between, or too little."""
    if before is None or after is None or (before.epoch, before.stages) != (after.epoch, after.stages):
        return None
    plans = after.plans - before.plans
    busy = [now - then for now, then in zip(after.busy_s, before.busy_s, strict=True)]
    if plans < LEAST_PLANS or after.prompt_tokens != before.prompt_tokens or min(busy) <= 0:
        return None
    tokens_per_s = (after.drawn_tokens - before.drawn_tokens) / (after.at - before.at)
    step_s = tuple(seconds / plans for seconds in busy)
    return Window(before.at, after.stages, step_s, tokens_per_s, after.costs)


# ---------------------------------------------------------------- the best split, by trying all of them


def paces(windows: Sequence[Window], head: float) -> dict[str, dict[int, float]]:
    """By the windows' medians. What a layer takes is told beside the quickest host's of the same window,
    since rows come and go from one to the next."""
    found: dict[tuple[str, int], list[float]] = {}
    for one in windows:
        layer_s = [
            step_s / layers for step_s, layers in zip(one.step_s, layers_of(one.stages, head), strict=True)
        ]
        for stage, seconds in zip(one.stages, layer_s, strict=True):
            found.setdefault(stage, []).append(seconds / min(layer_s))
    by_host: dict[str, dict[int, float]] = {}
    for (host, layers), many in found.items():
        by_host.setdefault(host, {})[layers] = median(many)
    return by_host


def costs_of(windows: Sequence[Window], head: float) -> dict[str, tuple[float, float]]:
    """As they were fitted last while the host had layers."""
    found = {}
    for one in windows:
        works = layers_of(one.stages, head)
        for (host, _), (fixed, row), work in zip(one.stages, one.costs, works, strict=True):
            found[host] = (fixed / work, row / work)
    return found


@dataclass(frozen=True, slots=True)
class Verdict:
    """How the layers lie, against the best of all splits."""

    stages: Stages
    best: Stages
    """With the least slowest stage, over the hosts that have layers, in their order."""
    slower: float
    """The slowest stage / the slowest of `best`."""
    fastest: Stages
    """With the most tokens/s, over all hosts in any order."""
    worse: float
    """Tokens/s of `fastest` / those of the layers as they lie."""
    paces: Paces
    stage_ms: tuple[float, ...]
    tokens_per_s: tuple[float, float]
    """The most in a window, before the layers first moved and as they lie: answers end one by one."""

    @classmethod
    def of(cls, windows: Sequence[Window], now: Sequence[Window], head: float) -> "Verdict":
        stages, by_host, costs = now[0].stages, paces(windows, head), costs_of(windows, head)
        layers, order = sum(layers for _, layers in stages), [host for host, _ in stages]
        best = min(splits(order, layers), key=lambda split: slowest(split, by_host, head))
        every = [split for one in permutations(by_host) for split in splits(one, layers)]
        fastest = max(every, key=lambda split: tokens_per_s(split, costs, head))
        first = [one.tokens_per_s for one in windows if one.stages == windows[0].stages]
        steps = [one.step_s for one in now]
        return cls(
            stages,
            best,
            slowest(stages, by_host, head) / slowest(best, by_host, head),
            fastest,
            tokens_per_s(fastest, costs, head) / tokens_per_s(stages, costs, head),
            by_host,
            tuple(round(1e3 * median(times), 2) for times in zip(*steps, strict=True)),
            (max(first), max(one.tokens_per_s for one in now)),
        )

    def as_json(self) -> dict[str, Any]:
        return {
            "slower_than_best": round(self.slower, 3),
            "fewer_tokens_than_best": round(self.worse, 3),
            "layers": dict(self.stages),
            "best": dict(self.best),
            "fastest": dict(self.fastest),
            "stage_ms": self.stage_ms,
            "tokens_per_s": [round(one, 1) for one in self.tokens_per_s],
            "layer_times": {
                host: {layers: round(pace, 2) for layers, pace in sorted(by_layers.items())}
                for host, by_layers in self.paces.items()
            },
        }


@dataclass(slots=True)
class Watch:
    """Looks at a server under load until its layers lie well for a while."""

    server: Server
    head: float
    """What the model's head computes, in layers."""
    streams: Streams

    def settle(self, host: Host, before: int) -> Verdict:
        """`before`: how many layers the host had; it must have fewer. Fails with what is known by then."""
        windows: list[Window] = []
        last, verdict, end = look(self.server), None, time.monotonic() + SETTLED_WITHIN_S
        while True:
            assert time.monotonic() < end, self._told(verdict)
            time.sleep(LOOK_EVERY_S)
            if self.streams.process.poll() is not None:
                texts(self.streams)
                self.streams = self.server.stream(STREAMS, TOKENS)
            now = look(self.server)
            if (one := window(last, now)) is not None:
                windows.append(one)
            last = now
            if now is None or not windows or windows[-1].stages != now.stages:
                continue
            steady = list(takewhile(lambda one: one.stages == windows[-1].stages, reversed(windows)))
            if len(steady) < ENOUGH or now.at - steady[-1].at < STEADY_S:
                continue
            verdict = Verdict.of(windows, steady, self.head)
            if max(verdict.slower, verdict.worse) <= WITHIN and dict(now.stages).get(host.name, 0) < before:
                return verdict

    def _told(self, verdict: Verdict | None) -> str:
        moves = [line for line in self.server.running.lines() if line.get("event") == "moving"]
        return json.dumps([None if verdict is None else verdict.as_json(), moves])


@pytest.mark.timeout(480)
def test_a_slow_host_keeps_as_many_layers_as_the_best_of_all_splits_gives_it(
    server: Server, three: Fleet, smollm2: Path
) -> None:
    *_, host = three.hosts
    wait(lambda: in_use(server, host), USED_WITHIN_S, server.running.said)
    start, stop = server.shards()[host.name]
    manifest = read_manifest(smollm2)
    head_bytes = manifest.embedding_bytes if manifest.tied else manifest.head_bytes
    head = head_bytes / manifest.layers[0].weights
    three.lab.cpu(host, SLOW)
    try:
        began = time.monotonic()
        watch = Watch(server, head, server.stream(STREAMS, TOKENS))
        verdict = watch.settle(host, stop - start)
        told = {
            "bench": "slow_host",
            "cores": SLOW,
            "seconds": round(time.monotonic() - began, 1),
        }
        print(json.dumps(told | {"layers_before": stop - start} | verdict.as_json()))
        before, after = verdict.tokens_per_s
        assert after > before
        assert texts(watch.streams)
    finally:
        three.lab.cpu(host, 0)


# ---------------------------------------------------------------- another address


def certified(host: Host) -> list[str]:
    """Addresses that its certificate names."""
    shown = x509.load_pem_x509_certificate((host.home / ".omlx/cluster/node/node.crt").read_bytes())
    names = shown.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return [str(address) for address in names.get_values_for_type(x509.IPAddress)]


def known_at(coordinator: Host, host: Host) -> tuple[str, tuple[str, ...]]:
    members = read_members(coordinator.home / ".omlx/cluster")
    (found,) = [one for one in members if one.name == host.name]
    return found.host, found.addresses


def ready(server: Server, host: Host) -> bool:
    (model,) = server.get("/omlx/v1/cluster")["models"]
    return any(stage["node"] == host.name and stage["state"] == "ready" for stage in model["stages"])


def taken_back(server: Server, host: Host) -> bool:
    """By a word: by itself it would be at the next look, in a minute. It may be refused at first."""
    server.host.omlx("cluster", "rebalance", server.get("/v1/models")["data"][0]["id"])
    return ready(server, host)


@pytest.mark.timeout(480)
def test_a_host_that_gets_another_address_is_found_there_certified_for_it_and_used_again(
    server: Server, three: Fleet
) -> None:
    first, host, _ = three.hosts
    wait(lambda: in_use(server, host), USED_WITHIN_S, server.running.said)
    said = texts(server.stream(4, 40))
    streams = server.stream(4, 40)
    move(host, ELSEWHERE)
    assert texts(streams) == said
    wait(lambda: known_at(first, host) == (ELSEWHERE, (ELSEWHERE,)), USED_WITHIN_S, server.running.said)
    assert ELSEWHERE in certified(host)
    assert host.ip not in certified(host), "it may be another machine's by now"
    ray = f"--node_ip_address={ELSEWHERE}"
    wait(lambda: bool(processes(host, ray)), USED_WITHIN_S, server.running.said)
    wait(lambda: taken_back(server, host), USED_WITHIN_S, server.running.said)
    assert texts(server.stream(4, 40)) == said
    assert ready(server, host), "it was no leftover of what the server knew before"
