"""How a bundle is served: addresses, keys, logs and limits, by file and by command line (read once at start)."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from ostinato.engines.errors import RecipeError

from .config import RuntimeConfig
from .serve_limits import ServeLimits

LOG_FORMATS = ("human", "json")
LOG_LEVELS = ("debug", "info", "warning", "error")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]{0,30}://([a-z0-9.-]+|\[[0-9a-f:]+\])(:\d{1,5})?")  # apps have own schemes
_MAX_PORT = 65535


@dataclass(frozen=True)
class ServeConfig:
    """`metrics_port` None: no such port; 0 for either: any that is free.

    `api_keys`: a file of keys; more may come from the environment. `insecure`: other machines may call without a key.
    `allowed_hosts`: names besides this machine's own that a caller may know it by, where no key protects it.
    `otlp_endpoint`: a collector of traces; None: the environment's, if it names one.
    `strict_fields`: refuse fields that nobody knows, instead of naming them in a header.
    """

    bundle: Path | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    metrics_host: str = "127.0.0.1"
    metrics_port: int | None = 8001
    api_keys: Path | None = None
    insecure: bool = False
    cors_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    strict_fields: bool = False
    log_format: str = "human"
    log_level: str = "info"
    otlp_endpoint: str | None = None
    limits: ServeLimits = field(default_factory=ServeLimits)
    engine: RuntimeConfig = field(default_factory=RuntimeConfig)

    def __post_init__(self) -> None:
        for name in ("port", "metrics_port"):
            if (port := getattr(self, name)) is not None and not 0 <= port <= _MAX_PORT:
                raise RecipeError(f"{name} is {port}: give 0 to {_MAX_PORT}")
        for name, known in (("log_format", LOG_FORMATS), ("log_level", LOG_LEVELS)):
            if getattr(self, name) not in known:
                raise RecipeError(f"{name} is {getattr(self, name)!r}: give one of {', '.join(known)}")
        for origin in self.cors_origins:
            if not _ORIGIN.fullmatch(origin):
                raise RecipeError(
                    f"cors_origins has {origin!r}: give scheme://host or scheme://host:port, in small letters and "
                    "without a path; there is no origin for all"
                )

    def check_exposure(self, has_keys: bool) -> None:
        """Raises RecipeError where other machines could call without a key and nobody said that they may."""
        for name, host in (("host", self.host), ("metrics_host", self.metrics_host)):
            is_used = name == "host" or self.metrics_port is not None
            if is_used and not (is_loopback(host) or has_keys or self.insecure):
                raise RecipeError(
                    f"{name} {host} is open to other machines, and there are no API keys: give --api-keys FILE or "
                    f"OSTINATO_API_KEYS, or say --insecure"
                )


@lru_cache(maxsize=64)  # asked for each call's Host
def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
