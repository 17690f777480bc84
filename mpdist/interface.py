"""Which network interface ranks of several nodes talk over, chosen before a library guesses.

gloo takes the address that this host's own name resolves to, and the loopback where it resolves to none or to 127.0.1.1
(as on Debian), which no other node reaches. NCCL takes the first interface that is neither loopback nor docker's. What
is certain is the interface over which this node reaches another one of the run.
"""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct
from collections.abc import Iterable, MutableMapping

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915
_VIRTUAL = ("docker", "virbr", "br-", "veth", "cni")  # they lead to containers of this host


def choose(env: MutableMapping[str, str], peers: Iterable[str]) -> str | None:
    """Set gloo's and NCCL's interface in `env` where the user has not; the interface, or None if none is certain.

    peers: names or addresses of the run's nodes, this one's too. InfiniBand interfaces (ib0) are left for NCCL to find.
    """
    if GLOO in env and NCCL in env:
        return None
    here = addresses()
    name = next(filter(None, (towards(peer, here) for peer in peers)), None) or _only(here)
    if name is None:
        return None
    env.setdefault(GLOO, name)
    if not any(other.startswith("ib") for other in here):
        env.setdefault(NCCL, f"={name}")
    return name


def towards(peer: str, here: dict[str, str]) -> str | None:
    """The interface over which packets to `peer` leave; None if that is the loopback or not known. Sends nothing."""
    with contextlib.suppress(OSError):
        family, kind, _, _, place = socket.getaddrinfo(peer, 9, socket.AF_INET, socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)
            own = probe.getsockname()[0]
        return next((name for name, address in here.items() if address == own and not _loopback(address)), None)
    return None


def addresses() -> dict[str, str]:
    """The IPv4 address of each of this host's interfaces that has one."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found[name] = socket.inet_ntoa(answer[20:24])
    return found


def _only(here: dict[str, str]) -> str | None:
    names = [name for name, address in here.items() if not (_loopback(address) or name.startswith(_VIRTUAL))]
    return names[0] if len(names) == 1 else None


def _loopback(address: str) -> bool:
    return address.startswith("127.")
