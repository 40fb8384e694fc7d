"""A bundle as flat tables of facts, by kind: what `ostinato diff` compares and a lock file pins (once per call)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict

from .bundle import Bundle
from .decoder_record import FILE_NAME as DECODER
from .decoder_record import KERNEL_FILE
from .manifest import Manifest
from .targets import GPU_TARGETS, TARGETS

KINDS = (
    "target", "model", "graph", "precision", "size", "limits", "kernels", "memory", "latency", "toolchain", "notes",
)  # fmt: skip
Fact = str | int | float


def bundle_facts(bundle: Bundle) -> Mapping[str, Mapping[str, Fact]]:
    """Kind → what → value, for every kind of KINDS. Raises BundleError if a rank's program does not read."""
    manifest = bundle.manifest
    tables: Mapping[str, Mapping[str, Fact]] = {
        "target": dict(_target(manifest)),
        "model": dict(_model(manifest)),
        "graph": graph_facts(manifest),
        "precision": dict(_precision(bundle)),
        "size": dict(_sizes(manifest)),
        "limits": dict(_limits(manifest)),
        "kernels": dict(_kernels(bundle)),
        "memory": dict(_memory(manifest)),
        "latency": dict(_latency(manifest)),
        "toolchain": dict(_toolchain(manifest)),
        "notes": dict.fromkeys(manifest.notes, "noted"),
    }
    assert tuple(tables) == KINDS
    return tables


def graph_facts(manifest: Manifest) -> Mapping[str, Fact]:
    """Counts of operators by rank, the graph's digest by engine, the digest of every ONNX file and decoder record."""
    facts: dict[str, Fact] = {}
    for rank, engines in enumerate(manifest.engines):
        counts = Counter[str]()
        for engine in engines:
            counts.update(engine.operators)
            facts[f"rank{rank}/{engine.file} graph"] = engine.graph_digest or "not kept"
        facts |= {f"rank{rank} {operator}": count for operator, count in sorted(counts.items())}
    graphs = (".onnx", f"/{DECODER}")
    return facts | {name: file.sha256 for name, file in sorted(manifest.files.items()) if name.endswith(graphs)}


def _target(manifest: Manifest) -> Iterator[tuple[str, Fact]]:
    yield "target", manifest.target
    yield "compute_capabilities", ", ".join(manifest.compute_capabilities)
    yield from manifest.hardware.items()
    yield from asdict(manifest.shards).items()
    yield from ((f"tensorrt.{key}", str(value)) for key, value in asdict(manifest.tensorrt).items())


def _model(manifest: Manifest) -> Iterator[tuple[str, Fact]]:
    yield from asdict(manifest.sizes).items()
    yield "eos_ids", ", ".join(map(str, manifest.eos_ids))
    yield "bos_id", str(manifest.bos_id)
    for name, file in manifest.files.items():
        if name.startswith("tokenizer/"):
            yield name, file.sha256


def _precision(bundle: Bundle) -> Iterator[tuple[str, Fact]]:
    manifest = bundle.manifest
    yield "weights", manifest.weights
    yield "kv_cache", manifest.kv_cache
    for rank, engines in enumerate(manifest.engines):
        for engine in engines:
            dtypes = " ".join(tensor.dtype for tensor in (*engine.inputs, *engine.outputs))
            yield f"rank{rank}/{engine.file} tensors", dtypes
    if TARGETS[manifest.target].has_decoder:
        for bits, count in Counter(matrix.bits for matrix in bundle.decoder().matrices()).items():
            yield f"matrices of {bits} bits", count


def _sizes(manifest: Manifest) -> Iterator[tuple[str, Fact]]:
    yield "weights", manifest.weight_bytes
    yield "bundle", sum(file.size_bytes for file in manifest.files.values())
    for rank in range(manifest.shards.num_ranks):
        files = [file for name, file in manifest.files.items() if name.startswith(f"rank{rank}/")]
        yield f"rank{rank}", sum(file.size_bytes for file in files)


def _limits(manifest: Manifest) -> Iterator[tuple[str, Fact]]:
    for key, value in asdict(manifest.limits).items():
        yield key, " ".join(map(str, value)) if isinstance(value, tuple) else value
    for rank, engines in enumerate(manifest.engines):
        for engine in engines:
            for profile in engine.profiles:
                yield f"rank{rank}/{engine.file} {profile.name}", profile.told()


def _kernels(bundle: Bundle) -> Iterator[tuple[str, Fact]]:
    yield from ((name, file.sha256) for name, file in bundle.manifest.files.items() if name.endswith(f"/{KERNEL_FILE}"))
    if bundle.manifest.target not in GPU_TARGETS:
        return
    yield "plugins", bundle.manifest.plugin_digest
    for rank in range(bundle.manifest.shards.num_ranks):
        for architecture, kernels in bundle.program(rank).kernels.items():
            for name, kernel in kernels.items():
                for key in ("registers", "shared_bytes", "spill_bytes"):
                    yield f"rank{rank} {architecture} {name} {key}", getattr(kernel, key)


def _memory(manifest: Manifest) -> Iterator[tuple[str, Fact]]:
    yield "kv_bytes_per_block", manifest.kv_bytes_per_block
    if (memory := manifest.memory) is not None:
        for key, value in asdict(memory).items():
            if isinstance(value, dict):
                yield from ((f"{key} {shape}", count) for shape, count in value.items())
            else:
                yield f"rank {key}", value
        yield "rank total_bytes", memory.total_bytes


def _latency(manifest: Manifest) -> Iterator[tuple[str, Fact]]:
    """Measured where it was, else predicted; a table of each kind would hide that they can't be compared."""
    for key, latency in manifest.latency.items():
        measured = latency.measured_ms
        yield (
            f"{key} {'predicted' if measured is None else 'measured'}",
            latency.predicted_ms if measured is None else measured,
        )


def _toolchain(manifest: Manifest) -> Iterator[tuple[str, Fact]]:
    yield from manifest.toolchain.items()
    for rank, engines in enumerate(manifest.engines):
        yield f"rank{rank} engines", ", ".join(sorted({engine.version for engine in engines}))
