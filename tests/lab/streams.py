"""Many streamed answers at once, from inside a host: `python -m tests.lab.streams URL COUNT TOKENS`.

Says `running` on a line of its own once each stream has a few tokens, and in the end one line of JSON: for
each stream its text, how it ended, and the longest pause between two tokens, in seconds.
"""

import asyncio
import json
import sys
import time
from dataclasses import dataclass, field, fields

import httpx

FEW = 5
WITHIN_S = 300.0


@dataclass
class Stream:
    """What came of one."""

    number: int
    text: str = ""
    finish: str | None = None
    error: str | None = None
    tokens: int = 0
    first_s: float | None = None
    """From the request to its first token."""
    longest_pause_s: float = 0.0
    seconds: float = 0.0
    """From the first token to the last one."""
    _asked: float = field(default_factory=time.monotonic)
    _last: float | None = None
    _few: asyncio.Event = field(default_factory=asyncio.Event)

    def take(self, text: str) -> None:
        now = time.monotonic()
        if self._last is None:
            self.first_s = now - self._asked
        else:
            self.longest_pause_s = max(self.longest_pause_s, now - self._last)
            self.seconds += now - self._last
        self._last = now
        self.text += text
        self.tokens += 1
        if self.tokens >= FEW:
            self._few.set()

    async def runs(self, task: asyncio.Task[None]) -> None:
        """It has a few tokens, or has ended."""
        few = asyncio.ensure_future(self._few.wait())
        await asyncio.wait([few, task], return_when=asyncio.FIRST_COMPLETED)
        few.cancel()

    def told(self) -> dict[str, object]:
        hidden = ("_asked", "_last", "_few")
        return {one.name: getattr(self, one.name) for one in fields(self) if one.name not in hidden}


def question(number: int) -> str:
    return f"Count up from {7 * number + 3}, and say of each number whether it is even."


async def follow(client: httpx.AsyncClient, stream: Stream, model: str, tokens: int) -> None:
    body = {
        "model": model,
        "stream": True,
        "temperature": 0,
        "max_tokens": tokens,
        "messages": [{"role": "user", "content": question(stream.number)}],
    }
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            stream.error = (await response.aread()).decode()[:500]
            return
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line[6:])
            if "error" in event:
                stream.error = json.dumps(event["error"])
                return
            for choice in event["choices"]:
                if text := choice["delta"].get("content"):
                    stream.take(text)
                stream.finish = choice["finish_reason"] or stream.finish


async def main(url: str, count: int, tokens: int) -> None:
    streams = [Stream(number) for number in range(count)]
    async with httpx.AsyncClient(base_url=url, timeout=WITHIN_S) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(follow(client, stream, model, tokens)) for stream in streams]
            await asyncio.gather(*(stream.runs(task) for stream, task in zip(streams, tasks, strict=True)))
            print("running", flush=True)
    print(json.dumps([stream.told() for stream in streams]))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
