"""Target x86: tiny checkpoints under our kernels say what transformers says, in any company; misfits are refused."""

from __future__ import annotations

import dataclasses
import random
import shutil
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from ostinato.builder.c_compiler import SOURCES
from ostinato.builder.checkpoint import Checkpoint, weight_sources
from ostinato.builder.hf_checkpoint import read_hf_folder
from ostinato.builder.identity import ingredients_of
from ostinato.builder.kernel_cache import KernelCache
from ostinato.builder.pipeline import build
from ostinato.builder.verify import kl_divergence
from ostinato.builder.weight_codes import WeightCodes
from ostinato.builder.weights import parameters_of
from ostinato.builder.x86 import check_model
from ostinato.engines.bundle import Bundle
from ostinato.engines.decoder_record import DecoderRecord, Matrix
from ostinato.engines.errors import BuildError, CheckpointError, RecipeError
from ostinato.engines.processor import KERNEL_NEEDS, why_no_kernels
from ostinato.engines.recipe import Recipe
from ostinato.engines.sizes import Limits
from ostinato.plugins.x86_pack import alternate, matrix_bytes, unpack, weights
from ostinato.runtime import LLM, Choice, RuntimeConfig, SamplingParams
from tests.tiny import write_tiny

from .conftest import Silent

pytestmark = pytest.mark.xdist_group("tiny x86 bundles")  # compiled and built once, in one process
runs_kernels = pytest.mark.skipif(why_no_kernels() is not None, reason=f"this machine {why_no_kernels()}")

LIMITS = Limits(32, 8, 64, 160, 1600, (1, 2, 4, 8), (1, 8, 64))
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama tied, one kv head": ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "llama biases": ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}),
    "mistral window 40": ("mistral", {"sliding_window": 40}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 32}),
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=70, ignore_eos=True, logprobs=2)  # three blocks
MAX_KL = 0.001  # nats, of a cache in 8 bits most of all: weights are compared as they are stored
SCHEDULES: tuple[dict[str, Any], ...] = (
    {"max_rows": 8},
    {"max_rows": 8, "num_threads": 1},
    {"max_rows": 8, "max_step_tokens": 32},  # prompts in chunks
    {"max_rows": 7, "max_step_tokens": 7, "num_threads": 3},
    {"max_rows": 8, "prefix_cache": True},
    {"max_rows": 8, "kv_tokens": 192},  # rows are preempted and computed again
)


class Tiny:
    """Tiny models and their bundles, each made when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.model = cache(self._model)
        self.bundle = cache(self._bundle)

    def checkpoint(self, name: str) -> Path:
        self.model(name)
        return self._folder / name / "checkpoint"

    def _model(self, name: str) -> Any:
        architecture, overrides = MODELS[name]
        overrides = {**overrides, "max_position_embeddings": 256}
        return write_tiny(self._folder / name / "checkpoint", architecture, **overrides)

    def _bundle(self, name: str, weights: str = "int8") -> Bundle:
        recipe = Recipe("tiny", str(self.checkpoint(name)), "x86", weights, "int8", LIMITS)
        return build(recipe, self._folder / name / weights, Silent()).bundle


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return Tiny(tmp_path_factory.mktemp("x86"))


def _prompts() -> list[list[int]]:
    rng = random.Random(4)
    shared = rng.choices(range(256), k=70)
    return [rng.choices(range(256), k=length) for length in (1, 29, 31, 33, 30, 90)] + [[*shared, 1], [*shared, 2, 3]]


def _answers(path: Path, prompts: Sequence[list[int]], **choices: Any) -> tuple[list[Choice], int]:
    """One choice a prompt, and how often a row was preempted."""
    config = RuntimeConfig(**{"num_threads": 2, "prefix_cache": False, **choices})
    with LLM(path, config, progress=False) as llm:
        given = [completion.choices[0] for completion in llm.generate(prompts, GREEDY)]
        return given, llm._shop.loop.scheduler.num_preemptions


def _logits(path: Path, text: list[int], **choices: Any) -> NDArray[np.float32]:
    """After every token of the text, [T, V]."""
    seen: list[NDArray[np.float32]] = []
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, prompt_logprobs=0)
    config = RuntimeConfig(num_threads=2, prefix_cache=False, **choices)
    with LLM(path, config, observe_logits=lambda logits: seen.append(logits.copy()), progress=False) as llm:
        llm.generate([text], params)
    return np.concatenate(seen)


@runs_kernels
@pytest.mark.parametrize("precision", ["int8", "int4"])
@pytest.mark.parametrize("name", MODELS)
def test_distributions_are_those_of_transformers(tiny: Tiny, name: str, precision: str) -> None:
    text = random.Random(9).choices(range(256), k=120)
    model, stored = tiny.model(name), _stored(tiny, name, precision)
    with torch.no_grad():
        wanted = torch.func.functional_call(model, stored, torch.tensor([text])).logits[0].numpy()
    found = _logits(tiny.bundle(name, precision).path, text)
    assert found.shape == wanted.shape
    assert kl_divergence(wanted, found).mean() < MAX_KL


def _stored(tiny: Tiny, name: str, precision: str) -> dict[str, torch.Tensor]:
    """The model's parameters as the bundle has them."""
    checkpoint = read_hf_folder(tiny.checkpoint(name))
    codes, found = WeightCodes(checkpoint, precision), dict(tiny.model(name).state_dict())
    for parameter, sources in weight_sources(checkpoint.config).items():
        rows = [len(found[source]) for source in sources]
        if found[sources[0]].dim() == 2:
            parts = torch.from_numpy(weights(codes.read(parameter))).split(rows)
            found |= dict(zip(sources, parts, strict=True))
    if checkpoint.config.tied:
        found["lm_head.weight"] = found["model.embed_tokens.weight"]
    return found


