"""`omlx cluster plan`: which nodes would run which layers of a model, how fast, and what holds them back."""

import asyncio
import json as json_text
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from omlx.cluster.planner import gigabytes
from omlx.cluster.private_files import CLUSTER_FOLDER
from omlx.cluster.rates import LINKS, Links
from omlx.errors import BadSetting
from omlx.node.manifest import ModelManifest, read_manifest
from omlx.settings import Settings, load_settings

# The search needs numpy, and the rest of it a client or a server: other commands should not wait for them.
if TYPE_CHECKING:
    from omlx.cluster.choice import Choice, Explained
    from omlx.cluster.offer import Offer, Terms
    from omlx.cluster.placement import Demand, Objective
    from omlx.control_client import ControlClient

SOURCES = {
    "measured": "measured",
    "told": "as told",
    "table": "by the table",
    "gauged": "a small model timed there",
    "guess": "a guess, not measured",
}

console = Console()
errors = Console(stderr=True, soft_wrap=True, highlight=False)

ModelWord = Annotated[
    str, typer.Argument(help="A model folder, or the id of a model; only headers are read.")
]
Nodes = Annotated[
    list[str] | None,
    typer.Option(
        "--node",
        metavar="NAME=WHAT",
        help="What if: a machine of the cluster gives 12GB, 50%, headless (0.9 of its memory) or workstation "
        "(0.65), as `omlx serve --node` takes it; or one is added or replaced: studio=64GB@400GBps, or "
        "mini=16GB@m4,headless (then 16GB is the Mac's memory). Once for each.",
    ),
]
Only = Annotated[
    bool, typer.Option("--only", help="Over the machines of --node alone; this one and its cluster aside.")
]
Link = Annotated[
    Literal["ethernet", "10gbe", "thunderbolt", "wifi"],
    typer.Option(help="What joins nodes whose link was not measured."),
]
Context = Annotated[
    int | None,
    typer.Option(help="Tokens per sequence \\[default: as serve plans, 4096 in all, or the model's own]."),
]
Sequences = Annotated[
    int | None,
    typer.Option(help="Sequences of that length at once \\[default: 1, or 8 for throughput]."),
]
ObjectiveWord = Annotated[
    Literal["throughput", "single"] | None,
    typer.Option(
        help="The slowest stage, for many streams, or the sum of all, for one \\[default: as serve is set; "
        "by --sequences where that is given]."
    ),
]
Prompt = Annotated[int, typer.Option(min=1, help="Tokens of the prompt in the time to first token.")]
Port = Annotated[int | None, typer.Option(help="Where the server of this machine listens \\[default: 8000].")]


def plan(  # noqa: PLR0913 (one parameter a flag)
    model: ModelWord,
    node: Nodes = None,
    only: Only = False,
    link: Link = "ethernet",
    context: Context = None,
    sequences: Sequences = None,
    objective: ObjectiveWord = None,
    prompt: Prompt = 1024,
    port: Port = None,
    details: Annotated[
        bool, typer.Option("--explain", help="Also how it was found, by which figures.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON object, no table.")] = False,
) -> None:
    """Show how `omlx serve` would spread a model over this machine and those that joined its cluster: layers,
    bytes, predicted speed. Loads nothing.

    A server that runs here is asked what it has measured; else machines are as they joined, by the settings.

    Nodes that would not help are left out, with the reason. Their order is chosen too.

    Example: omlx cluster plan Qwen3-32B-4bit --node studio=64GB@400GBps
    """
    from omlx.cluster.choice import choose_of, explain
    from omlx.cluster.placement import demand_of
    from omlx.cluster.what_if import imagine

    basis = _only_imagined(model) if only else _there_is(model, load_settings(port=port))
    manifest, offer = basis.manifest, imagine(basis.offer, node or ())
    links = offer.links(LINKS[link])
    demand = demand_of(
        offer.terms,
        offer.terms.least_tokens(manifest.context_tokens),
        objective=objective,
        sequences=sequences,
        context_tokens=context,
    )
    choice, with_hot = choose_of(manifest, offer, links, demand, prompt)
    explained = explain(manifest, choice, links)
    idle = offer.idle(with_hot=with_hot)
    explained = replace(explained, left_out=(*explained.left_out, *idle))
    if json:
        said = _as_json(manifest, demand, choice, explained)
        print(json_text.dumps({**said, "by": basis.by, "hot_tier": with_hot}))
        return
    _show(manifest, demand, choice, explained)
    console.print(f"by               {escape(basis.words)}", highlight=False)
    if not with_hot:
        console.print("beside it no memory is left for the hot tier of the cache", highlight=False)
    if details:
        _show_details(manifest, demand, choice, links)


