"""Manifests and unfinished bundles with nothing real in them, one for the CPU and one for GPUs with two ranks."""

from __future__ import annotations

import dataclasses
import json
import platform
from pathlib import Path
from typing import Any

from ostinato.engines.bundle import Bundle, list_files, publish, unfinished_bundle
from ostinato.engines.decoder_record import LAYOUT_VERSION, Bits, DecoderLayer, DecoderRecord, Matrix
from ostinato.engines.engine_record import EngineInfo, EngineProfile, EngineTensor
from ostinato.engines.manifest import Manifest, digest_of
from ostinato.engines.memory_table import Latency, MemoryTable
from ostinato.engines.processor import KERNEL_NEEDS
from ostinato.engines.program import (
    Buffer,
    CollectiveCall,
    EngineCall,
    KernelCall,
    KernelInfo,
    KernelLaunch,
    Program,
    StepShape,
)
from ostinato.engines.shards import Shards
from ostinato.engines.sizes import Limits, ModelSizes

SIZES = ModelSizes("llama", 320, 64, 96, 2, 4, 2, 16, 128, sliding_window=8)
KERNEL = KernelInfo("attend", 4, 1024, 2, 96, 0)
_BITS: tuple[Bits, ...] = (4, 4, 8, 4)  # of a layer's matrices
LIMITS = Limits(8, 4, 64, 96, 256, (1, 2, 4), (1, 4, 16, 64))


def fill(folder: Path, content: bytes = b"weights" * 100) -> None:
    (folder / "rank0").mkdir()
    (folder / "rank0" / "weights.bin").write_bytes(content)
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "tokenizer.json").write_text("{}")


def manifest_of(folder: Path, machine: str = platform.machine()) -> Manifest:
    return Manifest(
        name="made",
        target="cpu",
        identity="0123456789abcdef",
        hardware={"machine": machine},
        weights="int8",
        kv_cache="float32",
        sizes=SIZES,
        limits=LIMITS,
        eos_ids=(256, 257),
        bos_id=None,
        weight_bytes=700,
        kv_bytes_per_block=4096,
        toolchain={"numpy": "2"},
        notes=("a note",),
        files=list_files(folder),
    )


def make(path: Path, content: bytes = b"weights" * 100) -> Bundle:
    """A published bundle for the CPU."""
    with unfinished_bundle(path) as folder:
        fill(folder, content)
        return publish(folder, path, manifest_of(folder))


def make_gpu(path: Path, **changes: Any) -> Bundle:
    """A published bundle for GPUs; `changes` replace fields of its manifest."""
    with unfinished_bundle(path) as folder:
        fill_gpu(folder)
        return publish(folder, path, dataclasses.replace(gpu_manifest_of(folder), **changes))


def fill_x86(folder: Path) -> None:
    """The files of target x86: of one layer, whose matrices lie anywhere in the file."""
    fill(folder, bytes(range(256)) * 8)
    matrices = [Matrix(bits, 96, 64, 64 * place, None) for place, bits in enumerate(_BITS)]
    record = DecoderRecord(
        layout_version=LAYOUT_VERSION,
        rms_eps=1e-5,
        rope_rows=96,
        rope_cos=0,
        rope_sin=64,
        embedding=Matrix(8, 320, 64, 128, None),
        layers=(DecoderLayer(0, 64, None, None, *matrices),),
        final_norm=192,
        head=None,
        weight_bytes=2048,
    )
    (folder / "rank0" / "decoder.json").write_text(record.to_json())
    (folder / "rank0" / "kernels.so").write_bytes(b"\x7fELF" + bytes(60))


def x86_manifest_of(folder: Path) -> Manifest:
    return dataclasses.replace(
        manifest_of(folder), target="x86", kv_cache="int8", hardware=dict(KERNEL_NEEDS), weight_bytes=2048
    )


