"""The command line as its user meets it: help that teaches, one line where something is wrong."""

import json
import os
import pty
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from omlx import __version__
from tests.walk.servers import free_port, serve

Tiny = Callable[[str], Path]
OMLX = [sys.executable, "-c", "from omlx.cli import main; main()"]


def omlx(*words: str | Path, timeout: float = 60.0, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*OMLX, *map(str, words)],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        env=os.environ | {"COLUMNS": "200"} | environment,
    )


def refused(*words: str | Path, **environment: str) -> str:
    """The one line with which it ends, exit code 2."""
    done = omlx(*words, **environment)
    assert done.returncode == 2, done
    lines = [line for line in done.stderr.strip().splitlines() if line.strip()]
    assert len(lines) == 1, lines
    assert "Traceback" not in done.stderr
    return lines[0]


def changed(folder: Path, into: Path, **config: object) -> Path:
    target = into / "model"
    shutil.copytree(folder, target)
    found = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(found | config))
    return target


def test_the_version_and_a_help_that_names_every_command() -> None:
    assert omlx("--version").stdout.strip() == f"omlx {__version__}"
    text = omlx("--help").stdout
    for command in ("serve", "demo", "models", "bench", "cache", "cluster", "node"):
        assert command in text
        assert omlx(command, "--help").returncode == 0


