"""Cubins without a GPU: what is written, what is refused, and that the same spec always gives the same bytes."""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from triton import knobs

from ostinato.builder import kernels_command
from ostinato.builder.hf_config import config_from_hf
from ostinato.builder.kernel_compiler import Kernels, compile_kernels
from ostinato.builder.kernel_report import kernel_specs, resource_view, spills
from ostinato.builder.rank_operators import rank_operators
from ostinato.engines.errors import BuildError, RecipeError
from ostinato.engines.program import KernelInfo
from ostinato.engines.recipe import recipe_from_table
from ostinato.engines.shards import WHOLE
from ostinato.plugins.kernel_launch import Constant, KernelSpec, Pointer

from ..scale import IS_SOAK
from .conftest import Silent

ROOT = Path(__file__).parent.parent.parent
Compile = Callable[..., Kernels]
FEW = ("sm_80", "sm_90", "sm_120")  # a generation each; make soak takes all
ARCHITECTURES = {
    "sm_80": "8.0", "sm_86": "8.6", "sm_87": "8.7", "sm_89": "8.9", "sm_90": "9.0", "sm_100": "10.0", "sm_120": "12.0",
}  # fmt: skip


SWEPT = {arch: capability for arch, capability in ARCHITECTURES.items() if IS_SOAK or arch in FEW}


def spec(function: str, pointers: str, dtype: str, num_warps: int = 4, **constants: Constant) -> KernelSpec:
    named = tuple(Pointer(name, dtype) for name in pointers.split())
    return KernelSpec("plain_kernels", function, named, tuple(constants.items()), num_warps)


SOUND = spec("scale_and_add", "x y out", "float16", size=256, factor=0.75)


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compile:
    """Compiles specs of this folder's kernels; child processes inherit the path."""
    monkeypatch.syspath_prepend(str(ROOT))

    def run(*specs: KernelSpec, capabilities: tuple[str, ...], package: str = "tests.builder") -> Kernels:
        return compile_kernels(specs, capabilities, tmp_path / package, Silent(), package=package)

    return run


def tool(name: str, *arguments: str | Path) -> str:
    path = getattr(knobs.nvidia, name).path
    return subprocess.run([path, *map(str, arguments)], capture_output=True, text=True, check=True).stdout


def test_a_cubin_is_written_for_each_architecture(compiled: Compile, tmp_path: Path) -> None:
    kernels = compiled(SOUND, SOUND, capabilities=("8.6", "9.0", "12.0", "12.1"))
    assert list(kernels) == ["sm_86", "sm_90", "sm_120"]
    wanted = {"sm_86": "sm_86", "sm_90": "sm_90a", "sm_120": "sm_120"}  # without an a: 12.1 runs it too
    for arch, by_name in kernels.items():
        (name, info), *others = by_name.items()
        assert not others
        assert name == SOUND.name
        assert (info.entry, info.num_warps, info.shared_bytes, info.spill_bytes) == ("scale_and_add", 4, 0, 0)
        assert 0 < info.registers <= 255
        cubin = tmp_path / "tests.builder" / arch / f"{name}.cubin"
        code = tool("cuobjdump", "-sass", cubin)
        assert f"code for {wanted[arch]}\n" in code
        assert f"Function : {info.entry}\n" in code
        # Each product is rounded before its sum, as NumPy rounds it.
        assert "FMUL" in code
        assert "FADD" in code
        assert "FFMA" not in code
        sizes = re.findall(r"KPARAM_INFO.*?Size\s*:\s*0x(\w+)", tool("cuobjdump", "-elf", cubin), re.DOTALL)
        assert [int(size, 16) for size in sizes] == [8] * (len(SOUND.pointers) + info.num_hidden_pointers)