@runs_kernels
def test_a_token_in_a_chunk_is_a_token_alone_so_that_forced_ones_are_taken_ahead(tiny: Tiny) -> None:
    path, text = tiny.bundle("qwen3").path, random.Random(10).choices(range(256), k=90)
    whole = _logits(path, text)
    for choices in ({"max_step_tokens": 64}, {"max_step_tokens": 7}, {"max_step_tokens": 1}):
        np.testing.assert_array_equal(_logits(path, text, **choices), whole)
    for config, jumps in ((RuntimeConfig(), True), (RuntimeConfig(jump_ahead=False), False)):
        with LLM(path, config, progress=False) as llm:
            assert llm._shop.intake.jump_ahead == jumps
            assert llm._shop.loop.rules.computed_tokens(3, 5, 3) == 5  # nothing is padded


@runs_kernels
@pytest.mark.parametrize("name", MODELS)
def test_a_row_has_the_very_same_logprobs_in_any_company(tiny: Tiny, name: str) -> None:
    path, prompts = tiny.bundle(name).path, _prompts()
    alone = [_answers(path, [prompt], max_rows=1)[0][0] for prompt in prompts]
    assert len({choice.token_ids for choice in map(_frozen, alone)}) == len(prompts), "it does not look at its prompt"
    for choices in SCHEDULES:
        found, num_preemptions = _answers(path, prompts, **choices)
        assert found == alone, choices
        assert (num_preemptions > 0) == ("kv_tokens" in choices)


def _frozen(choice: Choice) -> Any:
    return dataclasses.replace(choice, token_ids=tuple(choice.token_ids))


def test_the_file_holds_the_weights_where_the_record_says(tiny: Tiny) -> None:
    """Read back tile by tile, against the codes of the checkpoint, for all of a model with everything in it."""
    bundle, checkpoint = tiny.bundle("llama biases"), read_hf_folder(tiny.checkpoint("llama biases"))
    record, data = bundle.decoder(), np.fromfile(bundle.rank_dir() / "weights.bin", np.uint8)
    made, codes = parameters_of(checkpoint, LIMITS.max_context), WeightCodes(checkpoint, "int8")

    def check(name: str, matrix: Matrix) -> None:
        size = matrix_bytes(matrix.rows, matrix.columns, matrix.bits)
        found = weights(unpack(data[matrix.tiles : matrix.tiles + size], matrix.rows, matrix.columns, matrix.bits))
        order = alternate if name.endswith("gate_up") else np.array
        np.testing.assert_array_equal(found, order(weights(codes.read(f"{name}.weight"))))
        np.testing.assert_allclose(found, order(made[f"{name}.weight"]()), atol=0.01)
        assert (matrix.bias is not None) == (f"{name}.bias" in made) == ("layers" in name)
        if matrix.bias is not None:
            np.testing.assert_array_equal(_floats(data, matrix.bias, matrix.rows), order(made[f"{name}.bias"]()))

    for number, layer in enumerate(record.layers):
        for kind, matrix in zip(("qkv", "attention_out", "gate_up", "down"), layer.matrices(), strict=True):
            check(f"layers.{number}.{kind}", matrix)
        np.testing.assert_array_equal(_floats(data, layer.mlp_norm, 64), made[f"layers.{number}.mlp_norm.weight"]())
    assert record.head is not None
    check("embedding", record.embedding)
    check("head", record.head)
    _check_rope(record, data, made["rope_sin"]())


