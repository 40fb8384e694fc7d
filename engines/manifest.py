"""The manifest of a bundle: everything the runtime must know before it loads (written offline, read once at start)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .engine_record import EngineInfo
from .errors import BundleError
from .json_record import bounded_text, json_table, record_from
from .memory_table import LatencyTable, MemoryTable
from .shards import ONE_RANK, Shards
from .sizes import Limits, ModelSizes
from .targets import TARGETS
from .tensorrt_options import PLAIN, TensorRTOptions

SCHEMA_VERSION = 2
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
    that could not keep their own quantization. `files` covers every file but the manifest itself. `weight_bytes` and
    `kv_bytes_per_block` count all ranks.

    Of GPU targets: `compute_capabilities` that engines and kernels were made for, such as "8.9"; `plugin_digest` of
    the operators' sources; `engines` of each rank, in order of rank; `memory` of the rank that takes most; `latency`
    by step shape.
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
    compute_capabilities: tuple[str, ...] = ()
    shards: Shards = ONE_RANK
    tensorrt: TensorRTOptions = PLAIN
    plugin_digest: str = ""
    engines: tuple[tuple[EngineInfo, ...], ...] = ()
    memory: MemoryTable | None = None
    latency: LatencyTable = field(default_factory=dict)
    schema_version: int = SCHEMA_VERSION

    def to_json(self) -> str:
        """The one way to write this manifest; `digest` covers every other field."""
        table = asdict(self)
        return _text({**table, "digest": digest_of(table)})


def read_manifest(path: Path) -> Manifest:
    """Read and check a manifest file. Raises BundleError."""
    return manifest_from_json(bounded_text(path), path)


def manifest_from_json(text: str, where: Path) -> Manifest:
    """Parse a manifest; refuse another schema version, missing, unknown or ill-typed fields, and any change by hand."""
    table = json_table(text, where)
    found = table.get("schema_version")
    if found != SCHEMA_VERSION:
        raise BundleError(
            f"{where} has schema version {found if isinstance(found, int) else 'none'}, this ostinato reads "
            f"{SCHEMA_VERSION}: build the bundle again"
        )
    _check_digest(table, text, where)
    manifest = record_from(Manifest, table, where)
    if manifest.target not in TARGETS:
        raise BundleError(
            f"{where} is for target {manifest.target!r}, this ostinato knows {', '.join(TARGETS)}: build the bundle "
            "again"
        )
    for path in manifest.files:
        if any(part in ("", ".", "..") for part in path.split("/")) or "\\" in path or not path.isprintable():
            raise BundleError(f"{where} lists the file {path!r}, which is no path inside a bundle: build it again")
    return manifest


def _check_digest(table: dict[str, Any], text: str, where: Path) -> None:
    """The text must be what `to_json` writes, to the last space, under the digest that it carries."""
    if not isinstance(expected := table.get("digest"), str):
        raise BundleError(f"{where} has no digest of its own: build the bundle again")
    try:
        canonical = _text(table)
        del table["digest"]
        found = digest_of(table)
    except RecursionError as error:  # writing takes more of the stack than reading
        raise BundleError(f"{where} does not read as a manifest ({error}): build the bundle again") from None
    if found != expected:
        raise BundleError(
            f"{where} was changed: its content has digest {found}, it says {expected:.80}; build the bundle again"
        )
    if canonical != text:
        raise BundleError(f"{where} was changed: it is not laid out as a build writes it; build the bundle again")


def _text(table: Mapping[str, Any]) -> str:
    return json.dumps(table, indent=1, sort_keys=True) + "\n"


def file_digest(path: Path) -> FileDigest:
    with path.open("rb") as file:
        return FileDigest(hashlib.file_digest(file, "sha256").hexdigest(), path.stat().st_size)


def digest_of(parts: Mapping[str, Any]) -> str:
    """A digest of a JSON-able table, independent of key order."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()
