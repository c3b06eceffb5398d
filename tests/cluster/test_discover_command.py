"""`omlx cluster discover`: what a person, or a program, is told of who is there."""

import asyncio
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from omlx.cluster.discovery import announcing, multicast
from omlx.cluster.nodes import Node, NodeId, Versions, cluster_mark, listed_host, reach_of
from omlx.cluster.roster import Lost, Roster, Seen, fold
from omlx.discover_command import as_json, conflicts, listen, own_cluster, table
from omlx.errors import BadSetting

OURS = Versions(omlx="0.1.0", mlx="0.32.4", mlx_lm="0.32.2")
COMMAND = "import sys; sys.argv[1:1] = ['cluster', 'discover']; from omlx.cli import main; main()"


def node(number: int = 1, **given: object) -> Node:
    plain = Node(
        NodeId(f"{number:032x}"),
        f"mac-{number}",
        reach_of([f"10.0.0.{number}"], 1.0),
        1.0,
        versions=OURS,
        chip="Apple M3 Ultra",
        memory_bytes=512 * 10**9,
        host_key_fingerprint="SHA256:" + "A" * 43,
    )
    return replace(plain, **given)  # type: ignore[arg-type]


def roster_of(*nodes: Node) -> Roster:
    roster = Roster()
    for one in nodes:
        roster = fold(roster, Seen(one))
    return roster


def shown(roster: Roster, mark: str | None = None) -> str:
    console = Console(width=160, no_color=True)
    with console.capture() as capture:
        console.print(table(roster, OURS, mark))
    return capture.get()


def test_a_row_says_what_a_machine_is_and_whose() -> None:
    mark = cluster_mark("ours")
    roster = roster_of(node(1, cluster=mark), node(2, cluster=cluster_mark("theirs")), node(3))
    one, two, three = (line for line in shown(roster, mark).splitlines() if "mac-" in line)
    assert "mac-1" in one and "10.0.0.1" in one and "Apple M3 Ultra" in one and "512.00 GB" in one
    assert "as here" in one and "ours" in one
    assert "another" in two
    assert "none" in three


def test_versions_that_differ_are_shown_with_ours() -> None:
    text = shown(roster_of(node(versions=replace(OURS, mlx="0.31.0", mlx_lm=None))))
    assert "mlx 0.31.0 (here 0.32.4)" in text
    assert "mlx-lm missing (here 0.32.2)" in text
    assert "omlx" not in text


def test_who_said_goodbye_and_who_has_not_answered_are_marked() -> None:
    roster = fold(roster_of(node()), Lost(node().id, node().host_key_fingerprint, 2.0))
    assert "said goodbye" in shown(roster)
    assert "has not answered" in shown(roster_of(listed_host("studio.local", ["10.0.0.9"], 1.0)))


def test_a_claimed_id_is_shown_and_explained() -> None:
    roster = roster_of(
        node(), node(host_key_fingerprint="SHA256:" + "B" * 43, reach=reach_of(["10.6.6.6"], 1))
    )
    assert "two machines claim its id" in shown(roster)
    (sentence,) = conflicts(roster)
    assert "10.6.6.6" in sentence and "node.json" in sentence


def test_the_json_has_the_same_and_says_null_for_what_is_not_known() -> None:
    mark = cluster_mark("ours")
    roster = roster_of(node(cluster=mark), listed_host("studio.local", [], 1.0))
    first, second = json.loads(json.dumps(as_json(roster, OURS, mark)))["nodes"]
    assert (first["id"], first["cluster"], first["differing_versions"]) == (node().id, "ours", [])
    assert (second["id"], second["asked_as"], second["chip"]) == (None, "studio.local", None)


def test_rows_come_as_they_are_found() -> None:
    announced = node(7, reach=(), agent_port=7000)
    states: list[Roster] = []

    async def main() -> Roster:
        async with multicast(lambda: ("127.0.0.1",)) as sockets, announcing(sockets, announced):
            return await listen(1.0, [], states.append, lambda: ("127.0.0.1",))

    for _ in range(10):  # a second is not enough on a busy machine
        roster = asyncio.run(main())
        assert states and states[-1] == roster
        if (known := roster.get(announced.id)) is not None:
            break
    assert known is not None and known.node.addresses == ("127.0.0.1",)


def test_a_host_that_is_none_is_refused() -> None:
    with pytest.raises(BadSetting, match="neither a name nor an address"):
        asyncio.run(listen(1.0, ["-oProxyCommand=reboot"], lambda _: None))


def test_a_machine_of_no_cluster_has_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert own_cluster(tmp_path) is None
    assert capsys.readouterr().err == ""
    (tmp_path / "node").symlink_to(tmp_path / "gone")
    assert own_cluster(tmp_path) is None
    assert "which cluster is ours is not known" in capsys.readouterr().err


def test_the_command_ends_in_time_and_its_json_is_whole() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", COMMAND, "--seconds", "0.5", "--json", "--host", "192.0.2.250"],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    nodes = json.loads(ran.stdout)["nodes"]
    assert "192.0.2.250" in [one["asked_as"] for one in nodes]
