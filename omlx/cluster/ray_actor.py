"""Ray's driver, in a process of its own, and the actor that it puts on each node. The only importer of ray.

`python -m omlx.cluster.ray_actor --fd N --head HOST:PORT --address IP`: requests come in over socket N, a
line each, and are answered in any order. Ray's C++ ends a driver whose head is gone, without an exception;
here that ends a child of the coordinator and nothing else. What it placed goes on: actors are detached, and
stages hang on the coordinator's own connections.
"""

import argparse
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from omlx.cluster.ray_messages import (
    LONGEST_LINE,
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
    ToDriver,
    for_driver,
    line,
)
from omlx.cluster.stage_starter import StageStarter, StartedStage

NAMESPACE = "omlx"
LABEL = "omlx"
"""Of a Ray node: its node id. It says where to look, not whom to trust: a stage's certificate does that."""
AT_ONCE = 16
"""Calls to one actor, and of all of them in the driver."""
CALL_BEYOND_S = 2.0
"""What a call may take on top of what it waits for by itself."""


class Unplaced(Exception):
    """The request cannot be carried out; `str(error)` is for the coordinator."""


def alive_nodes() -> dict[str, RayNode]:
    """Those with our label, by node id. A node that came back may be there twice until Ray gives the one
    before up: the labels are the same, and so is the address."""
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    ours = [node for node in nodes if node["Alive"] and LABEL in node["Labels"]]
    found = (RayNode(node["Labels"][LABEL], node["NodeManagerAddress"]) for node in ours)
    return {node.node_id: node for node in sorted(found, key=lambda node: node.node_id)}


def alive_node(node_id: str) -> RayNode:
    """Raises Unplaced."""
    if (node := alive_nodes().get(node_id)) is None:
        raise Unplaced(f"node {node_id} runs no Ray of this cluster: `omlx node run` there")
    return node


def starter_on(node_id: str) -> Any:
    """The node's actor, made where there is none. Once placed, a call to it says whether it lives."""
    return (
        ray.remote(StageStarter)
        .options(
            name=f"starter-{node_id}",
            namespace=NAMESPACE,
            get_if_exists=True,
            lifetime="detached",  # else it ends with this process
            max_restarts=0,
            num_cpus=0,
            max_concurrency=AT_ONCE,
            label_selector={LABEL: node_id},
        )
        .remote()
    )


def place(request: Place) -> Placed:
    """Raises Unplaced, RayError."""
    end = time.monotonic() + request.within_s
    address = alive_node(request.node_id).address
    try:
        stage = _start(request, address, end)
    except RayActorError:  # it died since its last call, and Ray has noticed by now
        stage = _start(request, address, end)
    return Placed(request.number, stage.address, stage.port, stage.process)


def _start(request: Place, address: str, end: float) -> StartedStage:
    call = starter_on(request.node_id).start.remote(address, request.head)
    stage: StartedStage = ray.get(call, timeout=max(end - time.monotonic(), 0.1))
    return stage


def end(request: End) -> Ended:
    """Raises Unplaced, RayError."""
    node_id = alive_node(request.node_id).node_id
    call = starter_on(node_id).end.remote(request.process, request.within_s)
    ray.get(call, timeout=request.within_s + CALL_BEYOND_S)
    return Ended(request.number)


def answer(request: ToDriver) -> FromDriver:
    """Carry it out; what goes wrong is an answer too."""
    try:
        match request:
            case Place():
                return place(request)
            case End():
                return end(request)
            case Ask(number):
                return Alive(number, tuple(alive_nodes().values()))
    except Unplaced as error:
        return Failed(request.number, str(error))
    except RayTaskError as error:
        return Failed(request.number, f"on its machine: {error.cause}")
    except GetTimeoutError:
        return Failed(request.number, "Ray gave no answer in time")
    except (RayError, ConnectionError) as error:
        return Failed(request.number, f"Ray: {first_line(error)}")


def first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _answered(request: ToDriver, tell: Callable[[FromDriver], None]) -> None:
    tell(answer(request))


def serve(control: socket.socket) -> None:
    """Until the coordinator's end closes."""
    sending = threading.Lock()

    def tell(message: FromDriver) -> None:
        with sending:
            control.sendall(line(message))

    tell(Ready())
    pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="ask")
    with control.makefile("rb") as lines:
        while data := lines.readline(LONGEST_LINE):
            pool.submit(_answered, for_driver(data), tell)


def main() -> None:
    """The process's frame."""
    parser = argparse.ArgumentParser(description="Ray's driver; started by the coordinator.")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--head", required=True, help="HOST:PORT of our own Ray head")
    parser.add_argument("--address", required=True, help="this machine's, as the cluster knows it")
    given = parser.parse_args()
    control = socket.socket(fileno=given.fd)
    try:
        ray.init(
            address=given.head,
            namespace=NAMESPACE,
            log_to_driver=False,
            configure_logging=False,
            _node_ip_address=given.address,
        )
    except (RayError, ConnectionError, RuntimeError, ValueError) as error:
        control.sendall(line(Failed(0, first_line(error))))
        sys.exit(1)
    with suppress(OSError):  # the coordinator is gone
        serve(control)
    # Threads may wait inside Ray's C++, and `ray.shutdown` with them: only the process's end is certain.
    os._exit(0)


if __name__ == "__main__":
    main()
