"""Telling systemd, or another manager that speaks its protocol, how the server is (called once a second)."""

from __future__ import annotations

import logging
import os
import socket

logger = logging.getLogger(__name__)


class Manager:
    """Who started this process, if it wants to hear: $NOTIFY_SOCKET names where. See sd_notify(3)."""

    def __init__(self, address: str | None = None) -> None:
        address = os.environ.get("NOTIFY_SOCKET", "") if address is None else address
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._told: str | None = None

    def tell(self, trouble: str | None) -> None:
        """Fit to serve, which also feeds the watchdog, or why not. Nothing here may end the server."""
        if not self._address:
            return
        if trouble is None:
            self._send("READY=1\nWATCHDOG=1\nSTATUS=serving")
        elif trouble != self._told:
            self._send(f"STATUS={trouble}")
        self._told = trouble

    def _send(self, state: str) -> None:
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as connection:
                connection.setblocking(False)
                connection.sendto(state.encode(), self._address)
        except OSError as error:
            logger.warning("the service manager did not hear %r (%s)", state.partition("\n")[0], error)
