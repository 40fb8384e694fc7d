"""A bundle runs where all of its parts run; elsewhere it says what was found, what is wanted and what to do."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ostinato.engines.errors import BundleError
from ostinato.engines.fit import Machine, check_fit, kernels_run
from ostinato.engines.manifest import Manifest
from ostinato.engines.processor import KERNEL_NEEDS
from ostinato.engines.tensorrt_options import TensorRTOptions

from .made import fill, fill_gpu, fill_x86, gpu_manifest_of, manifest_of, x86_manifest_of

MACHINE = Machine(
    architecture="x86_64",
    plugin_digest="ab" * 32,
    compute_capability="8.9",
    gpu_name="NVIDIA L4",
    driver_version="580.65.06",
    tensorrt_version="1.7.1.116",
)


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    fill_gpu(tmp_path)
    return dataclasses.replace(gpu_manifest_of(tmp_path), hardware={"machine": "x86_64"})


def test_it_fits_where_everything_does(manifest: Manifest) -> None:
    check_fit(manifest, MACHINE)
    check_fit(manifest, dataclasses.replace(MACHINE, driver_version="581.0", compute_capability="8.6"))


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"architecture": "aarch64"}, "built for x86_64, this machine is aarch64: build it here"),
        ({"driver_version": None}, "no NVIDIA driver: run it on a GPU of compute capability 8.6 or 8.9, or build for"),
        ({"compute_capability": None}, "this machine has no NVIDIA GPU"),
        ({"driver_version": "575.57.08"}, "driver is 575.57.08, CUDA 13 needs 580 or later: install a newer driver"),
        ({"driver_version": "many"}, "'many' is no version"),
        (
            {"compute_capability": "9.0"},
            "NVIDIA L4 has compute capability 9.0, the bundle was built for 8.6, 8.9: build",
        ),
        ({"compute_capability": "8.0"}, "has compute capability 8.0, the bundle was built for 8.6, 8.9: build"),
        ({"tensorrt_version": None}, r"TensorRT-RTX is not installed, .* 1.7.1.116: install ostinato\[rtx\]"),
        ({"tensorrt_version": "1.7.2.1"}, "TensorRT-RTX here is 1.7.2.1, the engines need 1.7.1.116: install that"),
        ({"tensorrt_version": "1.6.1.116"}, "TensorRT-RTX here is 1.6.1.116, the engines need 1.7.1.116"),
        ({"plugin_digest": "cd" * 32}, f"have digest {'cd' * 8}, the bundle was built with {'ab' * 8}: build it again"),
    ],
)
def test_another_machine_is_refused(manifest: Manifest, changes: Mapping[str, Any], wanted: str) -> None:
    with pytest.raises(BundleError, match=wanted):
        check_fit(manifest, dataclasses.replace(MACHINE, **changes))


X86 = Machine(
    "x86_64", "", system="Linux", cpu_flags=frozenset(KERNEL_NEEDS["cpu_flags"].split()) | {"fpu", "amx_int8"}
)


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"architecture": "aarch64"}, "built for x86_64, this machine is aarch64"),
        (
            {"system": "Darwin"},
            "target x86, this machine is Darwin, wanted is Linux: build with a recipe of target cpu",
        ),
        (
            {"cpu_flags": frozenset({"avx2", "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"})},
            "this machine lacks avx512_vnni: build with a recipe of target cpu",
        ),
        ({"cpu_flags": frozenset()}, "lacks avx512f, avx512bw, avx512cd, avx512dq, avx512vl, avx512_vnni: build"),
    ],
)
def test_kernels_in_c_want_their_instructions(tmp_path: Path, changes: Mapping[str, Any], wanted: str) -> None:
    fill_x86(tmp_path)
    manifest = x86_manifest_of(tmp_path)
    check_fit(manifest, X86)
    with pytest.raises(BundleError, match=wanted):
        check_fit(manifest, dataclasses.replace(X86, **changes))


def test_a_bundle_without_its_kernels_is_refused(tmp_path: Path) -> None:
    fill_x86(tmp_path)
    (tmp_path / "rank0" / "kernels.so").unlink()
    with pytest.raises(BundleError, match=r"has no rank0/kernels\.so: build it again"):
        check_fit(x86_manifest_of(tmp_path), X86)


def test_a_cpu_bundle_asks_for_no_instructions(tmp_path: Path) -> None:
    fill(tmp_path)
    check_fit(manifest_of(tmp_path, "x86_64"), dataclasses.replace(X86, cpu_flags=frozenset(), system="Darwin"))


def test_another_build_of_the_same_release_fits(manifest: Manifest) -> None:
    check_fit(manifest, dataclasses.replace(MACHINE, tensorrt_version="1.7.1.9"))


def test_kernels_for_an_older_gpu_of_the_family_do_not_save_the_engines(manifest: Manifest) -> None:
    older = dataclasses.replace(manifest, compute_capabilities=("8.0",))
    with pytest.raises(BundleError, match=r"built for 8\.0 \(the kernels would run, the engines would not\)"):
        check_fit(older, MACHINE)


def test_trt_engines_go_further_only_where_they_were_built_to(manifest: Manifest) -> None:
    trt = dataclasses.replace(manifest, target="trt", compute_capabilities=("8.0",))
    portable = dataclasses.replace(trt, tensorrt=TensorRTOptions(hardware_compatibility="ampere_plus"))
    check_fit(portable, MACHINE)
    with pytest.raises(BundleError, match=r"compute capability 9\.0, the bundle was built for 8\.0: build"):
        check_fit(portable, dataclasses.replace(MACHINE, compute_capability="9.0"))  # there are no kernels for it
    with pytest.raises(BundleError, match="the engines would not"):
        check_fit(trt, MACHINE)


@pytest.mark.parametrize(("found", "fits"), [("1.7.2.0", True), ("1.9", True), ("1.6.0.0", False), ("2.0.0", False)])
def test_version_compatible_engines_take_later_releases_of_their_major(
    manifest: Manifest, found: str, fits: bool
) -> None:
    trt = dataclasses.replace(manifest, target="trt", tensorrt=TensorRTOptions(version_compatible=True))
    machine = dataclasses.replace(MACHINE, tensorrt_version=found)
    if fits:
        check_fit(trt, machine)
    else:
        with pytest.raises(BundleError, match=r"the engines need 1\.7\.1\.116 or a later 1\.x"):
            check_fit(trt, machine)
    with pytest.raises(BundleError, match="TensorRT-RTX here is"):
        check_fit(dataclasses.replace(trt, target="rtx"), machine)  # that library has no such engines


def test_missing_ranks_and_parts_are_named(manifest: Manifest) -> None:
    with pytest.raises(BundleError, match="engines of 1 ranks, it needs those of 2"):
        check_fit(dataclasses.replace(manifest, engines=manifest.engines[:1]), MACHINE)
    for name in ("rank1/program.json", "rank1/segment_01.engine"):
        files = {path: file for path, file in manifest.files.items() if path != name}
        with pytest.raises(BundleError, match=f"has no {name}"):
            check_fit(dataclasses.replace(manifest, files=files), MACHINE)


def test_a_cpu_bundle_needs_no_gpu(tmp_path: Path) -> None:
    fill(tmp_path)
    check_fit(manifest_of(tmp_path, machine="x86_64"), Machine("x86_64", plugin_digest=""))


@pytest.mark.parametrize(
    ("built_for", "found", "runs"),
    [
        ("8.6", "8.6", True), ("8.0", "8.6", True), ("8.6", "8.9", True), ("8.9", "8.6", False), ("8.6", "9.0", False),
        ("8.6", "8.7", False), ("8.7", "8.9", False), ("8.0", "8.7", False),  # Jetson and desktop do not mix
        ("9.0", "10.0", False), ("12.0", "12.1", True), ("12.1", "12.0", True), ("10.0", "10.3", False),
    ],
)  # fmt: skip
def test_where_kernels_run(built_for: str, found: str, runs: bool) -> None:
    assert kernels_run(built_for, found) == runs