def test_what_is_logged_is_no_part_of_what_is_printed() -> None:
    """A line of the log stood before the JSON of the first plan on a machine whose speed was not known."""
    script = """
import structlog, sys
from omlx.cli import main
sys.argv = ["omlx", "--version"]
try:
    main()
finally:
    structlog.get_logger().warning("a word of the log")
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == f"omlx {__version__}"
    assert "a word of the log" in done.stderr


def test_a_wrong_flag_is_told_from_the_right_ones() -> None:
    done = omlx("serve", "--prot", "1")
    assert done.returncode == 2
    assert "--port" in done.stderr


@pytest.mark.parametrize("library", ["cryptography", "asyncssh", "zeroconf"])
def test_a_library_of_the_cluster_that_is_missing_is_one_line(library: str, tmp_path: Path) -> None:
    words = {"zeroconf": ["discover", "--seconds", "1"]}.get(library, ["join", "host.local"])
    hidden = f"import sys; sys.modules[{library!r}] = None; sys.argv[1:] = {['cluster', *words]!r}"
    ran = subprocess.run(
        [sys.executable, "-c", f"{hidden}; from omlx.cli import main; main()"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "HOME": str(tmp_path)},
    )
    assert ran.returncode == 2, ran.stderr
    assert library in ran.stderr and "omlx-cluster[cluster]" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_no_such_folder_no_models_and_a_file_instead_of_a_folder(tmp_path: Path) -> None:
    assert "nowhere" in refused("serve", tmp_path / "nowhere")
    assert "no models" in refused("serve", tmp_path)
    (tmp_path / "file").write_text("")
    assert "not a folder" in refused("serve", tmp_path / "file")


def test_a_broken_config_is_named(tiny: Tiny, tmp_path: Path) -> None:
    folder = changed(tiny("tiny-llama"), tmp_path)
    (folder / "config.json").write_text('{"model_type": ')
    assert "config.json" in refused("serve", folder)


def test_a_missing_shard_is_named(tiny: Tiny, tmp_path: Path) -> None:
    folder = changed(tiny("tiny-llama"), tmp_path)
    index = {"metadata": {}, "weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "model-00001-of-00002.safetensors" in refused("serve", folder)


def test_an_unknown_architecture_is_named(tiny: Tiny, tmp_path: Path) -> None:
    folder = changed(tiny("tiny-llama"), tmp_path, model_type="no_such_family")
    assert "no_such_family" in refused("serve", folder, "--port", str(free_port()))


def test_a_family_that_cannot_be_split_is_named_and_told_how_to_serve_it(tiny: Tiny, tmp_path: Path) -> None:
    folder = changed(tiny("tiny-llama"), tmp_path, model_type="helium")
    line = refused("serve", folder, "--stages", "2", "--port", str(free_port()))
    assert "helium" in line and "--stages 1" in line


def test_more_stages_than_layers_is_refused(tiny: Tiny) -> None:
    line = refused("serve", tiny("tiny-llama"), "--stages", "9", "--port", str(free_port()))
    assert "9 stages for the 4 layers" in line


def test_too_little_memory_is_shown_as_arithmetic_before_anything_is_loaded(
    tiny: Tiny, tmp_path: Path
) -> None:
    """A sparse file: its header promises two terabytes of weights."""
    folder = changed(tiny("tiny-llama"), tmp_path, hidden_size=2**17, intermediate_size=2**19)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    width, inner = 2**17, 2**19
    tensors = {"model.embed_tokens.weight": ("F32", (768, width)), "model.norm.weight": ("F32", (width,))}
    for layer in range(4):
        tensors[f"model.layers.{layer}.mlp.up_proj.weight"] = ("F32", (inner, width))
    write_sparse(folder / "model.safetensors", tensors)
    started = time.monotonic()
    line = refused("serve", folder, "--port", str(free_port()))
    assert "does not fit" in line and "short" in line
    assert time.monotonic() - started < 30


def write_sparse(path: Path, tensors: dict[str, tuple[str, tuple[int, ...]]]) -> None:
    header, place = {}, 0
    for name, (dtype, shape) in tensors.items():
        size = 4
        for side in shape:
            size *= side
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [place, place + size]}
        place += size
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + place)


def test_a_taken_port_ends_a_second_start_before_it_loads_anything(tiny: Tiny) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = str(holder.getsockname()[1])
        started = time.monotonic()
        line = refused("serve", tiny("tiny-llama"), "--port", port)
        assert port in line and str(os.getpid()) in line
        assert time.monotonic() - started < 20


def test_an_open_bind_without_a_key_is_refused_and_with_one_asks_for_it(tiny: Tiny) -> None:
    folder, key = tiny("tiny-llama"), "correct-horse"
    assert "api-key" in refused("serve", folder, "--host", "0.0.0.0")
    with serve(folder, "--host", "0.0.0.0", "--api-key", key) as running:
        models = f"{running.url}/v1/models"
        assert httpx.get(models, trust_env=False).status_code == 401
        assert httpx.get(models, headers={"x-api-key": key}, trust_env=False).status_code == 200


def test_flag_beats_environment_beats_file_and_a_bad_value_is_named(tiny: Tiny, tmp_path: Path) -> None:
    home = tmp_path / "home"
    (home / ".omlx").mkdir(parents=True)
    file = home / ".omlx" / "settings.json"
    file.write_text('{"port": 0}')
    folder = tiny("tiny-llama")
    assert "port" in refused("serve", folder, HOME=str(home))
    with socket.create_server(("127.0.0.1", 0)) as holder:
        taken = str(holder.getsockname()[1])
        assert f":{taken}" in refused("serve", folder, HOME=str(home), OMLX_PORT=taken)
        assert f":{taken}" in refused("serve", folder, "--port", taken, HOME=str(home), OMLX_PORT="1")
    file.write_text('{"prot": 1}')
    assert "prot" in refused("serve", folder, HOME=str(home))
    file.write_text("{\n\nport")
    assert "line 3" in refused("serve", folder, HOME=str(home))


def test_a_size_that_is_none_is_refused_before_anything_is_looked_at(tiny: Tiny, tmp_path: Path) -> None:
    folder = tiny("tiny-llama")
    line = refused("serve", tmp_path / "nowhere", "--hot-cache-max-size", "lots")
    assert line.startswith("omlx: setting hot_cache_max_size = 'lots': must be bytes such as 8GB")
    line = refused("serve", folder, OMLX_PAGED_SSD_CACHE_MAX_SIZE="8 gigs")
    assert "paged_ssd_cache_max_size = '8 gigs'" in line
    assert "cache_block_tokens" in refused("serve", folder, OMLX_CACHE_BLOCK_TOKENS="8")
    line = refused("serve", folder, OMLX_CACHE_SNAPSHOT_TOKENS="1000")
    assert "cache_snapshot_tokens = 1000" in line and "multiple of cache_block_tokens, which is 256" in line
    assert "home folder" in refused("serve", folder, "--paged-ssd-cache-dir", "~no-such-user-here/cache")


def test_no_cache_works_whatever_the_other_settings_of_the_cache_say(tiny: Tiny, tmp_path: Path) -> None:
    """It comes as far as the port, which is taken."""
    folder = tiny("tiny-llama")
    (tmp_path / ".omlx").mkdir()
    file = tmp_path / ".omlx" / "settings.json"
    file.write_text('{"hot_cache_max_size": null, "paged_ssd_cache_max_size": [], "cache_block_tokens": "x"}')
    wrong = {
        "HOME": str(tmp_path),
        "OMLX_CACHE_SNAPSHOT_TOKENS": "1",
        "OMLX_PAGED_SSD_CACHE_DIR": "~nobody-here",
    }
    with socket.create_server(("127.0.0.1", 0)) as holder:
        taken = str(holder.getsockname()[1])
        assert "port" not in refused("serve", folder, "--port", taken, **wrong)
        flags = ["--port", taken, "--hot-cache-max-size", "lots"]
        assert f":{taken}" in refused("serve", folder, *flags, "--no-cache", **wrong)
        assert f":{taken}" in refused("serve", folder, *flags, OMLX_CACHE="off", **wrong)
        assert "hot_cache_max_size" in refused("serve", folder, *flags, "--cache", OMLX_CACHE="off")


def test_a_size_may_be_a_number_in_the_file(tiny: Tiny, tmp_path: Path) -> None:
    (tmp_path / ".omlx").mkdir()
    (tmp_path / ".omlx" / "settings.json").write_text('{"hot_cache_max_size": 8000000000}')
    with socket.create_server(("127.0.0.1", 0)) as holder:
        taken = str(holder.getsockname()[1])
        assert f":{taken}" in refused("serve", tiny("tiny-llama"), "--port", taken, HOME=str(tmp_path))


def test_models_lists_what_would_be_served_and_what_is_wrong_with_the_rest(
    tiny: Tiny, tmp_path: Path
) -> None:
    (tmp_path / "good").symlink_to(tiny("tiny-qwen3"))
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "config.json").write_text("{}")
    text = omlx("models", tmp_path).stdout
    assert "good" in text and "qwen3" in text and "model_type" in text


def test_plan_is_a_command_of_the_cluster_alone_and_what_does_not_fit_is_one_line(tiny: Tiny) -> None:
    folder = tiny("tiny-llama")
    assert omlx("plan", folder).returncode == 2
    nodes = ("--only", "--node", "studio=2GB", "--node", "mini=1GB")
    assert "studio" in omlx("cluster", "plan", folder, *nodes).stdout
    assert "short" in refused("cluster", "plan", folder, "--only", "--node", "mini=100kB")
    assert "name=SIZE" in refused("cluster", "plan", folder, "--only", "--node", "mini")


def test_ctrl_c_stops_a_server_cleanly_and_leaves_no_stage(tiny: Tiny) -> None:
    with serve(tiny("tiny-llama")) as running:
        stages = running.stages()
        running.process.send_signal(signal.SIGINT)
        assert running.process.wait(timeout=20) == 0
        assert stages and not any(stage.is_running() for stage in stages)


def imported_by(code: str, *arguments: str) -> set[str]:
    """The packages that a Python has imported after `code`."""
    code += "; import sys; print(*{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True, timeout=60
    )
    return set(done.stdout.split())


def test_a_server_starts_its_first_stage_before_it_imports_anything_heavy() -> None:
    assert not {"typer", "rich", "pydantic", "structlog", "starlette"} & imported_by("import omlx.cli")


def test_a_server_tells_its_stage_what_to_load_before_it_imports_the_web_and_the_tokenizers() -> None:
    found = imported_by("import omlx.commands, omlx.serve")
    assert not {"starlette", "uvicorn", "jinja2", "tokenizers", "transformers", "mlx", "numpy"} & found


def test_a_whole_head_has_imported_neither_mlx_nor_transformers(tiny: Tiny) -> None:
    """They would cost more than all the rest of it, in seconds and in memory."""
    code = "import sys, pathlib, omlx.serve, omlx.web; from omlx.node.text.tokenizer import load_tokenizer; "
    found = imported_by(code + "load_tokenizer(pathlib.Path(sys.argv[1]))", str(tiny("tiny-llama")))
    assert {"starlette", "tokenizers"} <= found
    assert not {"mlx", "mlx_lm", "numpy", "torch", "transformers", "huggingface_hub"} & found


def test_a_start_that_is_refused_leaves_no_stage_behind(tmp_path: Path) -> None:
    code = """
import psutil, sys
sys.argv[1:] = ["serve", sys.argv[1]]
from omlx.cli import main
try:
    main()
finally:
    print(len(psutil.Process().children()))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "nowhere")],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stdout.strip()) == (2, "0")


@pytest.mark.slow
def test_the_demo_asks_and_answers_on_a_terminal_and_ends(smollm2: Path) -> None:
    """On a pseudo-terminal, as a person runs it."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [*OMLX, "demo", "--once", "--port", str(free_port())], stdout=theirs, stderr=theirs, stdin=theirs
    ) as demo:
        os.close(theirs)
        screen = b""
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and select.select([ours], [], [], 60)[0]:
            try:
                piece = os.read(ours, 65536)
            except OSError:  # the other side is closed
                break
            if not piece:
                break
            screen += piece
        assert demo.wait(timeout=30) == 0
    os.close(ours)
    assert b"Paris" in screen
    assert b"time to first token" in screen
