"""The commands, and the composition root: `omlx serve`, `demo`, `models`, `bench`, and groups of others."""

import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table

from omlx import __version__, cache_commands, cluster_commands, node_commands
from omlx.cluster.planner import gigabytes
from omlx.errors import BadSetting, OmlxError, Refused
from omlx.hub_models import fetched
from omlx.node.library import Library, scan
from omlx.node.manifest import read_manifest
from omlx.observe import set_up_logging
from omlx.settings import Settings, load_settings
from omlx.show import LoadBars

if TYPE_CHECKING:
    from omlx.cluster.local_actor import Spare
    from omlx.web import Server

OF_THE_CLUSTER = ("asyncssh", "cryptography", "ray", "zeroconf")
"""Libraries that a single machine does without."""
WITH_THEM = "pip install 'omlx-cluster[cluster]' (in a checkout: pip install -e '.[cluster]')"

app = typer.Typer(
    name="omlx",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="One OpenAI-compatible server for MLX models, as one or several pipeline stages.",
    epilog="Every flag of serve is also an environment variable (OMLX_PORT) and a line of "
    "~/.omlx/settings.json; the flag wins, then the variable, then the file.",
)
app.add_typer(cache_commands.app, name="cache")
app.add_typer(cluster_commands.app, name="cluster")
app.add_typer(node_commands.app, name="node")
console = Console()
errors = Console(stderr=True, soft_wrap=True, highlight=False)

ModelArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="[MODEL_DIR]", help="A model folder, or a folder of model folders.", show_default=False
    ),
]
LogLevel = Annotated[
    Literal["debug", "info", "warning", "error"] | None, typer.Option(help="\\[default: info]")
]
Port = Annotated[int | None, typer.Option(help="Port to listen on \\[default: 8000].")]
Stages = Annotated[int | None, typer.Option(help="Stage processes per model on this machine \\[default: 1].")]
Cluster = Annotated[
    bool | None,
    typer.Option(
        "--cluster/--no-cluster", help="Use the machines that joined this one's cluster \\[default: yes]."
    ),
]
Nodes = Annotated[
    list[str] | None,
    typer.Option(
        "--node",
        "--nodes",
        metavar="NAME=WHAT",
        help="What a machine of the cluster gives: headless (0.9 of its memory), workstation (0.65), 50%, or "
        "12GB; once for each \\[default: workstation].",
    ),
]
Objective = Annotated[
    Literal["single", "throughput"] | None,
    typer.Option(help="What a plan over several machines is best for \\[default: single]."),
]
Link = Annotated[
    Literal["tcp", "ring", "jaccl"] | None,
    typer.Option(help="How stages hand on hidden states \\[default: tcp]."),
]
Running = Annotated[int | None, typer.Option(help="Requests that run at once, per model \\[default: 8].")]
Waiting = Annotated[int | None, typer.Option(help="Requests that may wait; more get a 503 \\[default: 64].")]
StepTokens = Annotated[int | None, typer.Option(help="Prompt tokens computed in one step \\[default: 512].")]
Slowdown = Annotated[
    float | None,
    typer.Option(help="While prompts are read, answers' tokens come at most this many times slower."),
]
KvBits = Annotated[
    int | None,
    typer.Option(
        metavar="8|4", help="Keep keys and values in so few bits, where they can be \\[default: as computed]."
    ),
]
Trace = Annotated[
    Path | None, typer.Option(help="Write each model's steps into this folder, as a timeline for Perfetto.")
]
Cache = Annotated[
    bool | None,
    typer.Option(
        "--cache/--no-cache", help="Keep what was computed of prompts, in RAM and on disk \\[default: yes]."
    ),
]
HotCacheSize = Annotated[
    str | None,
    typer.Option(help="RAM for it: 8GB, or a share of what models may take; 0: none \\[default: 10%]."),
]
CacheFolder = Annotated[
    Path | None, typer.Option(help="Folder for it, on a fast disk \\[default: ~/.omlx/cache].")
]
ColdCacheSize = Annotated[
    str | None,
    typer.Option(help="Most it takes there: 50GB, or a share of the disk; 0: none \\[default: 10%]."),
]


