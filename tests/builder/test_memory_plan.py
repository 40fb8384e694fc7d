"""`ostinato plan`'s arithmetic against numbers worked out by hand, and against the graph that a build would cut."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest

from ostinato.builder import memory_plan, plan_command
from ostinato.builder.cut import cut_at_operators
from ostinato.builder.gpu_plan import plan_for
from ostinato.builder.gpus import GPUS, gpu_named
from ostinato.builder.half import is_halved
from ostinato.builder.hf_config import config_from_hf
from ostinato.builder.kernel_report import kernel_specs
from ostinato.builder.launch_plan import plan_launches
from ostinato.builder.program_writer import write_program
from ostinato.builder.rank_graph import StageGraphs, device_graph
from ostinato.builder.rank_operators import rank_operators
from ostinato.builder.roofline import attention_traffic, predict_step, sampling_traffic
from ostinato.builder.shard import weight_slices
from ostinato.engines.errors import BuildError, RecipeError
from ostinato.engines.program import DTYPE_BYTES, StepShape
from ostinato.engines.recipe import Recipe, recipe_from_table
from ostinato.engines.targets import TARGETS

LLAMA_3_70B = {
    "model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
    "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": False,
}  # fmt: skip
SMOLLM2_135M = {
    "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152, "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5, "rope_theta": 100000.0, "tie_word_embeddings": True,
}  # fmt: skip
TINY = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 321, "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
}  # fmt: skip
RECIPE = """
name = "planned"
checkpoint = "none"
target = "trt"
weights = "bfloat16"
kv_cache = "bfloat16"
compute_capabilities = ["9.0"]
shards.tensor_parallel = 4
[limits]
block_size = 32
max_rows = 64
max_step_tokens = 2048
max_context = 8192
kv_tokens = 524288
row_buckets = [1, 64]
token_buckets = [512, 2048]
"""


def recipe(**changes: Any) -> Recipe:
    return recipe_from_table({**tomllib.loads(RECIPE), **changes})


def config(table: dict[str, Any]):  # type: ignore[no-untyped-def]
    return config_from_hf(table, "config.json")


def test_llama_3_70b_on_four_h200() -> None:
    """A rank has 16 query heads, 2 KV heads of 128, 7168 of the MLP's channels and 32064 ids."""
    memory = memory_plan.memory_table(config(LLAMA_3_70B), recipe())
    # qkv (16 + 2 + 2) * 128 rows of 8192; output 8192 of 2048; gate and up 2 * 7168 of 8192; down 8192 of 7168
    a_layer = 20_971_520 + 16_777_216 + 117_440_512 + 58_720_256
    norms = 2 * 8192 * 4
    tables = 2 * 32064 * 8192 * 2
    rope = 2 * 8192 * 128 * 4
    assert memory.weight_bytes == 80 * (2 * a_layer + norms) + tables + 8192 * 4 + rope == 35_289_858_048
    # keys and values, 80 layers, 2 heads, 32 tokens, 128 numbers of 2 bytes
    assert memory.kv_bytes_per_block == 2 * 80 * 2 * 32 * 128 * 2 == 2_621_440
    assert memory.num_blocks == 524288 // 32 + 1 == 16385
    # counts of 128256 ids, and 1024 biases with their ids, for 64 rows, the pads and scored prompt tokens
    assert memory.state_bytes == 66 * (128256 + 2 * 1024) * 4 == 34_400_256
    fit = memory_plan.fit(memory, recipe().limits, gpu_named("H200"))
    assert fit.usable_bytes == 143771 * 2**20 * 9 // 10 == 135_679_338_086
    assert fit.blocks == (fit.usable_bytes - memory.fixed_bytes) // 2_621_440
    assert fit.tokens == (fit.blocks - 1) * 32
    assert fit.rows_at_max_context == (fit.blocks - 1) // 256
    assert fit.fits
    # between calls, a token: hidden twice, summand and sum, cosines and sines; q, out, k and v of 16, 16, 2 and 2 heads
    a_token = 4 * 8192 * 4 + 2 * 128 * 4 + 36 * 128 * 2
    # a row: logits, 32064 of a rank, 4 * 32064 gathered
    a_row = (128256 + 32064 + 128256) * 4
    operators = rank_operators(config(LLAMA_3_70B).sizes, recipe(), recipe().shards.shard(0))
    prefill = StepShape("prefill", 2048, 64)
    cut = memory_plan.cut_bytes(operators, config(LLAMA_3_70B).sizes, recipe(), recipe().shards.shard(0), prefill)
    assert cut == 2048 * a_token + 64 * a_row
    # inside, at the MLP: the input and three times 7168 channels, in two and in four bytes
    inside = 2048 * (8192 + 3 * 7168) * 6
    assert memory.activation_bytes["prefill 2048"] == pytest.approx(cut + inside, rel=0.01)  # and what a step uploads


