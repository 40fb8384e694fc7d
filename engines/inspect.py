"""`ostinato inspect`: what a bundle is and whether it would open here, as a plain table or as JSON (once per call)."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from .bundle import open_bundle
from .manifest import Manifest

_MIB = 2**20


def inspect(argv: list[str]) -> int:
    """`ostinato inspect BUNDLE [--json]`; a bundle that is damaged or made for another machine is refused."""
    parser = argparse.ArgumentParser(prog="ostinato inspect", description="Show what a bundle is; checks every file.")
    parser.add_argument("bundle", type=Path, metavar="BUNDLE")
    parser.add_argument("--json", action="store_true", help="print the manifest as it is")
    arguments = parser.parse_args(argv)
    manifest = open_bundle(arguments.bundle).manifest
    print(manifest.to_json() if arguments.json else describe(manifest), end="")
    return 0


def describe(manifest: Manifest) -> str:
    """The manifest as lines of `key  value`."""
    sizes, limits = manifest.sizes, manifest.limits
    pool_bytes = manifest.kv_bytes_per_block * limits.num_blocks
    window = f", window {sizes.sliding_window}" if sizes.sliding_window else ""
    rows = [
        ("name", manifest.name),
        ("identity", manifest.identity),
        ("target", f"{manifest.target}; needs {_pairs(manifest.hardware)}"),
        ("model", f"{sizes.architecture}, {sizes.num_layers} layers, hidden {sizes.hidden_size}{window}"),
        ("heads", f"{sizes.num_q_heads} query, {sizes.num_kv_heads} key-value, size {sizes.head_size}"),
        ("vocabulary", f"{sizes.vocab_size}; ends with {', '.join(map(str, manifest.eos_ids))}"),
        ("weights", f"{manifest.weights}, {manifest.weight_bytes / _MIB:.1f} MiB"),
        ("KV cache", f"{manifest.kv_cache}, {pool_bytes / _MIB:.1f} MiB in {limits.num_blocks} blocks"),
        ("limits", f"{limits.max_rows} rows and {limits.max_step_tokens} tokens a step"),
        ("context", f"{limits.max_context} tokens a request, {limits.kv_tokens} in the pool"),
        ("row buckets", " ".join(map(str, limits.row_buckets))),
        ("token buckets", " ".join(map(str, limits.token_buckets))),
        ("toolchain", _pairs(manifest.toolchain)),
        *(("note", note) for note in manifest.notes),
        *((path, f"{file.size_bytes} bytes, {file.sha256[:16]}") for path, file in sorted(manifest.files.items())),
    ]
    width = max(len(key) for key, _ in rows)
    return "".join(f"{key:<{width}}  {value}\n" for key, value in rows)


def _pairs(table: Mapping[str, str]) -> str:
    return ", ".join(f"{key} {value}" for key, value in sorted(table.items())) or "nothing"