# ------------------------------------------------------------------ what there is


@dataclass(frozen=True, slots=True)
class _Basis:
    """What is planned, over what, and who said so."""

    manifest: ModelManifest
    offer: "Offer"
    by: Literal["server", "disk", "imagined"]
    words: str


def _only_imagined(model: str) -> _Basis:
    from omlx.cluster.offer import Offer, Terms

    settings = load_settings()
    terms = Terms.of(settings)
    manifest, _ = _find(settings, model, terms.kv_bits)
    return _Basis(manifest, Offer((), (), terms), "imagined", "the machines of --node alone")


def _there_is(model: str, settings: Settings) -> _Basis:
    """As the running server says, else as it is on disk."""
    from omlx.cluster.offer import Terms
    from omlx.control_client import ControlClient

    with ControlClient(settings) as server:
        if (found := _as_served(model, settings, server)) is not None:
            return found
    terms = Terms.of(settings)
    manifest, models = _find(settings, model, terms.kv_bits)
    offer, words = _on_disk(settings, terms, models)
    return _Basis(manifest, offer, "disk", words)


def _as_served(model: str, settings: Settings, server: "ControlClient") -> _Basis | None:
    """None where no server says anything of use; what else listens there is told."""
    own = Path(model).expanduser()
    asked = server.offer(str(own.resolve()) if own.is_dir() else model)
    if asked.offer is None:
        if asked.heard:
            errors.print(f"{asked.why}; planned without it", markup=False, style="yellow")
        return None
    offer = asked.offer
    if offer.folder is not None:
        manifest = read_manifest(Path(offer.folder), offer.terms.kv_bits)
    else:
        manifest, _ = _find(settings, model, offer.terms.kv_bits)
        if not own.is_dir():  # it may have been measured before, by its folder
            offer = server.offer(str(manifest.folder.resolve())).offer or offer
    return _Basis(manifest, offer, "server", f"what the server at {server.place} knows now")


def _on_disk(settings: Settings, terms: "Terms", models: int) -> "tuple[Offer, str]":
    """What a server that is started now would plan with, and that in words. Raises BadSetting."""
    from omlx.cluster.fleet import Fleet, fleet_of, this_machine
    from omlx.cluster.liveness import who_answers
    from omlx.cluster.machine import memory_available_bytes, memory_ceiling_bytes
    from omlx.cluster.members import read_members
    from omlx.cluster.offer import SILENT, offer_of
    from omlx.serve import has_nodes

    ceiling, idle = memory_ceiling_bytes(), dict[str, str]()
    if has_nodes(settings):
        from omlx.cluster.trust import open_trust

        members = read_members(CLUSTER_FOLDER)
        here = this_machine(open_trust(CLUSTER_FOLDER).node_id, ceiling)
        fleet = fleet_of(here, members, settings.nodes)
        answering = asyncio.run(who_answers(members))
        idle = {one.id: SILENT for one in members if one.id not in answering}
        words = "what the machines were when they joined; no server runs here that has measured them"
    else:
        here = this_machine("", ceiling)
        fleet, words = Fleet((here,)), "what this machine is; there is no cluster that serve would use"
    free = {here.node_id: memory_available_bytes()}
    return offer_of(fleet, terms, models=models, free_bytes=free, idle=idle), words


def _find(settings: Settings, model: str, kv_bits: int | None) -> tuple[ModelManifest, int]:
    """The model, and how many a server of it would have: a folder as it is, else one of the models folder by
    its id, else of the hub."""
    from omlx.hub_models import hub_manifest
    from omlx.node.library import Library, scan

    folder, models = Path(model).expanduser(), settings.models.expanduser()
    if folder.is_dir():
        return read_manifest(folder, kv_bits), 1
    library = scan(models) if models.is_dir() else Library(())
    for entry in library.entries:
        if entry.id == model:
            return read_manifest(entry.folder, kv_bits), sum(one.problem is None for one in library.entries)
    if (of_hub := hub_manifest(model, kv_bits)) is not None:
        return of_hub, 1
    if not models.is_dir():
        raise BadSetting(f"{model!r} is no folder, and there is no models folder {models} to look for its id")
    return read_manifest(library.find(model).folder, kv_bits), 1


# ------------------------------------------------------------------ shown


