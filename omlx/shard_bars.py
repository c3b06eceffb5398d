"""A shard map as a terminal shows it: a table of nodes, a bar for each model, a table of stages. Pure."""

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from omlx.cluster.planner import gigabytes
from omlx.cluster.shard_map import ModelView, ShardMap, StageView

BAR_CELLS = 48
"""Of a whole model; a stage has one at least."""
COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "bright_red", "bright_cyan", "bright_magenta")
"""One a node, in the map's order."""
BLOCKS = {"ready": "█", "loading": "▒", "lost": "░"}
NODE_STYLES = {"up": "green", "joining": "yellow", "draining": "yellow", "away": "bold red"}
MODEL_STYLES = {"ready": "green", "idle": "dim", "loading": "yellow", "recovering": "yellow"}
"""Any other state is a bad one."""
BAD = "bold red"


def draw(shown: ShardMap) -> RenderableType:
    """All of it."""
    colours = colours_of(shown)
    parts: list[RenderableType] = [nodes_table(shown, colours)]
    for model in shown.models:
        parts += [Text(), heading(model)]
        if model.stages:
            parts.append(bar(model, colours))
    if any(model.stages for model in shown.models):
        parts += [Text(), stages_table(shown, colours)]
    return Group(*parts)


def colours_of(shown: ShardMap) -> dict[str, str]:
    """By the node's name; a stage's node that is not in the map has one too."""
    names = [node.name for node in shown.nodes]
    names += [stage.node for model in shown.models for stage in model.stages]
    return {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(dict.fromkeys(names))}


def nodes_table(shown: ShardMap, colours: dict[str, str]) -> Table:
    title = f"cluster {shown.cluster_id}" if shown.cluster_id else "one machine, in no cluster"
    table = Table("node", "state", "memory", "for models", "weights here", "", title=escape(title))
    for node in shown.nodes:
        name = f"{node.name} (here)" if node.here else node.name
        table.add_row(
            Text(name, colours[node.name]),
            Text(node.state, NODE_STYLES.get(node.state, BAD)),
            gigabytes(node.memory_bytes),
            gigabytes(node.budget_bytes),
            gigabytes(shown.held_bytes(node)),
            Text(node.why or ""),
        )
    return table


def heading(model: ModelView) -> Text:
    """One line: what the model is doing, and what happened to it."""
    state = Text(model.state, MODEL_STYLES.get(model.state, BAD))
    line = Text.assemble((model.id, "bold"), "  ", state)
    if model.stages:
        line.append(f"  {model.running} running, {model.waiting} waiting")
        line.append(f", epoch {model.epoch}, {_counted(model.recoveries, 'recovery', 'recoveries')}")
    if model.lost:
        line.append(f"  lost: {', '.join(f'{one.node} {layers(one)}' for one in model.lost)}", BAD)
    if model.why:
        line.append(f"  {model.why}", "yellow")
    return line


def bar(model: ModelView, colours: dict[str, str]) -> Text:
    """`studio 0-15 ████████ mini 16-23 ████`, as wide as the spans are long."""
    line = Text("  ")
    for stage, cells in zip(model.stages, widths(model), strict=True):
        style = BAD if stage.state == "lost" else colours[stage.node]
        line.append(f"{stage.node} {layers(stage)} ")
        line.append(BLOCKS[stage.state] * cells, style)
        line.append(" ")
    line.rstrip()
    return line


def widths(model: ModelView) -> list[int]:
    """Cells of each stage's block. Edges are rounded, so that blocks of equal spans together are exact."""
    whole = max(1, model.layers)

    def edge(layer: int) -> int:
        return round(layer * BAR_CELLS / whole)

    return [max(1, edge(stage.end) - edge(stage.start)) for stage in model.stages]


def stages_table(shown: ShardMap, colours: dict[str, str]) -> Table:
    table = Table("model", "node", "layers", "weights", "resident", "busy", "state")
    for model, stage in _stages(shown):
        table.add_row(
            Text(model.id),
            Text(stage.node, colours[stage.node]),
            layers(stage),
            gigabytes(stage.weight_bytes),
            "" if stage.rss_bytes is None else gigabytes(stage.rss_bytes),
            "" if stage.busy is None else f"{stage.busy:.0%}",
            Text(stage.state, BAD if stage.state == "lost" else MODEL_STYLES.get(stage.state, "")),
        )
    return table


def layers(stage: StageView) -> str:
    """The last one included, as people count."""
    return f"{stage.start}-{stage.end - 1}" if stage.end - stage.start > 1 else str(stage.start)


def _stages(shown: ShardMap) -> Iterator[tuple[ModelView, StageView]]:
    for model in shown.models:
        for stage in model.stages:
            yield model, stage


def _counted(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"