def test_smollm2_on_one_l4() -> None:
    one = recipe(target="rtx", weights="float16", kv_cache="int8", compute_capabilities=["8.9"], shards={})
    memory = memory_plan.memory_table(config(SMOLLM2_135M), one)
    a_layer = 960 * 576 + 576 * 576 + 2 * 1536 * 576 + 576 * 1536
    assert memory.weight_bytes == 30 * (2 * a_layer + 2 * 576 * 4) + 49152 * 576 * 2 + 576 * 4 + 2 * 8192 * 64 * 4
    assert memory.weight_bytes == 273_294_592  # the tied table once
    assert memory.kv_bytes_per_block == 2 * 30 * 3 * 32 * (64 + 4) == 391_680  # codes, and a float32 scale a token


def test_the_rank_that_takes_most_is_planned() -> None:
    """A tied table stands on the first stage and on the last, which samples too."""
    staged = recipe(shards={"pipeline_parallel": 2})
    first, last = (memory_plan.rank_memory(config(TINY), staged, shard) for shard in staged.shards.all())
    assert memory_plan.memory_table(config(TINY), staged) == last
    assert first.state_bytes == 0 < last.state_bytes
    assert last.weight_bytes - first.weight_bytes == 64 * 4  # the final norm
    with pytest.raises(BuildError, match="a stage would have none"):
        memory_plan.memory_table(config(TINY), recipe(shards={"pipeline_parallel": 5}))


@pytest.mark.parametrize(
    ("weights", "shards"),
    [("float16", {}), ("bfloat16", {"tensor_parallel": 2}), ("float16", {"pipeline_parallel": 2})],
    ids=["whole", "tp 2", "pp 2"],
)
def test_the_plan_is_what_a_build_would_allocate(weights: str, shards: dict[str, int]) -> None:
    """Every buffer between calls, and every parameter in the type it is stored in."""
    made = recipe(weights=weights, kv_cache=weights, shards=shards, tensorrt={"operators": "between"})
    decoder, graphs = config(TINY), StageGraphs(config(TINY), made)
    for shard in made.shards.all()[:: made.shards.tensor_parallel]:
        names = (*weight_slices(decoder, shard), "rope_cos", "rope_sin")
        graph, stored = device_graph(graphs.graph(shard), decoder, made, shard, dict.fromkeys(names))  # type: ignore[arg-type]
        parameters = [value for value in graph.graph.inputs if value.name in stored]
        assert memory_plan.weight_bytes(decoder, made, shard) == sum(map(value_bytes, parameters))
        cut = cut_at_operators(graph, stored.keys())
        offsets, plan = {value.name: 0 for value in cut.shared}, plan_launches(cut.operators, made)
        program = write_program(cut, plan, {}, offsets, made.limits.max_blocks_per_row)
        operators = rank_operators(decoder.sizes, made, shard)
        for step in operators.steps:
            known = {"T": step.tokens, "B": step.rows, "B+1": step.rows + 1, "S": step.rows}
            found = dict.fromkeys(("input", "output", "cut"), 0)
            for buffer in program.buffers:
                if buffer.kind in found:
                    shape = (size if isinstance(size, int) else known[size] for size in buffer.shape)
                    found[buffer.kind] += DTYPE_BYTES[buffer.dtype] * math.prod(shape)
            io = memory_plan.io_bytes(decoder.sizes, made.limits, shard, step)
            between = memory_plan.cut_bytes(operators, decoder.sizes, made, shard, step)
            assert io == found["input"] + found["output"]
            # a stage that is handed its hidden state may need one buffer for it, not two
            saved = {0} if shard.is_first_stage else {0, step.tokens * 64 * 4}
            assert between - found["cut"] in saved


def value_bytes(value: ir.Value) -> int:
    return int(math.prod(value.shape.numpy()) * value.dtype.itemsize)


def test_parameters_are_counted_in_the_type_that_a_build_stores() -> None:
    biased = config({**TINY, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False})
    for name in weight_slices(biased):
        assert memory_plan.parameter_bytes(name, "float16") == (2 if is_halved(ir.Value(name=name)) else 4)