def _show(manifest: ModelManifest, demand: "Demand", choice: "Choice", explained: "Explained") -> None:
    from omlx.cluster.forecast import milliseconds

    placement, expected, plan = choice.placement, choice.expected, choice.placement.plan
    table = Table(
        *("node", "layers", "weights", "cache", "scratch", "free of", "a token"),
        title=f"{escape(manifest.folder.name)}: {demand.sequences} x {demand.context_tokens} tokens, "
        f"{demand.objective}",
    )
    for stage, seconds in zip(plan.stages, expected.stage_s, strict=True):
        table.add_row(
            escape(stage.node.name),
            f"{stage.span.start} to {stage.span.end - 1}",
            *(gigabytes(size) for size in (stage.weights, stage.kv, stage.scratch)),
            f"{gigabytes(stage.headroom)} of {gigabytes(stage.node.bytes)}",
            milliseconds(seconds),
        )
    console.print(table)
    groups = f" in {expected.groups} groups" if expected.groups > 1 else ""
    console.print(
        f"one stream       {expected.single:.1f} tokens/s\n"
        f"{demand.sequences:>4} together    {expected.throughput:.1f} tokens/s{groups}\n"
        f"first token      {milliseconds(expected.first_token_s)} after {expected.prompt_tokens} tokens\n"
        f"what binds       {escape(explained.binds)}",
        highlight=False,
    )
    for why in dict.fromkeys(why for _, why in explained.left_out):
        names = ", ".join(name for name, its in explained.left_out if its == why)
        console.print(f"left out: {escape(names)}: {escape(why)}", highlight=False)
    guessed = [node.name for node in placement.used if node.rates.source == "guess"]
    if guessed:
        names = escape(", ".join(guessed))
        console.print(f"speed unknown, counted as the slowest chip: {names}", highlight=False)


def _show_details(manifest: ModelManifest, demand: "Demand", choice: "Choice", links: Links) -> None:
    from omlx.cluster.forecast import forecast, milliseconds
    from omlx.cluster.placement import place

    placement = choice.placement
    if choice.passed_over is not None:
        found = "the most tokens/s by forecast, of the plans with fewer and fewer nodes"
    elif placement.exact:
        found = "no order, choice of nodes or split is better by these figures"
    else:
        found = (
            f"the best of the orders tried; none can be below {milliseconds(placement.bound_s)}, "
            f"this one takes {milliseconds(placement.value_s)}"
        )
    console.print(f"how good         {found}", highlight=False)
    for node in placement.used:
        rates = node.rates
        console.print(
            f"{escape(node.name)}: {rates.bandwidth / 1e9:.0f} GB/s, {rates.compute / 1e12:.1f} Tflop/s "
            f"({SOURCES[rates.source]})",
            highlight=False,
        )
    names = [node.name for node in placement.used]
    for one, after in pairwise(names):
        rate = links.between(one, after)
        console.print(
            f"{escape(one)} to {escape(after)}: {milliseconds(rate.latency_s)} and "
            f"{rate.bytes_per_s / 1e9:.2f} GB/s ({SOURCES[rate.source]})",
            highlight=False,
        )
    other: Objective = "single" if demand.objective == "throughput" else "throughput"
    nodes = [*placement.used, *choice.left_out]
    rival = place(manifest, nodes, links, replace(demand, objective=other))
    seen = forecast(manifest, rival, links, choice.expected.prompt_tokens)
    means = "the least sum of all stages" if other == "single" else "the least slowest stage"
    console.print(
        f"{means} instead: {seen.single:.1f} tokens/s for one stream, {seen.throughput:.1f} together",
        highlight=False,
    )


def _as_json(
    manifest: ModelManifest, demand: "Demand", choice: "Choice", explained: "Explained"
) -> dict[str, object]:
    placement, expected = choice.placement, choice.expected
    stages = [
        {
            "node": stage.node.name,
            "start": stage.span.start,
            "end": stage.span.end,
            "weights_bytes": stage.weights,
            "kv_bytes": stage.kv,
            "scratch_bytes": stage.scratch,
            "headroom_bytes": stage.headroom,
            "budget_bytes": stage.node.bytes,
            "token_s": seconds,
            "bandwidth_bytes_per_s": node.rates.bandwidth,
            "compute_flop_per_s": node.rates.compute,
            "rates_from": node.rates.source,
        }
        for stage, node, seconds in zip(placement.plan.stages, placement.used, expected.stage_s, strict=True)
    ]
    return {
        "model": manifest.folder.name,
        "objective": demand.objective,
        "context_tokens": demand.context_tokens,
        "sequences": demand.sequences,
        "stages": stages,
        "left_out": [{"node": name, "why": why} for name, why in explained.left_out],
        "single_tokens_per_s": expected.single,
        "throughput_tokens_per_s": expected.throughput,
        "groups": expected.groups,
        "first_token_s": expected.first_token_s,
        "prompt_tokens": expected.prompt_tokens,
        "binds": explained.binds,
        "value_s": placement.value_s,
        "bound_s": placement.bound_s,
        "exact": placement.exact and choice.passed_over is None,
    }
