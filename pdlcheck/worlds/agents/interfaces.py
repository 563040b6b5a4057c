"""The network interfaces of this machine and their IPv4 addresses."""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct
from collections.abc import Iterator

from pdlcheck.launch.environment import is_loopback

__all__ = ["addresses", "interface_of", "outward_address"]

_SIOCGIFADDR = 0x8915
_FAR_AWAY = ("192.0.2.1", 9)  # an address only for documentation (RFC 5737); nothing is sent there


def addresses() -> Iterator[tuple[str, str]]:
    """Yield the name and the IPv4 address of each interface that has one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an address
                data = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                yield name, socket.inet_ntoa(data[20:24])


def outward_address() -> str | None:
    """Return the address by which other machines reach this one; None if this one has only loopback."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(_FAR_AWAY)  # only chooses the route
        return str(probe.getsockname()[0])
    return next((address for _, address in addresses() if not is_loopback(address)), None)


def interface_of(address: str) -> str:
    """Return the name of the interface that has this address; empty if none has it."""
    return next((name for name, its in addresses() if its == address), "")
