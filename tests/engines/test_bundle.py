"""Bundles: published whole or not at all, opened whole or not at all."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ostinato.engines.bundle import Bundle, open_bundle, publish, unfinished_bundle
from ostinato.engines.command import main
from ostinato.engines.errors import BundleError
from ostinato.engines.inspect import inspect
from ostinato.engines.memory_table import Latency
from ostinato.engines.program import KernelInfo

from .made import fill, fill_gpu, gpu_manifest_of, make, make_gpu, manifest_of

_BUILD_AND_WAIT = """
import sys, time
from pathlib import Path
from ostinato.engines.bundle import unfinished_bundle
with unfinished_bundle(Path(sys.argv[1])) as folder:
    (folder / "rank0").mkdir()
    (folder / "rank0" / "weights.bin").write_bytes(b"half")
    print("building", flush=True)
    time.sleep(60)
"""


def test_a_published_bundle_opens_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    made = make(tmp_path / "b")
    assert open_bundle(tmp_path / "b").manifest == made.manifest
    assert {path.name for path in tmp_path.iterdir()} == {"b", ".b.lock"}


def _fail_half_way(path: Path) -> None:
    with unfinished_bundle(path) as folder:
        (folder / "rank0").touch()
        fill(folder)  # stumbles over that file


def test_publishing_again_replaces_the_bundle(tmp_path: Path) -> None:
    make(tmp_path / "b")
    make(tmp_path / "b", b"other weights")
    assert (open_bundle(tmp_path / "b").rank_dir() / "weights.bin").read_bytes() == b"other weights"
    assert {path.name for path in tmp_path.iterdir()} == {"b", ".b.lock"}


def test_a_folder_that_is_no_bundle_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "thesis.txt").write_text("mine")
    with pytest.raises(BundleError, match="exists and is no bundle"):
        make(tmp_path / "b")
    assert (tmp_path / "b" / "thesis.txt").read_text() == "mine"


def test_a_taken_place_is_refused_before_anything_is_built(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "file", tmp_path / "folder"):
        with pytest.raises(BundleError, match="exists and is no bundle"), unfinished_bundle(path):
            pytest.fail("nothing may be built")
    assert {path.name for path in tmp_path.iterdir()} == {"file", "folder"}


@pytest.mark.parametrize("place", ["new", "rank0/new", "rank0"])
def test_a_place_in_a_bundle_is_refused_and_leaves_that_whole(tmp_path: Path, place: str) -> None:
    make(tmp_path / "b")
    with (
        pytest.raises(BundleError, match=r"lies inside the bundle|is no bundle"),
        unfinished_bundle(tmp_path / "b" / place),
    ):
        pytest.fail("nothing may be built")
    open_bundle(tmp_path / "b")


def test_a_place_that_can_not_be_written_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(BundleError, match=r"file can't be written to \(.*\): give another --out"),
        unfinished_bundle(tmp_path / "file" / "b"),
    ):
        pytest.fail("nothing may be built")


def test_a_second_builder_is_refused_and_a_killed_one_leaves_nothing_loadable(tmp_path: Path) -> None:
    path = tmp_path / "b"
    command = [sys.executable, "-c", _BUILD_AND_WAIT, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as builder:
        assert builder.stdout is not None
        assert builder.stdout.readline() == "building\n"
        with pytest.raises(BundleError, match=r"another build of .* is running"):
            make(path)
        os.kill(builder.pid, signal.SIGKILL)
        builder.wait()
    with pytest.raises(BundleError, match="no bundle at"):
        open_bundle(path)
    for left in tmp_path.iterdir():
        with pytest.raises(BundleError):
            open_bundle(left)
    make(path)  # the next builder takes over what the killed one left
    open_bundle(path)
    assert {left.name for left in tmp_path.iterdir()} == {"b", ".b.lock"}


def test_a_bundle_set_aside_by_a_killed_build_is_put_back(tmp_path: Path) -> None:
    old = make(tmp_path / "b")
    (tmp_path / "b").rename(tmp_path / ".building-b.old")  # killed between the two renames of a publication
    with unfinished_bundle(tmp_path / "b"):
        assert open_bundle(tmp_path / "b").manifest == old.manifest
    assert {path.name for path in tmp_path.iterdir()} == {"b", ".b.lock"}


def test_a_build_that_fails_leaves_the_old_bundle(tmp_path: Path) -> None:
    old = make(tmp_path / "b")
    with pytest.raises(FileExistsError):
        _fail_half_way(tmp_path / "b")
    assert open_bundle(tmp_path / "b").manifest == old.manifest
    assert {path.name for path in tmp_path.iterdir()} == {"b", ".b.lock"}


def test_damage_is_refused_by_file(tmp_path: Path) -> None:
    weights = make(tmp_path / "b").rank_dir() / "weights.bin"
    sound = weights.read_bytes()
    weights.write_bytes(sound[:350] + bytes([sound[350] ^ 1]) + sound[351:])
    with pytest.raises(BundleError, match=r"weights\.bin has digest"):
        open_bundle(tmp_path / "b")
    weights.write_bytes(sound[:-1])
    with pytest.raises(BundleError, match=r"weights\.bin has 699 bytes, the manifest says 700"):
        open_bundle(tmp_path / "b", verify_digests=False)
    weights.unlink()
    with pytest.raises(BundleError, match=r"weights\.bin is missing"):
        open_bundle(tmp_path / "b")
    weights.write_bytes(sound)
    open_bundle(tmp_path / "b")


def test_a_bundle_for_another_machine_is_refused(tmp_path: Path) -> None:
    with unfinished_bundle(tmp_path / "b") as folder:
        fill(folder)
        publish(folder, tmp_path / "b", manifest_of(folder, machine="pdp11"))
    with pytest.raises(BundleError, match="built for pdp11"):
        open_bundle(tmp_path / "b")


def test_a_bundle_without_a_manifest_is_refused(tmp_path: Path) -> None:
    make(tmp_path / "b")
    (tmp_path / "b" / "manifest.json").unlink()
    with pytest.raises(BundleError, match="no finished bundle"):
        open_bundle(tmp_path / "b")


def test_inspect_prints_a_table_or_the_manifest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = make(tmp_path / "b")
    assert inspect([str(bundle.path), "--json"]) == 0
    assert capsys.readouterr().out == bundle.manifest.to_json()
    assert inspect([str(bundle.path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split() == ["name", "made"] for line in lines)
    assert any("window 8" in line for line in lines)
    assert any("a note" in line for line in lines)


def test_a_name_that_no_disk_takes_is_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "b" * 300]) == 2
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1
    assert printed.startswith("ostinato inspect: ")


def told(capsys: pytest.CaptureFixture[str], bundle: Bundle, *options: str) -> dict[str, str]:
    assert inspect([str(bundle.path), *options]) == 0
    rows = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines())
    return {key.strip(): " ".join(value.split()) for key, value in rows.items()}


def test_inspect_is_short_unless_asked_for_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    latency = {key: Latency(1.25, None, "roofline of l4") for key in ("decode 8", "decode 16", "decode 2", "prefill 4")}
    bundle = make_gpu(tmp_path / "g", latency=latency)
    short, full = told(capsys, bundle), told(capsys, bundle, "--full")
    steps = [key.removeprefix("latency, ") for key in short if key.startswith("latency")]
    assert steps == ["decode 2", "decode 16", "prefill 4"]
    assert short["rank 1"] == "2 engines, 960 bytes, built by TensorRT 1.7.1.116; 1 kernels for sm_86"
    assert short["files"].startswith(f"{len(bundle.manifest.files)}, ")
    assert not [key for key in short if "/" in key or key.startswith("rank 0,")]
    assert {*short, *bundle.manifest.files, *(f"latency, {key}" for key in latency)} <= {*full, "files"}


def test_inspect_names_kernels_that_spill(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with unfinished_bundle(tmp_path / "g") as folder:
        fill_gpu(folder, KernelInfo("attend", 4, 1024, 2, 255, 16))
        bundle = publish(folder, tmp_path / "g", gpu_manifest_of(folder))
    assert told(capsys, bundle)["rank 0, spilling"] == "attend_0"


def test_inspect_tells_of_ranks_engines_and_kernels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = make_gpu(tmp_path / "g")
    assert inspect([str(bundle.path), "--json"]) == 0
    assert capsys.readouterr().out == bundle.manifest.to_json()
    found = told(capsys, bundle, "--full")
    for key, value in {
        "compute capabilities": "8.6, 8.9",
        "ranks": "2: tensor-parallel 2, pipeline stages 1",
        "TensorRT options": "all defaults",
        "weights": "float16, 700 bytes",
        "memory, KV pool": "132.0 KiB",  # 33 blocks of 4096 bytes
        "latency, decode 1": "predicted 1.250 ms, not measured (roofline of l4)",
        "rank 1": "2 engines, 960 bytes, built by TensorRT 1.7.1.116",
        "rank 1, segment_00.engine … segment_01.engine": "2 of this form, 960 bytes, 1.0 MiB of device memory",
        "rank 1, operators": "4 Gemm, 2 RMSNormalization",
        "rank 1, inputs": "hidden float16[T, 64]",
        "rank 1, outputs": "hidden.out float16[T, 64]",
        "rank 1, profile decode": "hidden 1x64/4x64/4x64",
        "rank 1, program": "calls: 2 engine, 1 kernel, 1 collective; step shapes: decode-1",
        "rank 1, sm_86": "1 kernels, none with spills",
        "rank 1, sm_86 attend_0": "96 registers, 1024 bytes shared, 0 bytes spilled, 4 warps",
    }.items():
        assert found[key] == value
    (bundle.path / "rank1" / "program.json").write_text("{}")
    with pytest.raises(BundleError, match=r"rank1/program\.json has 2 bytes"):
        inspect([str(bundle.path)])
