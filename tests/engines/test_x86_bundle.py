"""What a bundle of target x86 tells of itself, and the record of where its weights lie."""

from __future__ import annotations

import dataclasses
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ostinato.engines.bundle import Bundle, publish, unfinished_bundle
from ostinato.engines.decoder_record import DecoderRecord, read_decoder
from ostinato.engines.diff import diff
from ostinato.engines.difference import differences_of
from ostinato.engines.errors import BundleError
from ostinato.engines.inspect import describe
from ostinato.engines.manifest import FILE_NAME, read_manifest
from ostinato.engines.processor import KERNEL_NEEDS, find_cpu_flags, why_no_kernels, why_unfit

from .made import fill_x86, make_x86, x86_manifest_of

FLAGS = KERNEL_NEEDS["cpu_flags"].split()
ROOT = Path(__file__).parents[2]


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    return make_x86(tmp_path / "a")


@pytest.fixture
def record(bundle: Bundle) -> DecoderRecord:
    return bundle.decoder()


def test_inspect_tells_what_it_needs_and_how_its_weights_are_kept(bundle: Bundle) -> None:
    lines = {line.split("  ")[0]: " ".join(line.split()[1:]) for line in describe(bundle).splitlines()}
    assert lines["target"].startswith("x86; needs cpu_flags avx512f avx512bw")
    assert lines["target"].endswith("machine x86_64, system Linux")
    assert lines["matrices"] == "3 of 4 bits, 2 of 8 bits"
    assert "compute capabilities" not in lines


def test_other_kernels_and_another_record_are_differences_of_their_kinds(tmp_path: Path, bundle: Bundle) -> None:
    with unfinished_bundle(tmp_path / "b") as folder:
        fill_x86(folder)
        (folder / "rank0" / "kernels.so").write_bytes(b"\x7fELF" + bytes([1] * 60))
        other = dataclasses.replace(bundle.decoder(), rms_eps=1e-6)
        (folder / "rank0" / "decoder.json").write_text(other.to_json())
        publish(folder, tmp_path / "b", x86_manifest_of(folder))
    found = differences_of(bundle, Bundle(tmp_path / "b", read_manifest(tmp_path / "b" / FILE_NAME)))
    assert {(one.kind, one.what) for one in found} >= {
        ("kernels", "rank0/kernels.so"), ("graph", "rank0/decoder.json"),
    }  # fmt: skip
    assert diff([str(bundle.path), str(tmp_path / "b"), "--fail-on", "kernels"]) == 1
    assert diff([str(bundle.path), str(bundle.path), "--fail-on", "kernels,graph,precision"]) == 0


def test_a_record_reads_as_it_was_written(tmp_path: Path, record: DecoderRecord) -> None:
    (tmp_path / "decoder.json").write_text(record.to_json())
    assert read_decoder(tmp_path) == record


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"final_norm": 65}, "offset 65 is no multiple of 64"),
        ({"final_norm": 2048}, "offset 2048 is no multiple of 64 below the 2048 bytes of weights.bin"),
        ({"rope_cos": -64}, "offset -64"),
        ({"rms_eps": "small"}, "rms_eps is 'small', wanted float"),
        ({"head": {"bits": 5, "rows": 1, "columns": 32, "tiles": 0, "bias": None}}, "head.bits is 5"),
        ({"head": {"bits": 4.0, "rows": 1, "columns": 32, "tiles": 0, "bias": None}}, r"head.bits is 4\.0"),
        (
            {"head": {"bits": 4, "rows": 1, "columns": 40, "tiles": 0, "bias": None}},
            "a matrix is 1 x 40, .* multiple of 32",
        ),
        ({"head": {"bits": 4, "rows": 0, "columns": 32, "tiles": 0, "bias": None}}, "a matrix is 0 x 32"),
        ({"layers": {}}, "layers is {}"),
        ({"more": 1}, "other fields than DecoderRecord: .'more'."),
    ],
)
def test_a_record_that_no_build_writes_is_refused(
    tmp_path: Path, record: DecoderRecord, changes: dict[str, Any], wanted: str
) -> None:
    table = json.loads(record.to_json()) | changes
    (tmp_path / "decoder.json").write_text(json.dumps(table))
    with pytest.raises(BundleError, match=f"{wanted}.*build it again"):
        read_decoder(tmp_path)


@pytest.mark.parametrize("version", [1, None, "x"])
def test_a_record_of_another_layout_is_refused_with_both_ways_out(
    tmp_path: Path, record: DecoderRecord, version: Any
) -> None:
    (tmp_path / "decoder.json").write_text(json.dumps(json.loads(record.to_json()) | {"layout_version": version}))
    wanted = f"is of weight layout {version}, this ostinato reads 2: build the bundle again, or open it with the"
    with pytest.raises(BundleError, match=wanted):
        read_decoder(tmp_path)


def test_the_first_processor_counts(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nflags\t\t: fpu avx2\nprocessor\t: 1\nflags\t\t: fpu\n")
    assert find_cpu_flags(tmp_path / "cpuinfo") == {"fpu", "avx2"}
    (tmp_path / "arm").write_text("processor\t: 0\nFeatures\t: asimd\n")
    assert find_cpu_flags(tmp_path / "arm") == frozenset()
    assert find_cpu_flags(tmp_path / "none") == frozenset()


def test_what_a_machine_lacks_is_named() -> None:
    assert why_unfit(KERNEL_NEEDS, "x86_64", "Linux", FLAGS) is None
    assert why_unfit(KERNEL_NEEDS, "x86_64", "Linux", FLAGS[:-2]) == "lacks avx512vl, avx512_vnni"
    assert why_unfit(KERNEL_NEEDS, "aarch64", "Linux", FLAGS) == "is aarch64, wanted is x86_64"
    assert why_unfit({"machine": "x86_64"}, "x86_64", "Plan 9", ()) is None


def test_the_demo_is_built_for_what_this_machine_can_run() -> None:
    script = ROOT / "scripts" / "demo_target.sh"
    found = subprocess.run(["bash", script], capture_output=True, text=True, check=True).stdout
    assert found == ("cpu\n" if why_no_kernels() else "x86\n")
    told = subprocess.run(["bash", script, "--why"], capture_output=True, text=True, check=True).stdout
    assert told.count("\n") == 1
    assert told.startswith(f"target {found.strip()}: ")
    assert f"({' '.join(FLAGS)})" in script.read_text()