def test_the_same_spec_gives_the_same_bytes(compiled: Compile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In another process, from a source in another place."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    shutil.copy(ROOT / "tests" / "builder" / "plain_kernels.py", elsewhere)
    monkeypatch.syspath_prepend(str(tmp_path))
    packages = ("tests.builder", "elsewhere")
    for package in packages:
        compiled(SOUND, capabilities=("8.9", "12.0"), package=package)
    for arch in ("sm_89", "sm_120"):
        first, second = (tmp_path / package / arch / f"{SOUND.name}.cubin" for package in packages)
        assert first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize(
    ("faulty", "reason"),
    [
        (spec("misspelt", "x", "float16", size=256), r"misspelt does not compile for sm_86 \(size=256.*no_such_funct"),
        (spec("centre", "x", "float32", 1, size=8192), r"centre spills \d+ bytes a thread on sm_86 \(255 registers"),
        (
            spec("matrix_product", "x y out", "float32", 8, size=128),
            "matrix_product wants 131072 bytes of shared memory, sm_86 has 101376",
        ),
    ],
    ids=["error", "spill", "shared memory"],
)
def test_a_kernel_that_can_not_be_launched_is_refused(compiled: Compile, faulty: KernelSpec, reason: str) -> None:
    with pytest.raises(BuildError, match=reason):
        compiled(SOUND, faulty, capabilities=("8.6",))


def test_a_spill_can_be_let_through_to_be_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    faulty = spec("centre", "x", "float32", 1, size=8192)
    kernels = compile_kernels([faulty], ["8.6"], tmp_path, Silent(), package="tests.builder", spills_allowed=True)
    assert kernels["sm_86"][faulty.name].spill_bytes > 0
    assert len(spills(kernels)) == 1


SWEEP = """
checkpoint = "none"
target = "trt"
weights = "float16"
kv_cache = "float16"
compute_capabilities = ["9.0"]
limits = {max_rows = 16, max_step_tokens = 64, max_context = 4096, row_buckets = [16], token_buckets = [64]}
"""
WIDE = {  # heads of 128, the widest that models have, and a vocabulary of 128 Ki
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 1,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
}  # fmt: skip
OF_ATTENTION = {"cache_write", "decode_splits", "decode_join", "prefill_attention"}
OF_SAMPLING = {"adjust_logits", "weigh_blocks", "pack_candidates", "draw_tokens", "report_logprobs"}


@pytest.mark.kernels
def test_the_command_reports_kernels_by_architecture_and_none_spills(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sweep.toml").write_text(SWEEP)
    (tmp_path / "config.json").write_text(json.dumps(WIDE))
    out = tmp_path / "out"
    arguments = [str(tmp_path / "sweep.toml"), "--config", str(tmp_path / "config.json"), "--out", str(out), "--json"]
    given = [word for arch in SWEPT for word in ("--arch", arch)]
    assert kernels_command.kernels(arguments if IS_SOAK else [*arguments, *given]) == 0
    report = json.loads(capsys.readouterr().out)
    assert list(report["kernels"]) == sorted(SWEPT)
    for arch, by_name in report["kernels"].items():
        assert {one["function"] for one in by_name.values()} == OF_ATTENTION | OF_SAMPLING | {"feed_tokens"}
        assert {file.stem for file in (out / arch).iterdir()} == set(by_name)
        assert not any(one["spill_bytes"] for one in by_name.values())
    assert report["traffic"]["PagedAttention"]["decode 16"]["ratio"] > 1
    assert report["traffic"]["StatefulSampling"]["prefill 64"]["needed_bytes"] == 16 * (128256 * 4 + 4008 * 4)


@pytest.mark.kernels
@pytest.mark.parametrize("kv_cache", ["int8"])
def test_no_kernel_over_a_quantized_cache_spills(tmp_path: Path, kv_cache: str) -> None:
    recipe = recipe_from_table({**tomllib.loads(SWEEP), "name": "sweep", "kv_cache": kv_cache})
    specs = kernel_specs([rank_operators(config_from_hf(WIDE, "config").sizes, recipe, WHOLE)])
    specs = tuple(one for one in specs if one.function in OF_ATTENTION - {"decode_join"})  # the others know no cache
    kernels = compile_kernels(specs, list(SWEPT.values()), tmp_path, Silent())
    assert sorted(kernels) == sorted(SWEPT)
    assert not spills(kernels)


def test_the_report_marks_what_spills() -> None:
    sound = KernelInfo("k", 4, 20 * 1024, 2, 64, 0)
    kernels = {"sm_80": {SOUND.name: sound}, "sm_90": {SOUND.name: replace(sound, spill_bytes=16)}}
    console = Console(width=120, record=True, quiet=False, file=io.StringIO())
    console.print(resource_view([SOUND], kernels))
    text = console.export_text()
    assert "64/20 SPILL 16" in text
    assert text.count("SPILL 16") == 1
    assert spills(kernels) == [f"{SOUND.name} spills 16 bytes a thread on sm_90"]


def test_a_recipe_without_kernels_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cpu.toml").write_text('checkpoint = "none"\ntarget = "cpu"\n')
    with pytest.raises(RecipeError, match="target cpu, which has no GPU kernels"):
        kernels_command.kernels([str(tmp_path / "cpu.toml")])


def test_a_place_for_cubins_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "sweep.toml").write_text(SWEEP)
    (tmp_path / "config.json").write_text(json.dumps(WIDE))
    arguments = [str(tmp_path / "sweep.toml"), "--config", str(tmp_path / "config.json"), "--out"]
    with pytest.raises(RecipeError, match=r"--out .*sweep\.toml can't be made a folder \(.*\): give another"):
        kernels_command.kernels([*arguments, str(tmp_path / "sweep.toml")])
