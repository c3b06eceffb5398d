"""In the place of Ray's driver, for tests without Ray: what is asked is done by a real StageStarter, here.

`python tests/cluster/scripted_driver.py FOLDER WORD --fd N ...`: FOLDER is of node b's certificate. WORD is
"obey", or what goes wrong: "refuse", "abort", "nonsense" and "silence" at the first request, "shut" before.
"""

import os
import socket
import sys
import threading
import time

from omlx.cluster.ray_messages import (
    Alive,
    Ask,
    End,
    Ended,
    Failed,
    FromDriver,
    Place,
    Placed,
    RayNode,
    Ready,
    for_driver,
    line,
)
from omlx.cluster.stage_starter import SECURITY_FOLDER, StageStarter

HERE = "127.0.0.1"


def answer(starter: StageStarter, request: Place | End | Ask) -> FromDriver:
    match request:
        case Place(number, node_id, head):
            if node_id != "b":
                return Failed(number, f"node {node_id} runs no Ray of this cluster")
            stage = starter.start(HERE, head)
            return Placed(number, stage.address, stage.port, stage.process)
        case End(number, _, process, within_s):
            starter.end(process, within_s)
            return Ended(number)
        case Ask(number):
            return Alive(number, (RayNode("b", HERE), RayNode("head", HERE)))


def main() -> None:
    folder, word = sys.argv[1:3]
    control = socket.socket(fileno=int(sys.argv[sys.argv.index("--fd") + 1]))
    os.environ[SECURITY_FOLDER] = folder
    starter, sending = StageStarter(), threading.Lock()
    print("the last words", flush=True)
    if word == "shut":
        control.sendall(line(Failed(0, "the token is wrong")))
        return
    control.sendall(line(Ready()))

    def carry_out(request: Place | End | Ask) -> None:
        data = line(answer(starter, request))
        with sending:
            control.sendall(data)

    for data in control.makefile("rb"):
        match word:
            case "abort":
                os.abort()
            case "nonsense":
                control.sendall(b"{}\n")
            case "silence":
                time.sleep(60)
            case "refuse":
                control.sendall(line(Failed(for_driver(data).number, "no room")))
            case _:
                threading.Thread(target=carry_out, args=(for_driver(data),), daemon=True).start()
    os._exit(0)


if __name__ == "__main__":
    main()
