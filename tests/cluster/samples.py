"""Facts of machines, and what a Mac's own commands print, for tests."""

from typing import Any

import msgspec

from omlx.cluster.facts import Facts, Interface, Look, ModelFile, ModelFiles

GB = 10**9

VM_STAT = """Mach Virtual Memory Statistics: (page size of 16384 bytes)
Pages free:                              100000.
Pages active:                            900000.
Pages inactive:                          200000.
Pages speculative:                        30000.
Pages throttled:                              0.
Pages wired down:                        400000.
Pages purgeable:                          10000.
"Translation faults":                1234567890.
"""

PMSET_OF_A_MACBOOK = """Battery Power:
 Sleep On Power Button 1
 sleep                1
 displaysleep         2
AC Power:
 Sleep On Power Button 1
 displaysleep         10
 disksleep            10
 sleep                0 (sleep prevented by sharingd)
 networkoversleep     0
"""

PMSET_OF_A_STUDIO = """AC Power:
 standby              0
 displaysleep         10
 sleep                15
"""

HARDWARE_PORTS = """
Hardware Port: Ethernet
Device: en0
Ethernet Address: 00:00:00:00:00:01

Hardware Port: Thunderbolt Bridge
Device: bridge0
Ethernet Address: 00:00:00:00:00:02

Hardware Port: Thunderbolt Ethernet Slot 1
Device: en7
Ethernet Address: 00:00:00:00:00:03

Hardware Port: USB 10/100/1000 LAN
Device: en8
Ethernet Address: 00:00:00:00:00:04

Hardware Port: Wi-Fi
Device: en1
Ethernet Address: 00:00:00:00:00:05

VLAN Configurations
===================
"""

IFCONFIG = """lo0: flags=8049<UP,LOOPBACK,RUNNING,MULTICAST> mtu 16384
\tinet 127.0.0.1 netmask 0xff000000
\tinet6 ::1 prefixlen 128
en1: flags=8863<UP,BROADCAST,SMART,RUNNING,SIMPLEX,MULTICAST> mtu 1500
\tether 00:00:00:00:00:05
\tinet6 fe80::1%en1 prefixlen 64 secured scopeid 0xb
\tinet 192.168.1.20 netmask 0xffffff00 broadcast 192.168.1.255
en0: flags=8863<UP,BROADCAST,SMART,RUNNING,SIMPLEX,MULTICAST> mtu 1500
\tinet 192.168.1.21 netmask 0xffffff00 broadcast 192.168.1.255
bridge0: flags=8863<UP,BROADCAST,SMART,RUNNING,SIMPLEX,MULTICAST> mtu 1500
\tinet 169.254.7.9 netmask 0xffff0000 broadcast 169.254.255.255
bridge100: flags=8a63<UP,BROADCAST,SMART,RUNNING,ALLMULTI,SIMPLEX,MULTICAST> mtu 1500
\tinet 192.168.64.1 netmask 0xffffff00 broadcast 192.168.64.255
utun3: flags=8051<UP,POINTOPOINT,RUNNING,MULTICAST> mtu 1380
\tinet 100.64.0.2 --> 100.64.0.2 netmask 0xffffffff
"""

A_LOOK: dict[str, Any] = {
    "host": "studio.local",
    "node_id": "0" * 32,
    "system": "Darwin",
    "release": "15.5",
    "machine": "arm64",
    "python": "3.11.7",
    "executable": "/opt/omlx/bin/python3",
    "versions": {"omlx": "1.0", "mlx": "0.32.4", "mlx-lm": "0.32.2", "ray": "2.60.0"},
    "sysctl": {
        "machdep.cpu.brand_string": "Apple M4 Max",
        "hw.memsize": "68719476736",
        "iogpu.wired_limit_mb": "0",
    },
    "vm_stat": VM_STAT,
    "pmset": PMSET_OF_A_STUDIO,
    "hardware_ports": HARDWARE_PORTS,
    "ifconfig": IFCONFIG,
    "linux_addresses": [],
    "cpuinfo": "",
    "meminfo": "",
    "disk_free_bytes": 500 * GB,
    "model": None,
}


def look(**changed: Any) -> Look:
    return msgspec.convert(A_LOOK | changed, Look)


def mac(**changed: Any) -> Facts:
    """A Mac with which nothing is wrong."""
    plain = Facts(
        host="studio.local",
        node_id="0" * 32,
        system="Darwin",
        release="15.5",
        executable="/opt/omlx/bin/python3",
        versions={"omlx": "1.0", "python": "3.11.7", "mlx": "0.32.4", "mlx-lm": "0.32.2", "ray": "2.60.0"},
        chip="Apple M4 Max",
        memory_bytes=64 * GB,
        available_bytes=50 * GB,
        wired_limit_mb=0,
        disk_free_bytes=500 * GB,
        sleep_minutes=0,
        interfaces=(
            Interface("en0", "10.0.0.2", "ethernet"),
            Interface("bridge0", "169.254.7.9", "thunderbolt"),
        ),
        model=None,
    )
    return msgspec.structs.replace(plain, **changed)


def model_files(digest: str | None = None, bytes: int = 5, config: str | None = "c") -> ModelFiles:
    return ModelFiles("/models/one", {"model.safetensors": ModelFile(bytes, digest)}, config)
