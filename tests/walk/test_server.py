"""Real models through the real server and the official client."""

import json
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from openai import APIStatusError, BadRequestError, InternalServerError, NotFoundError, OpenAI

from tests.walk.servers import Running, serve, wait_until

Tiny = Callable[[str], Path]


def state(running: Running, model: str) -> str:
    models = httpx.get(f"{running.url}/health", trust_env=False).json()["models"]
    return str(next(entry["state"] for entry in models if entry["id"] == model))


def renewed(running: Running, pid: int) -> bool:
    """The stage with this pid was followed by another, which serves."""
    return running.stages()[-1].pid > pid and state(running, "tiny-qwen3") == "ready"


QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]


def said(client: OpenAI, model: str, *, stream: bool, max_tokens: int = 12) -> str:
    options = {"model": model, "messages": QUESTION, "temperature": 0, "max_tokens": max_tokens}
    if not stream:
        return client.chat.completions.create(**options).choices[0].message.content or ""  # type: ignore[call-overload]
    chunks = client.chat.completions.create(**options, stream=True)  # type: ignore[call-overload]
    with chunks:
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


@pytest.mark.slow
@pytest.mark.parametrize("which", ["smollm2", "gemma"])
def test_a_real_model_gives_the_same_greedy_text_through_one_two_and_three_stages(
    which: str, request: pytest.FixtureRequest
) -> None:
    folder: Path = request.getfixturevalue(which)
    texts = set()
    for stages in (1, 2, 3):
        with serve(folder, "--stages", str(stages)) as running, running.client() as client:
            assert len(running.stages()) == stages
            texts |= {said(client, folder.name, stream=stream) for stream in (False, True)}
    assert len(texts) == 1
    if which == "smollm2":
        assert texts == {"The capital of France is Paris."}


@pytest.mark.slow
def test_a_stage_killed_in_mid_answer_is_a_pause_to_the_client(smollm2: Path) -> None:
    with serve(smollm2, "--stages", "2") as running, running.client() as client:
        options = {"model": smollm2.name, "temperature": 0, "max_tokens": 24}
        messages = [{"role": "user", "content": "Count from one to twenty in words."}]
        undisturbed = client.chat.completions.create(messages=messages, **options).choices[0].message.content  # type: ignore[call-overload]
        text = ""
        with client.chat.completions.create(messages=messages, stream=True, **options) as chunks:  # type: ignore[call-overload]
            for number, chunk in enumerate(chunks):
                text += chunk.choices[0].delta.content or ""
                if number == 5:
                    running.stages()[1].send_signal(signal.SIGKILL)
        assert text == undisturbed
        assert httpx.get(f"{running.url}/health", trust_env=False).json()["status"] == "ok"


def test_several_models_of_a_folder_are_loaded_when_asked_for_and_fail_alone(
    tiny: Tiny, tmp_path: Path
) -> None:
    for name in ("tiny-llama", "tiny-qwen3"):
        (tmp_path / name).symlink_to(tiny(name))
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    with serve(tmp_path) as running, running.client() as client:
        assert {model.id for model in client.models.list()} == {"tiny-llama", "tiny-qwen3"}
        assert running.stages() == []
        first = said(client, "tiny-llama", stream=False)
        assert len(running.stages()) == 1
        said(client, "tiny-qwen3", stream=True)
        for _ in range(3):
            victim = running.stages()[-1]
            victim.kill()
            wait_until(
                lambda pid=victim.pid: state(running, "tiny-qwen3") == "failed" or renewed(running, pid), 60
            )
        wait_until(lambda: state(running, "tiny-qwen3") == "failed", 60)
        with pytest.raises(InternalServerError) as failed:
            said(client, "tiny-qwen3", stream=False)
        assert failed.value.status_code == 503
        assert said(client, "tiny-llama", stream=False) == first
        assert state(running, "tiny-llama") == "ready"
        with pytest.raises(NotFoundError, match="broken"):
            said(client, "broken", stream=False)


def test_a_full_queue_is_a_503_with_retry_after_and_the_others_go_on(tiny: Tiny) -> None:
    flags = ("--max-concurrent-requests", "1", "--max-queued-requests", "1")
    with serve(tiny("tiny-llama"), *flags) as running, running.client() as client:

        def long() -> str:
            return said(client, "tiny-llama", stream=False, max_tokens=1500)

        with ThreadPoolExecutor(5) as pool:
            jobs = [pool.submit(long) for _ in range(5)]
            failures = [job.exception() for job in jobs if job.exception() is not None]
        assert 1 <= len(failures) <= 3
        for failure in failures:
            assert isinstance(failure, APIStatusError)
            assert failure.status_code == 503
            assert int(failure.response.headers["retry-after"]) >= 1
        assert said(client, "tiny-llama", stream=False)


