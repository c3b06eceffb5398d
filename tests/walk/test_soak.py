"""A dozen clients at once who come, go and hang up, while a stage is killed: every answer stays right."""

import json
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.walk.servers import Running, serve

Tiny = Callable[[str], Path]
CLIENTS = 12
PATIENT: dict[str, Any] = {"timeout": 120, "trust_env": False}
SECONDS = 14
PROMPTS = [f"w{i} " * words for i, words in enumerate((1, 5, 20, 60, 150, 300))]


class Clients:
    """Asks the same few things over and over; `right` is what each was answered undisturbed."""

    def __init__(self, running: Running, model: str) -> None:
        self.url = f"{running.url}/v1/chat/completions"
        self.model = model
        self.right = {(i, warm): self.ask(i, warm) for i in range(len(PROMPTS)) for warm in (False, True)}
        self.wrong: list[tuple[int, bool, str]] = []
        self.answered = 0

    def body(self, prompt: int, warm: bool) -> dict[str, object]:
        sampling = {"temperature": 0.8, "seed": prompt} if warm else {"temperature": 0}
        messages = [{"role": "user", "content": PROMPTS[prompt]}]
        return {"model": self.model, "messages": messages, "max_tokens": 24} | sampling

    def ask(self, prompt: int, warm: bool) -> str:
        response = httpx.post(self.url, json=self.body(prompt, warm), **PATIENT)
        response.raise_for_status()
        return str(response.json()["choices"][0]["message"]["content"])

    def listen(self, prompt: int, warm: bool, hang_up_after: int | None) -> str | None:
        """The streamed answer; None when this client went away before its end."""
        text, events = "", 0
        body = self.body(prompt, warm) | {"stream": True}
        with httpx.stream("POST", self.url, json=body, **PATIENT) as response:
            response.raise_for_status()
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    text += (
                        json.loads(line.removeprefix("data: "))["choices"][0]["delta"].get("content") or ""
                    )
                    events += 1
                    if events == hang_up_after:
                        return None
        return text

    def live(self, seed: int, until: float) -> None:
        """One client's life."""
        draw = random.Random(seed)
        while time.monotonic() < until:
            prompt, warm = draw.randrange(len(PROMPTS)), draw.random() < 0.5
            patience = draw.choice([None, None, None, 1, 4])
            if draw.random() < 0.5:
                found: str | None = self.ask(prompt, warm)
            else:
                found = self.listen(prompt, warm, patience)
            if found is None:
                continue
            self.answered += 1
            if found != self.right[prompt, warm]:
                self.wrong.append((prompt, warm, found))


@pytest.mark.slow
def test_every_answer_stays_right_while_clients_hang_up_and_a_stage_is_killed(tiny: Tiny) -> None:
    folder = tiny("tiny-qwen3")
    flags = ("--stages", "2", "--max-concurrent-requests", "6", "--max-queued-requests", "20")
    with serve(folder, *flags) as running:
        clients = Clients(running, folder.name)
        until = time.monotonic() + SECONDS
        with ThreadPoolExecutor(CLIENTS) as pool:
            lives = [pool.submit(clients.live, seed, until) for seed in range(CLIENTS)]
            for stage in (1, 0):
                time.sleep(SECONDS / 4)
                running.stages()[stage].kill()
            for life in lives:
                life.result()
        assert not clients.wrong
        assert clients.answered > 50
        assert idle(running)


def idle(running: Running, within_s: float = 5.0) -> bool:
    """Nothing runs or waits any more: those who hung up hold no place."""
    started = time.monotonic()
    while time.monotonic() - started < within_s:
        [model] = httpx.get(f"{running.url}/health", trust_env=False).json()["models"]
        if (model["running"], model["waiting"], model["state"]) == (0, 0, "ready"):
            return True
        time.sleep(0.05)
    return False
