"""Are we as fast and as small as other servers? `omlx serve` beside three of them, SmolLM2, greedy.

Each peer has an environment of its own, made from PyPI on first use (gigabytes); all compute with the same
MLX and BLAS. NAME_cold_s: from the start of the process to the end of its first answer, a single token.
NAME_at_1_tps: tokens/s of one answer after its first token. NAME_at_4_tps, NAME_at_8_tps: tokens of so many
answers at once over their whole time, prompts included. Prompts are new in every round, the same for all.
*_cpu_ms: processor time a token of that, which other work on the machine moves less than the clock.
NAME_peak_mb: peak RSS after all that, over the server's processes. NAME_idle_percent: of a core, unasked.
NAME_same_text: the share of answers that say the same as ours. best_*: ours / the best peer's, round by
round; the best is who has the best median. ratio: the same for 8 at once. Linux.
"""

import asyncio
import platform
import statistics
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import count
from pathlib import Path

from bench.alternate import Run, alternate
from bench.engines import model_folder
from bench.record import Spread, tell
from bench.servers import Launch, Server, running_server
from bench.venvs import python_with
from omlx.cluster.local_actor import compute_environment

MODEL = "smollm2-135m-instruct-f32"
OURS = "omlx"
TOKENS = 48
COLD_ROUNDS, LOAD_ROUNDS = 3, 5
AT_ONCE = (1, 4, 8)
LOAD_WITHIN_S = 240.0
IDLE_S = 5.0
HELLO = "Hello"


@dataclass(frozen=True, slots=True)
class Peer:
    """A server of somebody else's: what pip installs, and what its Python then runs."""

    requirements: tuple[str, ...]
    arguments: tuple[str, ...]
    """`{port}` is filled in at the start, `{folder}` before."""


PEERS = {
    "mlx_lm": Peer(
        ("mlx-lm==0.32.2",),
        ("-m", "mlx_lm", "server", "--model", "{folder}", "--host", "127.0.0.1", "--port", "{port}"),
    ),
    "rapid_mlx": Peer(
        ("rapid-mlx==0.16.10",),
        (
            *("-c", "from rapid_mlx.cli import cli_entrypoint; cli_entrypoint()"),
            *("serve", "{folder}", "--host", "127.0.0.1", "--port", "{port}"),
        ),
    ),
    "vllm_mlx": Peer(
        ("vllm-mlx==0.6.0",),
        (
            *("-m", "vllm_mlx.cli", "serve", "{folder}", "--host", "127.0.0.1", "--port", "{port}"),
            "--continuous-batching",
        ),
    ),
}

THINGS = ("a robot", "old maps", "bread", "winter", "a library", "trains", "bees", "a lighthouse")
PLACES = (
    *("by the sea", "in a small town", "on the moon", "under a mountain", "in a quiet valley"),
    *("in the far north", "on an island", "in the desert", "beside a river", "at the end of a road"),
)
PROMPTS = [f"Write a long story about {thing} {place}." for place in PLACES for thing in THINGS]


def mlx_like_ours() -> tuple[str, ...]:
    """The same MLX for everybody: it is not what is compared."""
    parts = ("mlx", "mlx-cpu") if platform.system() == "Linux" else ("mlx",)
    return tuple(f"{part}=={version(part)}" for part in parts)


def launches(folder: Path) -> list[Launch]:
    """Ours first. Installs the peers where they are missing."""
    # Our stages find their BLAS themselves; the others would compute without.
    ours = (str(Path(sys.executable).with_name("omlx")), "serve", str(folder), "--port", "{port}")
    found = [Launch(OURS, ours, folder.name, {})]
    for name, peer in PEERS.items():
        python = python_with(name, (*peer.requirements, *mlx_like_ours()))
        arguments = [part.replace("{folder}", str(folder)) for part in peer.arguments]
        found.append(Launch(name, (str(python), *arguments), str(folder), compute_environment()))
    return found


def cold(launch: Launch) -> Run:
    """Seconds from nothing to an answer."""

    async def run() -> float:
        async with running_server(launch) as server:
            return await server.first_answer(HELLO)

    return run


@dataclass(frozen=True, slots=True)
class Texts:
    """What everybody answered: by how many were asked at once, and in which round of it."""

    said: dict[str, dict[tuple[int, int], list[str]]] = field(default_factory=dict)

    def add(self, name: str, question: tuple[int, int], texts: list[str]) -> None:
        # Some servers cut the space in front of an answer off.
        self.said.setdefault(name, {})[question] = [text.strip() for text in texts]

    def same_as_ours(self, name: str) -> float:
        """The share of a server's answers."""
        pairs = [
            pair
            for question, texts in self.said[OURS].items()
            for pair in zip(texts, self.said[name][question], strict=True)
        ]
        return sum(ours == theirs for ours, theirs in pairs) / len(pairs)


