"""What a process needs to speak to this cluster's Ray: its environment, and a head that is the right one."""

import os
import platform
import socket
from pathlib import Path

from omlx.cluster.membership import Member
from omlx.cluster.stage_starter import SECURITY_FOLDER
from omlx.errors import BadSetting, RayFailed
from omlx.node.tls import AUTHORITY, CERTIFICATE, KEY, Stranger, check_private, no_entry, node_shown, said

HEAD_WITHIN_S = 3.0
HEALTH = {
    # Silence of 3 s and a check's own second: a node is taken for dead in five to six.
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
    # A driver or a worker whose head is gone notices in seconds, not in a minute.
    "RAY_gcs_rpc_server_reconnect_timeout_s": "5",
    "RAY_grpc_client_keepalive_time_ms": "2000",
    "RAY_grpc_client_keepalive_timeout_ms": "3000",
}
QUIET = {
    # Its monitor would end workers where memory is short, which on a node that serves it is meant to be.
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_enable_metrics_collection": "false",
    "RAY_enable_timeline": "false",
    "RAY_event_stats": "false",
    "RAY_task_events_report_interval_ms": "0",
    # Loads, garbage and disk space are looked at ten times a second, for work that Ray has none of here.
    "RAY_raylet_report_resources_period_milliseconds": "1000",
    "RAY_raylet_check_gc_period_milliseconds": "10000",
    "RAY_kill_idle_workers_interval_ms": "5000",
    "RAY_local_fs_monitor_interval_ms": "60000",
    "RAY_object_manager_timer_freq_ms": "5000",
    "RAY_gcs_pull_resource_loads_period_milliseconds": "10000",
    "RAY_io_context_monitor_probe_interval_ms": "10000",
    "RAY_debug_dump_period_milliseconds": "0",
    # Threads that wait for objects of other nodes wake several times a second each.
    "RAY_object_manager_rpc_threads_num": "1",
}


def ray_environment(member: Member) -> dict[str, str]:
    """Of every process that speaks to our Ray. Raises BadSetting without a token or a certificate.

    Ray without a token, or with its mode unset, starts open to everybody: here it does not start.
    """
    folder = Path(member.security.folder)
    check_private(member.token_path)
    check_private(folder / KEY)
    for name in (CERTIFICATE, AUTHORITY):
        if not (folder / name).is_file():
            raise BadSetting(f"{folder / name} is missing: join this machine again")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "OMLX_"))}
    ours = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(member.token_path),
        "RAY_USE_TLS": "1",
        "RAY_TLS_SERVER_CERT": str(folder / CERTIFICATE),
        "RAY_TLS_SERVER_KEY": str(folder / KEY),
        "RAY_TLS_CA_CERT": str(folder / AUTHORITY),
        "RAY_USAGE_STATS_ENABLED": "0",
        # A raylet that ends must leave stages alone: they are not Ray's.
        "RAY_kill_child_processes_on_worker_exit": "false",
        SECURITY_FOLDER: str(folder),
    }
    if platform.system() == "Darwin":
        ours["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "1"
    return kept | HEALTH | QUIET | ours


def check_head(member: Member, head: tuple[str, int]) -> None:
    """That there is a head of our cluster, which takes our certificate.

    Ray tries for 15 s and more before it says so, in its own way. Raises RayFailed, BadSetting.
    """
    context = member.security.context(server=False)
    context.set_alpn_protocols(["h2"])
    where = f"Ray's head at {head[0]}:{head[1]}"
    try:
        plain = socket.create_connection(head, timeout=HEAD_WITHIN_S)
    except OSError as error:
        raise RayFailed(f"{where} cannot be reached: {said(error)}; is the coordinator up?") from None
    try:
        with plain, context.wrap_socket(plain) as sock:
            node_shown(sock.getpeercert(), None)
            # In TLS 1.3 a client is through before its own certificate is looked at.
            taken = sock.recv(1) != b""
    except (OSError, Stranger) as error:
        raise RayFailed(f"{where}: {no_entry(error)}") from None
    if not taken:
        raise RayFailed(f"{where} hung up on this machine's certificate: join it again")
