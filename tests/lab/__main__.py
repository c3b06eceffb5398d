"""`python -m tests.lab`: a lab by hand, held in the background until `down` or until its time is up.

    up -n 3 --memory-gib 64,16,128 --ttl 600
    exec mac-a -- CMD ...
    do cut mac-b carrier=true
    do shape mac-b delay_ms=5 rate_mbit=100
    status
    down

Every verb takes --state, the lab's folder. Verbs of `do` are the methods of tests.lab.lab.Lab.
"""

import argparse
import json
import os
import sys
from pathlib import Path

from tests.lab import keeper
from tests.lab.host import inside
from tests.lab.machine import LabError


def sizes(text: str) -> list[int]:
    return [int(size) for size in text.split(",")]


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.lab",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    for verb in ("up", "keep", "exec", "do", "status", "down"):
        of_verb = verbs.add_parser(verb)
        of_verb.add_argument("--state", type=Path, default=Path("/tmp/omlx-lab"))
        if verb in ("up", "keep"):
            of_verb.add_argument("-n", type=int, default=3, dest="count")
            of_verb.add_argument("--ttl", type=float, default=600, dest="ttl_s")
            of_verb.add_argument("--memory-gib", type=sizes, default=[64])
        if verb == "exec":
            of_verb.add_argument("host")
        if verb in ("exec", "do"):
            of_verb.add_argument("words", nargs=argparse.REMAINDER)
    return parser


def value_of(word: str) -> object:
    """A number or a truth where it is one, else the word."""
    try:
        return json.loads(word)
    except ValueError:
        return word


def enter(folder: Path, name: str, words: list[str]) -> None:
    """Becomes the command, in the host."""
    hosts = keeper.ask(folder, "status")["hosts"]
    if name not in hosts:
        raise LabError(f"no host {name!r} here; there are {', '.join(hosts)}")
    host = hosts[name]
    if host["pid"] is None:
        raise LabError(f"{name} is off: `do boot {name}`")
    command = words[1:] if words[:1] == ["--"] else words
    argv = inside(host["pid"], Path(host["home"]), command or ["sh"])
    os.execvpe(argv[0], argv, host["environment"] | {"TERM": os.environ.get("TERM", "dumb")})


def main(arguments: list[str]) -> None:
    given = options().parse_args(arguments)
    folder = given.state.absolute()
    match given.verb:
        case "keep":
            keeper.keep(folder, given.count, given.memory_gib, given.ttl_s)
        case "up":
            keeper.start(folder, given.count, given.memory_gib, given.ttl_s)
            hosts = keeper.ask(folder, "status")["hosts"]
            print(json.dumps({name: host["ip"] for name, host in hosts.items()}))
        case "exec":
            enter(folder, given.host, given.words)
        case "do" if given.words:
            verb, *words = given.words
            named = dict(word.split("=", 1) for word in words if "=" in word)
            places = [value_of(word) for word in words if "=" not in word]
            keeper.ask(folder, verb, *places, **{name: value_of(word) for name, word in named.items()})
        case "do":
            raise LabError(f"do what? There are {', '.join(keeper.VERBS)}")
        case "status":
            print(json.dumps(keeper.ask(folder, "status"), indent=1))
        case "down":
            keeper.stop(folder)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except LabError as error:
        sys.exit(f"lab: {error}")