def test_sampling_fields_logprobs_usage_and_legacy_completions_through_the_real_engine(tiny: Tiny) -> None:
    with serve(tiny("tiny-qwen3"), "--stages", "2") as running, running.client() as client:
        options = {"model": "tiny-qwen3", "messages": QUESTION, "max_tokens": 8, "temperature": 0.8}
        seeded = [
            client.chat.completions.create(**options, seed=seed, logprobs=True, top_logprobs=3).choices[0]  # type: ignore[call-overload]
            for seed in (1, 1, 2)
        ]
        texts = [choice.message.content for choice in seeded]
        assert texts[0] == texts[1] != texts[2]
        entries = seeded[0].logprobs.content
        assert 0 < len(entries) <= 8
        assert all(len(entry.top_logprobs) == 3 and entry.logprob <= 0 for entry in entries)
        forced = client.chat.completions.create(**{**options, "temperature": 0}, logit_bias={"300": 100}, n=2)  # type: ignore[call-overload]
        assert [choice.index for choice in forced.choices] == [0, 1]
        assert forced.usage.completion_tokens == 16
        legacy = client.completions.create(
            model="tiny-qwen3",
            prompt="The fox",
            max_tokens=5,
            logprobs=2,
            temperature=0,
            logit_bias={"300": 100},
        )
        assert len(legacy.choices[0].logprobs.tokens) == 5  # type: ignore[union-attr]
        with pytest.raises(BadRequestError) as refused:
            client.chat.completions.create(**options, response_format={"type": "json_object"})  # type: ignore[call-overload]
        assert refused.value.param == "response_format"
        with pytest.raises(BadRequestError) as refused:
            long = [{"role": "user", "content": "word " * 9000}]
            client.chat.completions.create(**{**options, "messages": long})  # type: ignore[call-overload]
        assert refused.value.code == "context_length_exceeded"


def test_sigterm_in_a_stream_ends_it_with_an_error_and_frees_the_port(tiny: Tiny) -> None:
    with serve(tiny("tiny-llama")) as running:
        body = {
            "model": "tiny-llama",
            "messages": QUESTION,
            "max_tokens": 7000,
            "stream": True,
            "logit_bias": {"300": 100},
        }
        events = []
        with httpx.stream(
            "POST", f"{running.url}/v1/chat/completions", json=body, timeout=30, trust_env=False
        ) as response:
            for line in response.iter_lines():
                if line.startswith("data: "):
                    events.append(line.removeprefix("data: "))
                    if len(events) == 3:
                        running.process.terminate()
        assert "being closed" in json.loads(events[-1])["error"]["message"]
        assert running.process.wait(timeout=20) is not None
    with (
        serve(tiny("tiny-llama"), port=int(running.url.rpartition(":")[2])) as again,
        again.client() as client,
    ):
        assert said(client, "tiny-llama", stream=False)


def test_metrics_and_a_timeline_say_what_the_stages_did(tiny: Tiny, tmp_path: Path) -> None:
    folder = tiny("tiny-qwen3")
    with serve(folder, "--stages", "2", "--trace", str(tmp_path)) as running, running.client() as client:
        client.chat.completions.create(model=folder.name, messages=QUESTION, max_tokens=40, temperature=0)  # type: ignore[call-overload]

        def measured() -> dict[str, float]:
            lines = httpx.get(f"{running.url}/metrics", trust_env=False).text.splitlines()
            return {
                line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if line[0] != "#"
            }

        model = f'model="{folder.name}"'
        wait_until(lambda: f'omlx_stage_cost_seconds{{{model},part="row",stage="1"}}' in measured(), 10)
        found = measured()
        assert found[f"omlx_drawn_tokens_total{{{model}}}"] >= 40
        assert found[f"omlx_requests_running{{{model}}}"] == 0
        for stage in ("0", "1"):
            assert found[f'omlx_stage_busy_seconds_total{{{model},stage="{stage}"}}'] > 0
    events = json.loads((tmp_path / f"{folder.name}.json").read_text().rstrip(",\n") + "]")
    spans = [event for event in events if event["ph"] == "X"]
    assert {event["pid"] for event in spans} == {1, 2}
    assert {"build", "give", "wait for input"} <= {event["name"] for event in spans}