def test_a_step_takes_as_long_as_its_weights_and_its_cache_take_to_read() -> None:
    """Llama-3-70B, tp 4: everything but the embedding is read; at 64 rows, each has 1001 slots, one of them its own."""
    decoder, gpu = config(LLAMA_3_70B), gpu_named("h200")
    read = 35_289_858_048 - 32064 * 8192 * 2 - 2 * 8192 * 128 * 4
    alone = predict_step(decoder, recipe(), gpu, StepShape("decode", 1, 1), 0)
    assert alone.memory_ms == pytest.approx(1e3 * read / 4.8e12, rel=1e-3)
    assert alone.memory_ms > alone.compute_ms
    rows = predict_step(decoder, recipe(), gpu, StepShape("decode", 64, 64), 1000)
    cache = 64 * 1001 * 81_920
    assert rows.memory_ms == pytest.approx(1e3 * (read + cache) / 4.8e12, rel=0.01)
    # two operations a weight and row; two sums a layer and one of 64 * 8192 float32, three quarters sent twice
    linear = 80 * 213_909_504 + 32064 * 8192
    attention = 80 * 4 * 16 * 128 * 1001
    assert rows.compute_ms == pytest.approx(1e3 * 64 * (2 * linear + attention) / 989e12)
    sent = 161 * 64 * 8192 * 4 * 2 * 3 // 4 + 3 * 64 * 32064 * 4
    assert rows.link_ms == pytest.approx(1e3 * sent / 450e9)
    assert rows.total_ms == pytest.approx(rows.memory_ms + rows.link_ms)
    prompt = predict_step(decoder, recipe(), gpu, StepShape("prefill", 2048, 64), 1000)
    assert prompt.compute_ms > prompt.memory_ms
    assert prompt.total_ms == pytest.approx(prompt.compute_ms + prompt.link_ms)
    latency = plan_for(decoder, recipe(), gpu, 1000).latency()["decode 64"]
    assert (latency.predicted_ms, latency.measured_ms) == (rows.total_ms, None)
    assert latency.basis == "roofline of h200, decode rows at 1000 tokens of context"


def test_pipeline_stages_take_their_time_one_after_another() -> None:
    decoder, gpu, step = config(LLAMA_3_70B), gpu_named("h200"), StepShape("decode", 64, 64)
    one, two = (predict_step(decoder, recipe(shards={"pipeline_parallel": n}), gpu, step, 100) for n in (1, 2))
    assert two.memory_ms == pytest.approx(one.memory_ms, rel=1e-3)
    assert two.link_ms == pytest.approx(1e3 * 64 * 8192 * 4 / 450e9)


def test_what_kernels_move_beside_what_they_must() -> None:
    small = recipe(weights="float16", kv_cache="int8", shards={})
    operators = rank_operators(config(SMOLLM2_135M).sizes, small, small.shards.shard(0))
    decode, prefill = StepShape("decode", 64, 64), StepShape("prefill", 512, 64)
    own = 2 * 9 * 64 * 2 + 2 * 3 * 64 * 2 + 2 * 3 * 68  # q and out, k and v, the slot: bytes a token
    at_1000 = attention_traffic(operators, small, decode, 1000)
    assert at_1000.needed_bytes == 64 * (own + 1000 * 2 * 3 * 68)
    # 1001 keys in 4 splits of 256: q three times more, 9 * 66 float32 of each split written and read, one slot again
    assert at_1000.moved_bytes - at_1000.needed_bytes == 64 * (3 * 9 * 64 * 2 + 4 * 2 * 9 * 66 * 4 + 2 * 3 * 68)
    assert at_1000.operations == 64 * 4 * 9 * 64 * 1001
    prompt = attention_traffic(operators, small, prefill, 1000)
    # tiles of 64 lines are 21 tokens of 3 heads: the first sees 21 keys, the last of 25 all 512
    assert prompt.moved_bytes - prompt.needed_bytes == (sum(range(21, 512, 21)) + 512) * 2 * 3 * 68
    assert prompt.needed_bytes == 512 * own
    assert prompt.operations == 4 * 9 * 64 * 512 * 513 // 2
    sampling = sampling_traffic(operators, decode)
    assert sampling.needed_bytes == 64 * (49152 * 4 + 1536 * 4)
    # 48 blocks of 1024, 384 groups of 128
    assert sampling.moved_bytes == 64 * (4 * 49152 * 4 + 3 * 1536 * 4 + 16 * 384 + 48 * 16 * 384 + 24 * 384)
    assert {one.function for one in kernel_specs([operators])} == {
        "cache_write", "decode_splits", "decode_join", "prefill_attention", "adjust_logits", "weigh_blocks",
        "pack_candidates", "draw_tokens", "report_logprobs", "feed_tokens",
    }  # fmt: skip


