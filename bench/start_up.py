"""How long from `omlx serve MODEL` to an answer? Each step in milliseconds from the start of the process.

port: it listens. loaded: it has answered GET /v1/models, so weights and tokenizer are in. first: the first
token of a streamed answer. floor: a bare Python, from its start to its end, that imports MLX and evaluates
all of the same file; the file is in memory. head_mb, stages_mb: resident after that answer. ratio: loaded /
floor, the median of the rounds' own. Linux.
"""

import asyncio
import sys
import time
from collections import defaultdict
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from bench.alternate import alternate, ratio
from bench.engines import model_folder
from bench.record import Spread, tell
from bench.servers import Launch, Server, running_server

MODEL = "smollm2-135m-instruct-f32"
HELLO = "Hello"
ROUNDS = 5
RETRY_S = 0.002
WITHIN_S = 60.0
FLOOR = "import sys, mlx.core as mx; mx.eval(list(mx.load(sys.argv[1]).values()))"


def serve(folder: Path, *flags: str) -> Launch:
    """The command as a user gives it."""
    omlx = str(Path(sys.executable).with_name("omlx"))
    return Launch("omlx", (omlx, "serve", str(folder), "--port", "{port}", *flags), folder.name, {})


async def until_it_listens(port: int) -> None:
    while True:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except ConnectionRefusedError:
            await asyncio.sleep(RETRY_S)
        else:
            writer.close()
            return


async def start(server: Server) -> dict[str, float]:
    """Milliseconds since its start, step by step, and megabytes in the end."""
    port = urlsplit(server.client.url).port
    assert port is not None
    seen: dict[str, float] = {}
    async with asyncio.timeout(WITHIN_S), httpx.AsyncClient(timeout=WITHIN_S, trust_env=False) as client:
        await until_it_listens(port)
        seen["port_ms"] = time.perf_counter() - server.started
        (await client.get(f"{server.client.url}/models")).raise_for_status()
        seen["loaded_ms"] = time.perf_counter() - server.started
    answer = await server.ask(HELLO, 2)
    assert answer.first is not None
    seen["first_ms"] = answer.first - server.started
    head, *stages = [process.memory_info().rss for process in server.tree()]
    milliseconds = {name: 1e3 * seconds for name, seconds in seen.items()}
    return milliseconds | {"head_mb": head / 1e6, "stages_mb": sum(stages) / 1e6}


async def floor_ms(folder: Path) -> float:
    started = time.perf_counter()
    file = str(folder / "model.safetensors")
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", FLOOR, file)
    async with asyncio.timeout(WITHIN_S):
        await process.wait()
    if process.returncode != 0:
        raise SystemExit(f"bench: {file} cannot be read")
    return 1e3 * (time.perf_counter() - started)


async def main() -> None:
    folder = model_folder(MODEL)
    steps: dict[str, list[float]] = defaultdict(list)

    async def start_up() -> float:
        async with running_server(serve(folder)) as server:
            seen = await start(server)
        for name, value in seen.items():
            steps[name].append(value)
        return seen["loaded_ms"]

    found = await alternate({"loaded": start_up, "floor": lambda: floor_ms(folder)}, ROUNDS)
    counted = len(found["floor"])
    figures = {name: Spread.of(values[-counted:]) for name, values in steps.items()}
    figures["floor_ms"] = Spread.of(found["floor"])
    tell("start_up", MODEL, ratio(found["loaded"], found["floor"]), figures)


if __name__ == "__main__":
    asyncio.run(main())
