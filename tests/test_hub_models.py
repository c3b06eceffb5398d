"""`omlx serve org/name` as its user meets it, with a hub on loopback."""

import json
import os
import resource
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from omlx.hub_models import hub_manifest, own_models
from omlx.node.hub import HubName, fetch
from omlx.node.manifest import read_manifest
from tests.cluster.known_speed import know_speed
from tests.hub_server import Hub, hub_server
from tests.node.test_hub import BIG, CHUNK, CONFIG, contents
from tests.walk.servers import OMLX, serve, wait_until

Tiny = Callable[[str], Path]
NAME = "org/tiny-llama"
DEAD = "http://127.0.0.1:9"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with hub_server(tmp_path, monkeypatch) as hub:
        yield hub


def refused(*words: str | Path, most_bytes: int | None = None) -> str:
    """The last line that it writes, with exit code 2."""

    def limit() -> None:
        if most_bytes is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))

    done = subprocess.run(
        [*OMLX, "serve", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        preexec_fn=limit,
    )
    assert done.returncode == 2, done
    assert "Traceback" not in done.stderr
    return done.stderr.strip().splitlines()[-1]


def started() -> "subprocess.Popen[bytes]":
    return subprocess.Popen([*OMLX, "serve", NAME], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


@pytest.mark.slow
def test_a_model_of_the_hub_answers_and_later_without_a_hub(
    hub: Hub, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add(NAME, tiny("tiny-llama"))

    def answer() -> str:
        with serve(Path(NAME)) as running:
            client = running.client()
            assert [model.id for model in client.models.list().data] == [NAME]
            said = client.chat.completions.create(
                model=NAME, messages=[{"role": "user", "content": "hello"}], temperature=0, max_tokens=8
            )
            return said.choices[0].message.content or ""

    first = answer()
    assert hub.ranges("model.safetensors") == [None]
    asked = len(hub.asked)
    monkeypatch.setenv("HF_ENDPOINT", DEAD)
    assert answer() == first
    with serve(tmp_path / "models") as running:
        assert [model.id for model in running.client().models.list().data] == [NAME]
    assert len(hub.asked) == asked


def test_ctrl_c_halfway_ends_at_once_and_the_next_start_goes_on(hub: Hub, tmp_path: Path) -> None:
    hub.add(NAME, {"config.json": CONFIG, "model.safetensors": BIG})
    hub.hold_after = CHUNK + 1000
    part = tmp_path / "models/models--org--tiny-llama/arriving" / hub.commit(NAME) / "model.safetensors.part"
    with started() as process:
        wait_until(lambda: part.exists() and part.stat().st_size == CHUNK)
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        process.wait(timeout=5)
        wait_until(lambda: not any(child.is_running() for child in children), 5)
    hub.hold_after = None
    hub.asked.clear()
    told: list[int] = []
    folder = fetch(HubName(NAME), tmp_path / "models", lambda what, done, total: told.append(done))
    assert contents(folder) == {"config.json": CONFIG, "model.safetensors": BIG}
    assert hub.ranges("model.safetensors") == [f"bytes={CHUNK}-"]
    assert told[0] >= CHUNK


def test_a_server_that_is_killed_halfway_leaves_no_download_behind_it(hub: Hub, tmp_path: Path) -> None:
    hub.add(NAME, {"config.json": CONFIG, "model.safetensors": BIG})
    hub.hold_after = CHUNK + 1000
    with started() as process:
        wait_until(lambda: hub.ranges("model.safetensors") == [None])
        children = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        process.wait(timeout=5)
        wait_until(lambda: not any(child.is_running() for child in children), 10)
    assert children


def test_a_disk_that_is_full_halfway_is_one_line(hub: Hub) -> None:
    """A limit on the size of files stands for the disk."""
    hub.add(NAME, {"config.json": CONFIG, "model.safetensors": BIG})
    line = refused(NAME, most_bytes=CHUNK + 1000)
    assert "the disk is full" in line and "make room" in line


def test_no_such_model_and_no_permission_are_one_line(hub: Hub) -> None:
    line = refused("org/nobody")
    assert line.startswith(f"omlx: org/nobody is no folder here, and {hub.url} shows no such model")
    hub.refusals["/api/models/org/gated"] = (401, "GatedRepo")
    assert f"gated: accept its terms at {hub.url}/org/gated" in refused("org/gated")


@pytest.mark.parametrize("word", ["nowhere", "./org/name", "/nowhere/name", "org/name/more"])
def test_a_path_with_a_typo_is_no_question_to_the_hub(hub: Hub, word: str) -> None:
    assert refused(word) == f"omlx: models folder {Path(word)} does not exist; make it, or name another one"
    assert hub.asked == []


def test_a_relative_path_that_exists_is_no_question_to_the_hub(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parent.parent))
    assert "no models in" in refused("org/name")
    assert hub.asked == []


def test_a_plan_needs_the_headers_alone(hub: Hub, tiny: Tiny, tmp_path: Path) -> None:
    folder = tiny("tiny-qwen3")
    hub.add(NAME, folder)
    found, own = hub_manifest(NAME, kv_bits=8), read_manifest(folder, kv_bits=8)
    assert found is not None
    assert found.layers == own.layers and found.weight_bytes == own.weight_bytes
    assert found.config == own.config and found.context_tokens == own.context_tokens
    sent = hub.ranges("model.safetensors")
    assert sent and all(range is not None for range in sent), "never the whole file"
    assert not (tmp_path / "models").exists()


def test_the_plan_command_takes_a_name_of_the_hub(hub: Hub, tiny: Tiny, tmp_path: Path) -> None:
    hub.add(NAME, tiny("tiny-llama"))
    know_speed(tmp_path)
    done = subprocess.run(
        [*OMLX, "cluster", "plan", NAME, "--node", "studio=64GB", "--json"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=os.environ | {"HOME": str(tmp_path)},
    )
    assert done.returncode == 0, done
    assert json.loads(done.stdout)["stages"][0]["end"] == 4
    assert None not in hub.ranges("model.safetensors")


def test_a_model_that_is_here_is_planned_without_a_request(hub: Hub, tiny: Tiny, tmp_path: Path) -> None:
    hub.add(NAME, tiny("tiny-llama"))
    folder = fetch(HubName(NAME), tmp_path / "models", lambda what, done, total: None)
    asked = len(hub.asked)
    found = hub_manifest(NAME)
    assert found is not None and found.folder == folder
    assert len(hub.asked) == asked
    assert hub_manifest(str(folder)) is None and hub_manifest("tiny-llama") is None


def test_fetched_models_do_not_go_into_the_folder_of_a_single_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = Path("~/.omlx/models").expanduser()
    monkeypatch.setenv("OMLX_MODELS", str(tmp_path))
    assert own_models() == tmp_path
    (tmp_path / "config.json").write_bytes(CONFIG)
    assert own_models() == home
