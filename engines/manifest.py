"""The manifest of a bundle: everything the runtime must know before it loads (written offline, read once at start)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from .errors import BundleError
from .sizes import Limits, ModelSizes

SCHEMA_VERSION = 1
FILE_NAME = "manifest.json"


@dataclass(frozen=True)
class FileDigest:
    """One file of the bundle, by its path inside it."""

    sha256: str
    size_bytes: int


@dataclass(frozen=True)
class Manifest:
    """`identity` digests checkpoint + recipe + builder sources + toolchain: equal identities mean an equal bundle.

    `hardware`: what the target needs of a machine. `notes`: what a reader should know of the build, such as weights
    that could not keep their own quantization. `files` covers every file but the manifest itself.
    """

    name: str
    target: str
    identity: str
    hardware: Mapping[str, str]
    weights: str
    kv_cache: str
    sizes: ModelSizes
    limits: Limits
    eos_ids: tuple[int, ...]
    bos_id: int | None
    weight_bytes: int
    kv_bytes_per_block: int
    toolchain: Mapping[str, str]
    notes: tuple[str, ...]
    files: Mapping[str, FileDigest]
    schema_version: int = SCHEMA_VERSION

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1, sort_keys=True) + "\n"


def manifest_from_json(text: str, where: Path) -> Manifest:
    """Parse a manifest; refuse one of another schema version, or with missing or unknown fields."""
    try:
        table: dict[str, Any] = json.loads(text)
        found = table.get("schema_version")
    except (json.JSONDecodeError, AttributeError) as error:
        raise BundleError(f"{where} is not a manifest ({error}): build the bundle again") from None
    if found != SCHEMA_VERSION:
        raise BundleError(
            f"{where} has schema version {found}, this ostinato reads {SCHEMA_VERSION}: build the bundle again"
        )
    names = {field.name for field in fields(Manifest)}
    if names != set(table):
        raise BundleError(
            f"{where} has other fields than expected ({sorted(names ^ set(table))}): build the bundle again"
        )
    try:
        table["sizes"] = ModelSizes(**table["sizes"])
        limits = table["limits"]
        table["limits"] = Limits(
            **{**limits, "row_buckets": tuple(limits["row_buckets"]), "token_buckets": tuple(limits["token_buckets"])}
        )
        table["files"] = {path: FileDigest(**entry) for path, entry in table["files"].items()}
        table["eos_ids"], table["notes"] = tuple(table["eos_ids"]), tuple(table["notes"])
    except (TypeError, KeyError) as error:
        raise BundleError(f"{where} does not read as a manifest ({error}): build the bundle again") from None
    return Manifest(**table)


def file_digest(path: Path) -> FileDigest:
    with path.open("rb") as file:
        return FileDigest(hashlib.file_digest(file, "sha256").hexdigest(), path.stat().st_size)


def digest_of(parts: Mapping[str, Any]) -> str:
    """A digest of a JSON-able table, independent of key order."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()