def test_a_window_bounds_what_is_read() -> None:
    small = recipe(weights="float16", kv_cache="float16", shards={})
    mistral = config({**SMOLLM2_135M, "model_type": "mistral", "sliding_window": 300})
    operators = rank_operators(mistral.sizes, small, small.shards.shard(0))
    own, slot = 2 * 9 * 64 * 2 + 2 * 3 * 64 * 2 + 2 * 3 * 128, 2 * 3 * 128
    at_1000 = attention_traffic(operators, small, StepShape("decode", 1, 1), 1000)
    assert at_1000.needed_bytes == own + 299 * slot
    # keys 701 to 1000 stand in splits 2 and 3
    assert at_1000.moved_bytes - at_1000.needed_bytes == 9 * 64 * 2 + 2 * 2 * 9 * 66 * 4 + slot
    prompt = attention_traffic(operators, small, StepShape("prefill", 512, 64), 0)
    assert prompt.operations == 4 * 9 * 64 * (300 * 301 // 2 + 212 * 300)


def test_every_gpu_can_be_built_for() -> None:
    assert all(gpu.compute_capability in TARGETS["trt"].compute_capabilities for gpu in GPUS.values())
    with pytest.raises(RecipeError, match=r"no GPU 'h2000' is known here: give one of b200, h200"):
        gpu_named("h2000")


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """The recipe and the config, as arguments."""
    (tmp_path / "planned.toml").write_text(RECIPE)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_3_70B))
    return [str(tmp_path / "planned.toml"), "--config", str(tmp_path / "config.json")]


def test_the_command_prints_both_tables(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert plan_command.plan([*files, "--gpu", "h200"]) == 0
    found = capsys.readouterr().out
    for text in ("32.87 GiB", "2560.0 KiB for 32 tokens", "/ 16,385", "decode 64", "prefill 2048", "predicted", "fits"):
        assert text in found
    assert "does not fit" not in found
    assert max(map(len, found.splitlines()[2:])) <= 80
    assert "…" not in found


def test_a_plan_names_the_model_that_it_is_of(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """With --config that is not the recipe's own."""
    assert plan_command.plan([*files, "--gpu", "h200"]) == 0
    first, second = capsys.readouterr().out.splitlines()[:2]
    config = files[files.index("--config") + 1]
    assert first == f"{config}: llama, 80 layers, hidden 8192; all else from recipe {Path(files[0]).stem}"
    assert "on 4 × h200 (4 slices × 1 stages)" in second


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--gpu", "h200", "--set", "limits.kv_tokens=2000000"], "too much for h200: lower limits.kv_tokens to 12"),
        (["--gpu", "l4", "--set", 'compute_capabilities=["8.9"]'], "raise shards.tensor_parallel, or choose a GPU"),
        (["--gpu", "b200"], "b200 has compute capability 10.0, the recipe builds for 9.0: add 10.0"),
        (["--gpu", "h200", "--set", "limits.max_context=9000"], "the model has 8192 positions"),
        (
            ["--gpu", "h200", "--set", "target=rtx", "--set", 'compute_capabilities=["8.9"]'],
            "h200 has compute capability 9.0, which target rtx has no engines for: choose target trt",
        ),
    ],
    ids=["pool", "weights", "capability", "context", "target"],
)
def test_what_does_not_fit_says_what_to_change(
    files: list[str], arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan_command.plan([*files, *arguments]) == 1
    assert reason in " ".join(capsys.readouterr().out.split())


def test_what_the_advice_says_fits(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert plan_command.plan([*files, "--gpu", "h200", "--set", "limits.kv_tokens=2000000"]) == 1
    advice = " ".join(capsys.readouterr().out.split()).partition("lower limits.kv_tokens to ")[2].split(",")[0]
    assert plan_command.plan([*files, "--gpu", "h200", "--set", f"limits.kv_tokens={advice}"]) == 0
    assert plan_command.plan([*files, "--gpu", "h200", "--set", f"limits.kv_tokens={int(advice) + 32}"]) == 1


def test_a_recipe_without_a_gpu_is_refused(files: list[str]) -> None:
    cpu = ["--set", "target=cpu", "--set", "kv_cache=bfloat16", "--set", "compute_capabilities=[]"]
    with pytest.raises(RecipeError, match="plan is for GPU targets"):
        plan_command.plan([*files, "--gpu", "h200", *cpu, "--set", "shards.tensor_parallel=1"])
    with pytest.raises(RecipeError, match="--context is 8192: give 0 to 8191"):
        plan_command.plan([*files, "--gpu", "h200", "--context", "8192"])


def test_a_plan_loads_no_heavy_library(files: list[str]) -> None:
    """It answers within seconds because of that."""
    code = (
        "import sys; from ostinato.builder.plan_command import plan; "
        f"plan({[*files, '--gpu', 'h200']!r}); "
        "print([name for name in ('torch', 'transformers', 'triton', 'openvino') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
