"""The demonstration's one question, asked over HTTP as any client would, and what is shown of it."""

import json
import time
from collections.abc import Callable

import httpx
from rich.console import Console

QUESTION = "What is the capital of France? Answer in one sentence."
MAX_TOKENS = 64
WITHIN_S = 120.0


async def ask(
    url: str, model: str, console: Console, *, clock: Callable[[], float] = time.perf_counter
) -> None:
    """Print the streamed answer, the time to its first token and its tokens per second.

    Raises httpx.HTTPError when the server does not answer as it should.
    """
    body = {
        "model": model,
        "messages": [{"role": "user", "content": QUESTION}],
        "temperature": 0,
        "max_tokens": MAX_TOKENS,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    console.print(f"[bold]you[/bold]  {QUESTION}", highlight=False)
    console.print(f"[bold]{model}[/bold]  ", end="", highlight=False)
    started = clock()
    first = last = None
    tokens = 0
    # Loopback: a proxy from the environment must not come between.
    async with (
        httpx.AsyncClient(timeout=WITHIN_S, trust_env=False) as client,
        client.stream("POST", f"{url}/chat/completions", json=body) as response,
    ):
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            for choice in event["choices"]:
                if text := choice["delta"].get("content"):
                    last = clock()
                    first = first or last
                    console.print(text, end="", markup=False, highlight=False, soft_wrap=True)
            if usage := event.get("usage"):
                tokens = usage["completion_tokens"]
    console.print()
    if first is None or last is None:
        console.print("the model said nothing")
        return
    rate = f", {(tokens - 1) / (last - first):.1f} tokens/s" if last > first else ""
    console.print(
        f"time to first token {first - started:.2f} s{rate}, {tokens} tokens", style="dim", highlight=False
    )
