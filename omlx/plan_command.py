"""`omlx cluster plan`: which nodes would run which layers of a model, how fast, and what holds them back."""

import json as json_text
import platform
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from omlx.cluster.candidate import Candidate, budget_of, parse_candidate
from omlx.cluster.machine import memory_ceiling_bytes
from omlx.cluster.planner import NodeBudget, gigabytes
from omlx.cluster.private_files import CLUSTER_FOLDER
from omlx.cluster.rates import LINKS, LinkRate, Links, rates_by_chip
from omlx.errors import BadSetting
from omlx.node.library import scan
from omlx.node.manifest import ModelManifest, read_manifest
from omlx.settings import load_settings

# The search needs numpy; other commands should not wait for it.
if TYPE_CHECKING:
    from omlx.cluster.choice import Choice, Explained
    from omlx.cluster.placement import Demand, Objective

MOST_PLANNED = 32768
"""Tokens of context that are counted with unless told otherwise."""
SOURCES = {
    "measured": "measured",
    "told": "as told",
    "table": "by its chip",
    "guess": "a guess, not measured",
}

console = Console()

Nodes = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=SIZE[@SPEED][,ROLE]",
        help="A node to imagine, once for each: studio=64GB@400GBps, or mini=16GB@m4,headless (then 16GB "
        "is the Mac's memory, of which 0.9 are used; workstation: 0.65).",
        show_default="this machine and those that joined its cluster",
    ),
]


def plan(  # noqa: PLR0913 (one parameter a flag)
    model: Annotated[
        str, typer.Argument(help="A model folder, or the id of a model; only headers are read.")
    ],
    node: Nodes = None,
    link: Annotated[
        Literal["ethernet", "10gbe", "thunderbolt", "wifi"], typer.Option(help="What joins the nodes.")
    ] = "ethernet",
    context: Annotated[
        int | None,
        typer.Option(help="Tokens per sequence \\[default: the model's own context, 32768 at most]."),
    ] = None,
    sequences: Annotated[int, typer.Option(help="Sequences of that length at once.")] = 1,
    objective: Annotated[
        Literal["throughput", "single"] | None,
        typer.Option(
            help="The slowest stage, for many streams, or the sum of all, for one "
            "\\[default: single for one sequence]."
        ),
    ] = None,
    prompt: Annotated[
        int, typer.Option(min=1, help="Tokens of the prompt in the time to first token.")
    ] = 1024,
    details: Annotated[
        bool, typer.Option("--explain", help="Also how it was found, by which figures.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON object, no table.")] = False,
) -> None:
    """Show the best way to spread a model over nodes: layers, bytes, predicted speed. Loads nothing.

    Nodes that would not help are left out, and it says why. Their order is chosen too.

    Example: omlx cluster plan Qwen3-32B-4bit --node studio=64GB@400GBps --node mini=16GB@m4
    """
    from omlx.cluster.choice import choose, explain
    from omlx.cluster.placement import Demand

    manifest = _manifest(model)
    nodes, links = _imagined(node, link) if node else _cluster(link)
    demand = Demand(
        context_tokens=_context(manifest, context),
        sequences=sequences,
        objective=objective or ("single" if sequences == 1 else "throughput"),
    )
    choice = choose(manifest, nodes, links, demand, prompt)
    explained = explain(manifest, choice, links)
    if json:
        print(json_text.dumps(_as_json(manifest, demand, choice, explained)))
        return
    _show(manifest, demand, choice, explained)
    if details:
        _show_details(manifest, demand, choice, links)


def _manifest(model: str) -> ModelManifest:
    """Of a folder as it is, else of a model of the models folder by its id."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        return read_manifest(folder)
    models = load_settings().models
    if not models.is_dir():
        raise BadSetting(f"{model!r} is no folder, and there is no models folder {models} to look for its id")
    return read_manifest(scan(models).find(model).folder)


def _context(manifest: ModelManifest, wanted: int | None) -> int:
    return min(manifest.context_tokens or MOST_PLANNED, MOST_PLANNED) if wanted is None else wanted


def _imagined(nodes: list[str], link: str) -> tuple[list[Candidate], Links]:
    return [parse_candidate(text) for text in nodes], Links(LINKS[link])


def _cluster(link: str) -> tuple[list[Candidate], Links]:
    """This machine and the nodes that joined it, at the speed of their links as measured then."""
    from omlx.cluster.members import read_members

    here = _this_machine()
    nodes, pairs = [here], []
    for one in read_members(CLUSTER_FOLDER):
        taken = any(one.name == node.name for node in nodes)
        name = f"{one.name}-{one.id[:4]}" if taken else one.name
        budget = NodeBudget(name, max(1, budget_of(one.memory_bytes, "workstation")))
        nodes.append(Candidate(budget, rates_by_chip(one.chip, one.memory_bytes)))
        if (best := one.fastest_link) is not None:
            pairs.append((here.name, name, LinkRate(*best)))
    return nodes, Links.of(pairs, LINKS[link])


def _this_machine() -> Candidate:
    # Imported where it is needed: what-if questions ask nothing of this machine.
    from omlx.cluster.node_identity import chip

    name = platform.node().split(".")[0] or "here"
    ceiling = memory_ceiling_bytes()
    return Candidate(NodeBudget(name, ceiling), rates_by_chip(chip() or "unknown"))


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
    link = links.default
    console.print(
        f"links: {milliseconds(link.latency_s)} and {link.bytes_per_s / 1e9:.2f} GB/s", highlight=False
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