def parse_gifts(given: Sequence[str]) -> dict[str, str]:
    """NAME=WHAT of --node. Raises BadSetting; whether WHAT is something is seen where it is used."""
    pairs = [text.partition("=") for text in given]
    for (name, equals, what), text in zip(pairs, given, strict=True):
        if not (name and equals and what):
            raise BadSetting(f"--node {text!r} must read NAME=WHAT, such as studio=headless or mini=12GB")
    return {name: what for name, _, what in pairs}


def version(wanted: bool) -> None:
    if wanted:
        console.print(f"omlx {__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def root(
    _: Annotated[
        bool, typer.Option("--version", callback=version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    pass


@app.command()
def serve(  # noqa: PLR0913 (one parameter a flag)
    context: typer.Context,
    model_dir: ModelArgument = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on \\[default: 127.0.0.1].")] = None,
    port: Port = None,
    stages: Stages = None,
    max_concurrent_requests: Running = None,
    max_queued_requests: Waiting = None,
    step_tokens: StepTokens = None,
    slowdown: Slowdown = None,
    context_tokens: Annotated[
        int | None, typer.Option(help="Longest prompt and answer \\[default: the model's own].")
    ] = None,
    kv_bits: KvBits = None,
    cache: Cache = None,
    hot_cache_max_size: HotCacheSize = None,
    paged_ssd_cache_dir: CacheFolder = None,
    paged_ssd_cache_max_size: ColdCacheSize = None,
    link: Link = None,
    cluster: Cluster = None,
    node: Nodes = None,
    objective: Objective = None,
    trace: Trace = None,
    api_key: Annotated[
        str | None, typer.Option(help="Ask every client for this key; needed to listen beyond this machine.")
    ] = None,
    log_level: LogLevel = None,
) -> None:
    """Serve a model, or every model of a folder, at http://HOST:PORT/v1.

    A single model is loaded at once; of several, each is loaded when it is first asked for.

    Where machines have joined this one's cluster, a plan says which of them run what.

    Example: omlx serve ~/models/Qwen3-8B-4bit, or omlx serve mlx-community/Qwen3-8B-4bit from the hub
    """
    settings = load_settings(
        models=model_dir,
        host=host,
        port=port,
        stages=stages,
        max_concurrent_requests=max_concurrent_requests,
        max_queued_requests=max_queued_requests,
        step_tokens=step_tokens,
        slowdown=slowdown,
        context_tokens=context_tokens,
        kv_bits=kv_bits,
        cache=cache,
        hot_cache_max_size=hot_cache_max_size,
        paged_ssd_cache_dir=paged_ssd_cache_dir,
        paged_ssd_cache_max_size=paged_ssd_cache_max_size,
        link=link,
        cluster=cluster,
        nodes=parse_gifts(node or ()) or None,
        objective=objective,
        trace=trace,
        api_key=api_key,
        log_level=log_level,
    )
    run_server(fetched(settings, model_dir), context.obj)


@app.command()
def demo(
    once: Annotated[bool, typer.Option("--once", help="End after the answer instead of serving on.")] = False,
    port: Port = None,
    stages: Stages = None,
) -> None:
    """Build the embedded model (SmolLM2 135M Instruct, from a PyPI wheel), serve it, ask it a question."""
    from omlx.demo.cache import default_cache
    from omlx.demo.models import build, demo_model
    from omlx.demo.question import ask

    with LoadBars(errors) as bars:
        folder = build(demo_model(), default_cache(), bars.tell)
    settings = load_settings(
        models=folder, host="127.0.0.1", port=port, stages=stages, log_level="warning", cluster=False
    )

    async def question(server: "Server") -> None:
        await ask(f"http://{settings.host}:{settings.port}/v1", folder.name, console)
        server.should_exit = once

    run_server(settings, [], question)


@app.command()
def models(model_dir: ModelArgument = None) -> None:
    """List the models of a folder: what would be served, how large it is, what is wrong with the others."""
    settings = load_settings(models=model_dir)
    table = Table("model", "family", "layers", "weights", "context")
    for entry in scan(settings.models).entries:
        if entry.problem is not None:
            table.add_row(entry.id, f"[red]{entry.problem}[/red]")
            continue
        manifest = read_manifest(entry.folder)
        table.add_row(
            entry.id,
            manifest.model_type,
            str(manifest.num_layers),
            gigabytes(manifest.weight_bytes),
            str(manifest.context_tokens or "not stated"),
        )
    if table.row_count == 0:
        raise BadSetting(f"no models in {settings.models}: put model folders there, or name another folder")
    console.print(table)


@app.command()
def bench(  # noqa: PLR0913 (one parameter a flag)
    url: Annotated[
        str | None,
        typer.Option(help="A server on this machine.", show_default="http://127.0.0.1:8000/v1"),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Which of its models to ask.", show_default="the only one")
    ] = None,
    scenario: Annotated[
        str, typer.Option(help="What to ask, with commas between: c1, c4, c8, prefix, again.")
    ] = "c1,c4,prefix",
    max_tokens: Annotated[
        int, typer.Option(min=2, help="Length of an answer; those to long prompts have 8 tokens.")
    ] = 128,
    prompt_words: Annotated[
        int, typer.Option(min=1, help="Words of the long prompt in prefix and again.")
    ] = 1400,
    json: Annotated[bool, typer.Option("--json", help="One JSON line a scenario, no table.")] = False,
    api_key: Annotated[
        str | None, typer.Option(help="The server's key.", show_default="OMLX_API_KEY")
    ] = None,
) -> None:
    """Measure a running server: time to the first token, tokens per second of each answer and of all.

    Any OpenAI-compatible server on this machine will do; start one with `omlx serve` first.

    c1: three short prompts, one after the other.

    c4, c8: four or eight short prompts at once.

    prefix: one long prompt three times, where a prefix cache would show.

    again: the same long prompt once more, after a restart of the server.

    Example: omlx bench --scenario c1,c8 --max-tokens 64
    """
    from omlx.bench import SCENARIOS, Load, LoadClient, find_scenarios

    names = find_scenarios(scenario)
    settings = load_settings(api_key=api_key)
    table = Table("scenario", "requests", "first token (median)", "tokens/s each", "tokens/s in all")

    async def measure() -> None:
        async with LoadClient(url or f"http://127.0.0.1:{settings.port}/v1", settings.api_key) as client:
            load = Load(await client.find_model(model), max_tokens, prompt_words)
            table.title = f"{load.model} at {client.url}"
            with errors.status(f"{load.model}: warming up") as status:
                await client.warm_up(load)
                for name in names:
                    status.update(f"{load.model}, {name}: {SCENARIOS[name].what}")
                    figures = await client.run(name, load)
                    table.add_row(*figures.row())
                    if json:
                        print(figures.json(), flush=True)

    asyncio.run(measure())
    if not json:
        console.print(table)


def run_server(
    settings: Settings,
    spares: list["Spare"],
    question: Callable[["Server"], Awaitable[None]] | None = None,
) -> None:
    """Serve, with bars while models load, one line when it is ready, and then perhaps a question.

    `spares` are started already, and become the first stages.
    """
    # What only a server needs the other commands need not wait for.
    from omlx.serve import serve as serve_http

    set_up_logging(settings.log_level)
    bars = LoadBars(errors)

    async def beside(server: "Server", library: Library) -> None:
        bars.stop()
        for entry in library.entries:
            if entry.problem is not None:
                errors.print(f"left out: {entry.problem}")
        names = ", ".join(entry.id for entry in library.entries if entry.problem is None)
        console.print(
            f"serving {names} at http://{settings.host}:{settings.port}/v1 (Ctrl-C ends it)", highlight=False
        )
        if question is not None:
            await question(server)

    try:
        with bars:
            asyncio.run(serve_http(settings, spares, bars.update, beside))
    except KeyboardInterrupt:
        console.print("stopped", highlight=False)


def run(spares: list["Spare"]) -> None:
    """Errors of our own tree are one line: exit code 2 where something must change first, else 1."""
    set_up_logging("warning")  # to standard error: what a command prints may be JSON
    try:
        app(obj=spares)
    except Refused as error:
        errors.print(f"omlx: {error}", markup=False)
        sys.exit(2)
    except OmlxError as error:
        errors.print(f"omlx: {error}", markup=False)
        sys.exit(1)
    except ModuleNotFoundError as error:
        if str(error.name).partition(".")[0] not in OF_THE_CLUSTER:
            raise
        errors.print(f"omlx: this needs {error.name}, which is not installed: {WITH_THEM}", markup=False)
        sys.exit(2)