def _check_rope(record: DecoderRecord, data: NDArray[np.uint8], sines: NDArray[np.float32]) -> None:
    half = sines.shape[1] // 2
    found = _floats(data, record.rope_sin, record.rope_rows * half).reshape(-1, half)
    np.testing.assert_array_equal(found, sines[:, :half])
    assert record.rope_rows == LIMITS.max_context


def _floats(data: NDArray[np.uint8], offset: int, count: int) -> NDArray[np.float32]:
    return data[offset : offset + 4 * count].view(np.float32)


def test_the_manifest_says_what_the_bundle_needs_and_lost(tiny: Tiny) -> None:
    manifest = tiny.bundle("qwen2").manifest
    assert manifest.hardware == KERNEL_NEEDS
    assert manifest.toolchain["ziglang"][0].isdecimal()
    assert manifest.notes == (
        "16 weights published as float32 are stored as bytes with a float32 scale for up to 256 inputs, which does not "
        "hold them exactly",
    )
    assert set(manifest.files) >= {"rank0/decoder.json", "rank0/kernels.so", "rank0/weights.bin"}
    assert manifest.kv_bytes_per_block == 2 * 2 * 2 * 32 * (16 + 4)  # keys and values, layers, heads, slots


def test_two_builds_are_the_same_bytes(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = tiny.bundle("qwen3")
    recipe = Recipe("tiny", str(tiny.checkpoint("qwen3")), "x86", "int8", "int8", LIMITS)
    monkeypatch.setattr(KernelCache, "fetch", lambda cache, identity: None)  # compile again
    again = build(recipe, tmp_path / "again", Silent())
    assert again.bundle.manifest == first.manifest
    assert build(recipe, tmp_path / "again", Silent()).is_reused


@pytest.mark.parametrize(
    ("overrides", "wanted"),
    [
        (
            {"hidden_size": 48, "head_dim": 16},
            "hidden_size is 48, target x86 needs a multiple of 32: choose target cpu",
        ),
        ({"intermediate_size": 80}, "intermediate_size is 80"),
        ({"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 48}, r"num_q_heads \* head_size is 48"),
        ({"head_dim": 24}, "heads have size 24, target x86 needs a multiple of 16 up to 256"),
        ({"head_dim": 288}, "heads have size 288"),
    ],
)
def test_sizes_that_the_kernels_do_not_know_are_refused(tmp_path: Path, overrides: dict[str, Any], wanted: str) -> None:
    write_tiny(tmp_path / "checkpoint", "llama", max_position_embeddings=256, **overrides)
    recipe = Recipe("tiny", str(tmp_path / "checkpoint"), "x86", "int8", "int8", LIMITS)
    with pytest.raises(BuildError, match=wanted):
        build(recipe, tmp_path / "b", Silent())
    assert not (tmp_path / "b").exists()
    with pytest.raises(BuildError, match=wanted):
        check_model(read_hf_folder(tmp_path / "checkpoint").config.sizes)


def test_weights_that_are_no_numbers_are_refused_by_name(checkpoint: Checkpoint) -> None:
    def read(name: str, part: Any = None) -> NDArray[np.float32]:
        return checkpoint.read(name, part) / np.float32(0)

    codes = WeightCodes(dataclasses.replace(checkpoint, read=read), "int8")
    with (
        np.errstate(divide="ignore"),
        pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.down_proj\.weight holds NaN or infinity"),
    ):
        codes.read("layers.1.down.weight")


def test_a_longer_context_than_the_tables_of_angles_is_refused(tiny: Tiny) -> None:
    manifest = tiny.bundle("qwen2").manifest
    assert RuntimeConfig(max_rows=4, kv_tokens=3200).limits(manifest).num_blocks == 101
    with pytest.raises(RecipeError, match="max_context is 161, the bundle was built for 160"):
        RuntimeConfig(max_context=161).limits(manifest)


def test_a_change_of_a_kernel_is_another_build(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = tiny.checkpoint("qwen2")
    recipe = Recipe("tiny", str(checkpoint), "x86", "int8", "int8", LIMITS)
    shutil.copytree(SOURCES, tmp_path / "x86")
    monkeypatch.setattr("ostinato.builder.identity.SOURCES", tmp_path / "x86")
    before = ingredients_of(recipe, checkpoint).identity
    assert before == ingredients_of(recipe, checkpoint).identity
    with (tmp_path / "x86" / "ostinato_x86.h").open("a") as header:
        header.write("// changed\n")
    assert ingredients_of(recipe, checkpoint).identity != before
