"""`ostinato inspect`: what a bundle is and whether it would open here, in short, in full or as JSON (once per call)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from itertools import groupby
from pathlib import Path

from .argument_parser import ArgumentParser
from .bundle import Bundle, open_bundle
from .decoder_record import DecoderRecord
from .inspect_engines import engine_rows, size_text
from .manifest import Manifest
from .natural_order import natural_order
from .targets import GPU_TARGETS, TARGETS
from .tensorrt_options import PLAIN

Row = tuple[str, str]


def inspect(argv: list[str]) -> int:
    """`ostinato inspect BUNDLE [--full | --json]`; a bundle that is damaged or made for another machine is refused."""
    parser = ArgumentParser(prog="ostinato inspect", description="Check every file of a bundle, and show what it is.")
    parser.add_argument("bundle", type=Path, metavar="BUNDLE", help="a bundle's folder, such as engines/store/NAME")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--full", action="store_true", help="tell of every step, engine, kernel and file, too")
    form.add_argument("--json", action="store_true", help="print the manifest as it is")
    arguments = parser.parse_args(argv)
    bundle = open_bundle(arguments.bundle)
    print(bundle.manifest.to_json() if arguments.json else describe(bundle, arguments.full), end="")
    return 0


def describe(bundle: Bundle, full: bool = False) -> str:
    """The bundle as lines of `key  value`. Raises BundleError if a rank's program does not read."""
    manifest = bundle.manifest
    rows = [
        *_model_rows(manifest),
        *(_gpu_rows(manifest) if manifest.target in GPU_TARGETS else ()),
        *(_decoder_rows(bundle.decoder()) if TARGETS[manifest.target].has_decoder else ()),
        *_memory_rows(manifest, full),
        *_latency_rows(manifest, full),
        ("toolchain", _pairs(manifest.toolchain)),
        *(("note", note) for note in manifest.notes),
        *engine_rows(bundle, full),
        *_file_rows(manifest, full),
    ]
    width = max(len(key) for key, _ in rows)
    return "".join(f"{key:<{width}}  {value}".rstrip() + "\n" for key, value in rows)


def _model_rows(manifest: Manifest) -> Iterator[Row]:
    sizes, limits = manifest.sizes, manifest.limits
    pool_bytes = manifest.kv_bytes_per_block * limits.num_blocks
    window = f", window {sizes.sliding_window}" if sizes.sliding_window else ""
    yield "name", manifest.name
    yield "identity", manifest.identity
    yield "target", f"{manifest.target}; needs {_pairs(manifest.hardware)}"
    yield "model", f"{sizes.architecture}, {sizes.num_layers} layers, hidden {sizes.hidden_size}{window}"
    yield "heads", f"{sizes.num_q_heads} query, {sizes.num_kv_heads} key-value, size {sizes.head_size}"
    yield "vocabulary", f"{sizes.vocab_size}; ends with {', '.join(map(str, manifest.eos_ids))}"
    yield "weights", f"{manifest.weights}, {size_text(manifest.weight_bytes)}"
    yield "KV cache", f"{manifest.kv_cache}, {size_text(pool_bytes)} in {limits.num_blocks} blocks"
    yield "limits", f"{limits.max_rows} rows and {limits.max_step_tokens} tokens a step"
    yield "context", f"{limits.max_context} tokens a request, {limits.kv_tokens} in the pool"
    yield "row buckets", " ".join(map(str, limits.row_buckets))
    yield "token buckets", " ".join(map(str, limits.token_buckets))


def _gpu_rows(manifest: Manifest) -> Iterator[Row]:
    shards, plain = manifest.shards, asdict(PLAIN)
    chosen = {key: str(value) for key, value in asdict(manifest.tensorrt).items() if value != plain[key]}
    yield "compute capabilities", ", ".join(manifest.compute_capabilities)
    yield (
        "ranks",
        f"{shards.num_ranks}: tensor-parallel {shards.tensor_parallel}, pipeline stages {shards.pipeline_parallel}",
    )
    yield "TensorRT options", _pairs(chosen) if chosen else "all defaults"
    yield "plugins", f"digest {manifest.plugin_digest}"


def _decoder_rows(decoder: DecoderRecord) -> Iterator[Row]:
    counts = Counter(matrix.bits for matrix in decoder.matrices())
    yield "matrices", ", ".join(f"{count} of {bits} bits" for bits, count in sorted(counts.items()))
    yield "rope tables", f"{decoder.rope_rows} positions"


def _memory_rows(manifest: Manifest, full: bool) -> Iterator[Row]:
    """Bytes of the rank that takes most, by step shape or of the step that takes most."""
    if (memory := manifest.memory) is None:
        return
    steps = sorted(memory.activation_bytes.items(), key=lambda item: natural_order(item[0]))
    if not full:
        steps = sorted(steps, key=lambda item: item[1])[-1:]
    for key, num_bytes in (
        ("weights", memory.weight_bytes),
        ("KV block", memory.kv_bytes_per_block),
        ("KV pool", memory.kv_bytes_per_block * memory.num_blocks),
        ("state", memory.state_bytes),
        ("scratch", memory.scratch_bytes),
        *((f"step {key}", count) for key, count in steps),
        ("graphs, reserved", memory.graph_reserve_bytes),
        ("total", memory.total_bytes),
    ):
        yield f"memory, {key}", size_text(num_bytes)


def _latency_rows(manifest: Manifest, full: bool) -> Iterator[Row]:
    """Of each step shape, or of the smallest and the largest of each kind."""
    keys = sorted(manifest.latency, key=natural_order)
    if not full:
        kinds = [list(group) for _, group in groupby(keys, key=lambda key: key.split()[0])]
        keys = list(dict.fromkeys(key for kind in kinds for key in (kind[0], kind[-1])))
    for key in keys:
        latency = manifest.latency[key]
        measured = "not measured" if latency.measured_ms is None else f"measured {latency.measured_ms:.3f} ms"
        yield f"latency, {key}", f"predicted {latency.predicted_ms:.3f} ms, {measured} ({latency.basis})"


def _file_rows(manifest: Manifest, full: bool) -> Iterator[Row]:
    files = sorted(manifest.files.items())
    if full:
        yield from ((path, f"{file.size_bytes} bytes, {file.sha256[:16]}") for path, file in files)
    else:
        size = size_text(sum(file.size_bytes for _, file in files))
        yield "files", f"{len(files)}, {size}, all whole (--full names each)"


def _pairs(table: Mapping[str, str]) -> str:
    return ", ".join(f"{key} {value}" for key, value in sorted(table.items())) or "nothing"