def make_x86(path: Path, **changes: Any) -> Bundle:
    """A published bundle for target x86; `changes` replace fields of its manifest."""
    with unfinished_bundle(path) as folder:
        fill_x86(folder)
        return publish(folder, path, dataclasses.replace(x86_manifest_of(folder), **changes))


def fill_gpu(folder: Path, kernel: KernelInfo = KERNEL) -> None:
    """Two ranks of two segments and a kernel each; no two files of a kind have the same bytes."""
    fill(folder)
    (folder / "rank1").mkdir()
    for rank in range(2):
        (folder / f"rank{rank}" / "weights.bin").write_bytes(bytes([rank]) * 64)
        for segment in range(2):
            engine = f"segment {segment} of rank {rank} ".encode() * 20
            (folder / f"rank{rank}" / f"segment_{segment:02}.engine").write_bytes(engine)
        (folder / f"rank{rank}" / "graphs").mkdir()
        (folder / f"rank{rank}" / "graphs" / "segment_00.onnx").write_bytes(f"graph of rank {rank}".encode() * 20)
        kernels = folder / f"rank{rank}" / "kernels" / "sm_86"
        kernels.mkdir(parents=True)
        (kernels / "attend_0.cubin").write_bytes(b"\x7fELF" + bytes([rank]) * 60)
        (folder / f"rank{rank}" / "program.json").write_text(program_of(rank, kernel).to_json())


def program_of(rank: int, kernel: KernelInfo) -> Program:
    shape = StepShape("decode", 1, 1)
    return Program(
        buffers=(Buffer("hidden", "float16", ("T", 64), "cut"), Buffer(f"logits_{rank}", "float32", ("S", 320), "cut")),
        calls=(
            EngineCall("segment_00", "segment_00.engine", {"x": "input_ids"}, {"y": "hidden"}),
            KernelCall("attention_00", "PagedAttention", {"q": "hidden"}),
            CollectiveCall("reduce_00", "AllReduce", "hidden", "hidden"),
            EngineCall("segment_01", "segment_01.engine", {"x": "hidden"}, {"y": f"logits_{rank}"}),
        ),
        step_shapes=(shape,),
        launches={"PagedAttention": {shape.key: (KernelLaunch("attend_0", (1, 2, 1), ("q",)),)}},
        kernels={"sm_86": {"attend_0": kernel}},
    )


def engines_of(rank: int) -> tuple[EngineInfo, ...]:
    hidden = EngineTensor("hidden", "float16", ("T", 64))
    return tuple(
        EngineInfo(
            file=f"segment_{segment:02}.engine",
            size_bytes=480,
            inputs=(hidden,),
            outputs=(dataclasses.replace(hidden, name="hidden.out"),),
            profiles=(EngineProfile("decode", {"hidden": ((1, 64), (4, 64), (4, 64))}),),
            version="1.7.1.116",
            validity="8.6 8.9",
            device_memory_bytes=2**20,
            operators={"Gemm": 4, "RMSNormalization": 2},
            graph_digest=f"{rank}{segment}" * 32,
        )
        for segment in range(2)
    )


def gpu_manifest_of(folder: Path) -> Manifest:
    return dataclasses.replace(
        manifest_of(folder),
        target="rtx",
        weights="float16",
        kv_cache="float16",
        compute_capabilities=("8.6", "8.9"),
        shards=Shards(tensor_parallel=2),
        plugin_digest="ab" * 32,
        engines=(engines_of(0), engines_of(1)),
        memory=MemoryTable(700, 4096, 64, 32, {"decode 1": 512}, 1024, 33),
        latency={"decode 1": Latency(1.25, None, "roofline of l4")},
    )


def sealed(table: dict[str, Any]) -> str:
    """A manifest as a stranger would forge it: any content, under a digest that fits."""
    content = {key: value for key, value in table.items() if key != "digest"}
    return json.dumps({**content, "digest": digest_of(content)}, indent=1, sort_keys=True) + "\n"