def load(server: Server, at_once: int, texts: Texts, cpu_ms: list[float]) -> Run:
    """Tokens/s of `at_once` requests; what they cost goes into `cpu_ms`, in milliseconds a token.

    Ends the bench where an answer is not TOKENS long.
    """
    rounds = count()

    async def run() -> float:
        turn = next(rounds)
        first = sum(AT_ONCE[: AT_ONCE.index(at_once)]) + turn * sum(AT_ONCE)
        asked = PROMPTS[first : first + at_once]
        started, cpu_s = time.perf_counter(), server.cpu_s()
        given = await asyncio.gather(*(server.ask(prompt, TOKENS) for prompt in asked))
        wall_s = time.perf_counter() - started
        cpu_ms.append((server.cpu_s() - cpu_s) / (at_once * TOKENS) * 1e3)
        name = server.launch.name
        for prompt, timing in zip(asked, given, strict=True):
            if timing.tokens != TOKENS:
                raise SystemExit(f"bench: {name} said {timing.tokens} tokens, not {TOKENS}, to {prompt!r}")
        texts.add(name, (at_once, turn), [timing.text for timing in given])
        if at_once == 1 and (alone := given[0].decode_tps) is not None:
            return alone
        return at_once * TOKENS / wall_s

    return run


@asynccontextmanager
async def all_running(wanted: list[Launch]) -> AsyncIterator[list[Server]]:
    """Side by side, each one ready; only the one that is asked computes."""
    async with AsyncExitStack() as stack:
        servers = []
        for launch in wanted:
            server = await stack.enter_async_context(running_server(launch))
            await server.first_answer(HELLO)
            servers.append(server)
        yield servers


async def idle_percent(servers: list[Server]) -> dict[str, list[float]]:
    before = [server.cpu_s() for server in servers]
    await asyncio.sleep(IDLE_S)
    return {
        f"{server.launch.name}_idle_percent": [(server.cpu_s() - then) / IDLE_S * 100]
        for server, then in zip(servers, before, strict=True)
    }


async def under_load(wanted: list[Launch]) -> dict[str, list[float]]:
    """Everything that is measured on servers that run."""
    found: dict[str, list[float]] = {}
    texts = Texts()
    async with all_running(wanted) as servers:
        found |= await idle_percent(servers)
        for at_once in AT_ONCE:
            runs: dict[str, Run] = {}
            cpu_ms: dict[str, list[float]] = {}
            for server in servers:
                name = f"{server.launch.name}_at_{at_once}"
                used = cpu_ms[f"{name}_cpu_ms"] = []
                runs[f"{name}_tps"] = load(server, at_once, texts, used)
            found |= await alternate(runs, LOAD_ROUNDS, LOAD_WITHIN_S)
            found |= {name: used[1:] for name, used in cpu_ms.items()}  # the first round warms up
        for server in servers:
            found[f"{server.launch.name}_peak_mb"] = [server.peak_rss_bytes() / 1e6]
    return found | {f"{name}_same_text": [texts.same_as_ours(name)] for name in PEERS}


def against_best(found: Mapping[str, list[float]], figure: str) -> list[float]:
    """Ours / the best peer's. Of rates the largest is the best, of all else the smallest."""
    best = max if figure.endswith("_tps") else min
    name = best(PEERS, key=lambda name: statistics.median(found[f"{name}_{figure}"]))
    pairs = zip(found[f"{OURS}_{figure}"], found[f"{name}_{figure}"], strict=True)
    return [ours / theirs for ours, theirs in pairs]


async def main() -> None:
    wanted = launches(model_folder(MODEL))
    found = await alternate({f"{launch.name}_cold_s": cold(launch) for launch in wanted}, COLD_ROUNDS)
    found |= await under_load(wanted)
    for figure in ("cold_s", *(f"at_{at_once}_tps" for at_once in AT_ONCE), "peak_mb"):
        found[f"best_{figure.rpartition('_')[0]}"] = against_best(found, figure)
    figures = {name: Spread.of(values) for name, values in found.items()}
    tell("peers", MODEL, statistics.median(found["best_at_8"]), figures)


if __name__ == "__main__":
    asyncio.run(main())
