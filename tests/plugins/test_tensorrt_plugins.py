"""Our TensorRT plugins, driven as TensorRT drives them: the real bindings' objects, a launcher that records."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any

import numpy as np
import pytest

from ostinato.builder.trt_launches import attention_table, sampling_table
from ostinato.engines.errors import BundleError, DeviceError
from ostinato.engines.io_table import device_cache_shape
from ostinato.engines.program import DTYPE_BYTES, StepShape
from ostinato.plugins.kernel_launch import Launch
from ostinato.plugins.launch_table import LaunchTable, launch_table_from_json
from ostinato.plugins.operator_shapes import AttentionShape, SamplingShape
from ostinato.plugins.paged_attention import AttentionAttributes
from ostinato.plugins.paged_attention_launch import paged_attention_launches, paged_attention_scratch
from ostinato.plugins.stateful_sampling import STATEFUL_SAMPLING
from ostinato.plugins.stateful_sampling_launch import stateful_sampling_launches

from ..tensorrt_fakes import Registry, fixed
from ..tensorrt_standin import standin

trt = standin()

from ostinato.plugins.paged_attention_plugin import PagedAttentionPlugin  # noqa: E402
from ostinato.plugins.plugin_registry import register_plugins  # noqa: E402
from ostinato.plugins.stateful_sampling_plugin import StatefulSamplingPlugin  # noqa: E402

STREAM, WORKSPACE = 0xABC, 0x1000_0000
HEADS = AttentionAttributes(num_q_heads=4, num_kv_heads=2, head_size=16, scale=0.25, sliding_window=8)
BLOCK, BLOCKS, WIDTH, ROWS = 8, 9, 4, 4
STEPS = (
    *(StepShape("decode", rows, rows) for rows in (1, 2, 4)),
    *(StepShape("prefill", tokens, ROWS) for tokens in (4, 16, 64)),
)
SAMPLING = SamplingShape(vocab_size=50, logits_dtype="float32", max_bias=6, num_logprobs=3, max_rows=ROWS)
STATE_LINES = ROWS + 1
ALIVE: list[Any] = []


class Recorder:
    """A launcher that writes down what it is asked for."""

    def __init__(self) -> None:
        self.prepared: set[str] = set()
        self.launches: list[tuple[str, tuple[int, int, int], tuple[int, ...], int]] = []

    def prepare(self, kernels: Iterable[str]) -> None:
        self.prepared.update(kernels)

    def launch(self, kernel: str, grid: tuple[int, int, int], pointers: Sequence[int], stream: int) -> None:
        assert kernel in self.prepared, "a launch would have to load its kernel"
        self.launches.append((kernel, grid, tuple(pointers), stream))


def attention_shape(dtype: str = "float16", cache_dtype: str = "float16") -> AttentionShape:
    return AttentionShape(HEADS, dtype, cache_dtype, BLOCK, WIDTH, ROWS)


def attention_fields(table: LaunchTable, dtype: str = "float16", cache_dtype: str = "float16") -> Any:
    texts = {"dtype": dtype, "cache_dtype": cache_dtype, "launches": table.to_json()}
    numbers = {"num_q_heads": 4, "num_kv_heads": 2, "head_size": 16, "sliding_window": 8, "scale": 0.25}
    return fields(numbers | texts)


def fields(values: dict[str, Any]) -> Any:
    """A collection as TensorRT's parser makes it of a node's attributes."""
    kinds: dict[type, Callable[[Any], tuple[Any, Any]]] = {
        int: lambda v: (np.array([v], np.int32), trt.PluginFieldType.INT32),
        float: lambda v: (np.array([v], np.float32), trt.PluginFieldType.FLOAT32),
        str: lambda v: (np.frombuffer(v.encode(), np.int8), trt.PluginFieldType.CHAR),
    }
    return collection([trt.PluginField(name, *kinds[type(v)](v)) for name, v in values.items()])


def collection(made: list[Any]) -> Any:
    """A collection holds addresses only: here somebody must hold what is there, as TensorRT's parser does."""
    ALIVE.extend(made)
    return trt.PluginFieldCollection(made)


def created(name: str, collection: Any, launcher: Recorder, phase: Any = None) -> Any:
    """A plugin as the parser (or a plan, for the runtime phase) gets it: by the registry, from fields."""
    registry = Registry()
    register_plugins(registry, launcher)
    (creator,) = [held for held in registry.all_creators if held.name == name]
    return creator.create_plugin("node_7", collection, phase or trt.TensorRTPhase.RUNTIME)


def attention_dims(tokens: int, rows: int, cache_dtype: str = "float16") -> list[list[int]]:
    cache = [size if isinstance(size, int) else BLOCKS for size in device_cache_shape(cache_dtype, 2, BLOCK, 16)]
    return [[tokens, 64], [tokens, 32], [tokens, 32], cache, cache, [tokens], [rows + 1], [rows], [rows, WIDTH]]


def sampling_dims(rows: int) -> list[list[int]]:
    fixed_sizes = {
        "logits": [rows, 50], "allowed": [rows, 2], "logprob_slots": [3], "bias_ids": [STATE_LINES, 6],
        "bias_values": [STATE_LINES, 6], "counts": [STATE_LINES, 50],
    }  # fmt: skip
    return [fixed_sizes.get(name, [rows]) for name in STATEFUL_SAMPLING.inputs]


def ranged(dims: Sequence[Sequence[int]]) -> list[Any]:
    """What a plugin hears of a profile whose minimum, optimum and maximum are these."""
    described = []
    for size in dims:
        described.append(trt.DynamicPluginTensorDesc())
        described[-1].min = described[-1].opt = described[-1].max = list(size)
    return described


def described(dims: Sequence[Sequence[int]]) -> list[Any]:
    return [fixed(list(size)) for size in dims]


# -- creation, fields, registry


@pytest.mark.parametrize("cache_dtype", ["float16", "int8"])
def test_a_plan_gives_the_plugin_back_that_was_serialized(cache_dtype: str) -> None:
    table = attention_table(attention_shape(cache_dtype=cache_dtype), STEPS)
    built = created("PagedAttention", attention_fields(table, cache_dtype=cache_dtype), Recorder())
    kept = {kept.name: (np.array(kept.data), kept.type) for kept in built.get_fields_to_serialize()}
    plan = collection([trt.PluginField(name, *content) for name, content in kept.items()])
    revived = created("PagedAttention", plan, Recorder(), trt.TensorRTPhase.RUNTIME)
    assert set(kept) == {
        *("num_q_heads", "num_kv_heads", "head_size", "scale", "sliding_window", "logit_softcap"),
        *("dtype", "cache_dtype", "launches"),
    }
    assert revived.metadata_string == built.metadata_string
    assert revived.timing_cache_id == built.timing_cache_id != ""
    assert launch_table_from_json(bytes(kept["launches"][0]).decode()) == table
    assert '"scale": 0.25' in revived.metadata_string
    assert '"logit_softcap": 0.0' in revived.metadata_string, "the schema's default"


def test_fields_outlive_the_call_that_returns_them() -> None:
    plugin = created("PagedAttention", attention_fields(attention_table(attention_shape(), STEPS)), Recorder())
    first = plugin.get_fields_to_serialize()
    noise = [np.full(4096, 7, np.int8) for _ in range(200)]
    assert [bytes(f.data) for f in first] == [bytes(f.data) for f in plugin.get_fields_to_serialize()]
    assert len(noise) == 200


@pytest.mark.parametrize(
    ("change", "named"),
    [({"num_q_heads": None}, "num_q_heads"), ({"launches": None}, "launches"), ({"head_size": 16.0}, "head_size")],
)
def test_a_missing_or_mistyped_field_is_refused_by_name(change: dict[str, Any], named: str) -> None:
    values = {"num_q_heads": 4, "num_kv_heads": 2, "head_size": 16, "scale": 0.25, "dtype": "float16"}
    values |= {"cache_dtype": "float16", "launches": "[]"} | change
    with pytest.raises(BundleError, match=named):
        created("PagedAttention", fields({k: v for k, v in values.items() if v is not None}), Recorder())


def test_fields_that_are_foreign_empty_or_in_another_order() -> None:
    table = attention_table(attention_shape(), STEPS)
    made = [trt.PluginField(f.name, np.array(f.data), f.type) for f in attention_fields(table)]
    made.append(trt.PluginField("plugin_version", np.frombuffer(b"1\0", np.int8), trt.PluginFieldType.CHAR))
    assert created("PagedAttention", collection(made[::-1]), Recorder()).attach_to_context(None)
    for size in (0, 2):
        odd = trt.PluginField("head_size", np.full(size, 16, np.int32), trt.PluginFieldType.INT32)
        others = [field for field in made if field.name != "head_size"]
        with pytest.raises(BundleError, match=f"node_7 has {size} numbers as head_size"):
            created("PagedAttention", collection([*others, odd]), Recorder())


@pytest.mark.parametrize("text", ["", "[1]", '{"sizes": 3}', '[{"sizes":[1],"launches":[["k",[1,2],[]]]}]'])
def test_a_damaged_launch_table_is_refused(text: str) -> None:
    with pytest.raises(BundleError, match="launches"):
        launch_table_from_json(text)


def test_creators_are_registered_once_and_give_way_to_the_next_bundle() -> None:
    registry, first, second = Registry(), Recorder(), Recorder()
    register_plugins(registry, first)
    creators = register_plugins(registry, second)
    assert registry.all_creators == list(creators)
    assert {(c.name, c.plugin_version, c.plugin_namespace) for c in creators} == {
        ("PagedAttention", "1", "ostinato"),
        ("StatefulSampling", "1", "ostinato"),
    }
    plugin = creators[0].create_plugin("n", attention_fields(attention_table(attention_shape(), STEPS)), None)
    plugin.attach_to_context(None)
    assert second.prepared
    assert not first.prepared


def test_a_registry_that_refuses_is_a_refusal() -> None:
    class Taken(Registry):
        def register_creator(self, creator: Any, plugin_namespace: str = "") -> bool:
            return False

    with pytest.raises(DeviceError, match="registry refuses ostinato::PagedAttention"):
        register_plugins(Taken(), Recorder())


# -- build: shapes, types, formats, aliases


def test_output_shapes_types_and_aliases() -> None:
    attention = created("PagedAttention", attention_fields(attention_table(attention_shape(), STEPS)), Recorder())
    cache = ["N", 2, BLOCK, 16]
    inputs = [["T", 64], ["T", 32], ["T", 32], cache, cache, ["T"], ["B+1"], ["B"], ["B", WIDTH]]
    assert attention.get_output_shapes([trt.DimsExprs(i) for i in inputs], [], None) == [["T", 64], cache, cache]
    half, whole = trt.DataType.HALF, trt.DataType.INT32
    assert attention.get_output_data_types([half] * 5 + [whole] * 4) == [half] * 3
    assert [attention.get_aliased_input(output) for output in range(attention.num_outputs)] == [-1, 3, 4]
    sampling = created("StatefulSampling", sampling_fields(), Recorder())
    dims = [trt.DimsExprs(size) for size in sampling_dims(2)]
    assert sampling.get_output_shapes(dims, [], None) == [[2], [2], [2, 3], [2, 3], [STATE_LINES, 50]]
    single = trt.DataType.FLOAT
    assert sampling.get_output_data_types([]) == [whole, single, whole, single, whole]
    counts = STATEFUL_SAMPLING.inputs.index("counts")
    assert [sampling.get_aliased_input(output) for output in range(sampling.num_outputs)] == [-1, -1, -1, -1, counts]


def sampling_fields() -> Any:
    return fields({"logits_dtype": "float32", "launches": sampling_table(SAMPLING, STEPS).to_json()})


@pytest.mark.parametrize(
    ("dtype", "cache_dtype", "stored"),
    [
        ("float32", "float32", "FLOAT"), ("float16", "float16", "HALF"), ("bfloat16", "bfloat16", "BF16"),
        ("float16", "int8", "INT8"), ("bfloat16", "float8_e4m3", "INT8"),
    ],
)  # fmt: skip
def test_exactly_one_format_is_supported_at_every_place(dtype: str, cache_dtype: str, stored: str) -> None:
    table = attention_table(attention_shape(dtype, cache_dtype), STEPS)
    plugin = created("PagedAttention", attention_fields(table, dtype, cache_dtype), Recorder())
    own = {"float32": "FLOAT", "float16": "HALF", "bfloat16": "BF16"}[dtype]
    wanted = [own, own, own, stored, stored, "INT32", "INT32", "INT32", "INT32", own, stored, stored]
    assert plugin.format_combination_limit == 1
    found: dict[int, list[str]] = {}
    layouts, types = trt.TensorFormat.__members__.values(), trt.DataType.__members__.items()
    for place, layout, (name, kind) in itertools.product(range(len(wanted)), layouts, types):
        descriptions = [trt.DynamicPluginTensorDesc() for _ in wanted]
        for description in descriptions:
            description.desc.format, description.desc.type = layout, kind
        if plugin.supports_format_combination(place, descriptions, 9):
            assert layout == trt.TensorFormat.LINEAR
            found.setdefault(place, []).append(name)
    assert found == {place: [name] for place, name in enumerate(wanted)}


def test_workspace_holds_the_scratch_of_every_step_within_the_profile() -> None:
    plugin = created("PagedAttention", attention_fields(attention_table(attention_shape(), STEPS)), Recorder())
    asked = []
    for step in STEPS:
        inputs = ranged(attention_dims(step.tokens, step.rows))
        asked.append(plugin.get_workspace_size(inputs, []))
        scratch = paged_attention_scratch(attention_shape(), [step])
        need = sum(prod(map(int, part.shape)) * DTYPE_BYTES[part.dtype] for part in scratch)
        assert need <= asked[-1] < need + 256 * len(scratch)
    wide = ranged(attention_dims(64, ROWS))
    for tensor, low in zip(wide, attention_dims(1, 1), strict=True):
        tensor.min = low
    assert plugin.get_workspace_size(wide, []) == max(asked) > min(asked)


# -- run: launches as the rules say, on TensorRT's stream, in place


def addresses(inputs: Sequence[str], outputs: Sequence[str], aliases: dict[str, str]) -> dict[str, int]:
    made = {name: 0x2000_0000 + place * 0x1_0000 for place, name in enumerate((*inputs, *outputs))}
    return made | {output: made[source] for output, source in aliases.items()}


def enqueued(plugin: Any, dims: Sequence[Sequence[int]], at: dict[str, int]) -> None:
    inputs, outputs = plugin.schema.inputs, plugin.schema.outputs
    plugin.enqueue(
        described(dims), [], [at[name] for name in inputs], [at[name] for name in outputs], WORKSPACE, STREAM
    )


def check_launches(recorder: Recorder, wanted: Sequence[Launch], at: dict[str, int], workspace_bytes: int) -> None:
    assert [(kernel, grid, stream) for kernel, grid, _, stream in recorder.launches] == [
        (launch.kernel.name, launch.grid, STREAM) for launch in wanted
    ]
    scratch: dict[str, int] = {}
    for (_, _, pointers, _), launch in zip(recorder.launches, wanted, strict=True):
        for address, pointer in zip(pointers, launch.kernel.pointers, strict=True):
            if pointer.name in at:
                assert address == at[pointer.name], pointer.name
            else:
                assert scratch.setdefault(pointer.name, address) == address, "kernels hand on by one address"
                assert WORKSPACE <= address < WORKSPACE + workspace_bytes
                assert address % 256 == 0
    assert len(set(scratch.values())) == len(scratch)


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.key)
@pytest.mark.parametrize("cache_dtype", ["float16", "int8"])
def test_attention_launches_what_its_rule_says(step: StepShape, cache_dtype: str) -> None:
    shape, recorder = attention_shape(cache_dtype=cache_dtype), Recorder()
    plugin = created(
        "PagedAttention", attention_fields(attention_table(shape, STEPS), cache_dtype=cache_dtype), recorder
    )
    context = plugin.attach_to_context(None)
    dims = attention_dims(step.tokens, step.rows, cache_dtype)
    context.on_shape_change(described(dims), [])
    at = addresses(plugin.schema.inputs, plugin.schema.outputs, dict(PagedAttentionPlugin.aliases))
    enqueued(context, dims, at)
    # a decode step with as many tokens and rows as a prefill step can't be told from it: prefill's kernels do both
    twin = StepShape("prefill", step.tokens, step.rows)
    rule = paged_attention_launches(shape, twin if twin in STEPS else step)
    assert {launch.kernel.name for launch in rule} <= recorder.prepared
    check_launches(recorder, rule, at, plugin.get_workspace_size(ranged(dims), []))


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_sampling_launches_what_its_rule_says(rows: int) -> None:
    recorder = Recorder()
    plugin = created("StatefulSampling", sampling_fields(), recorder)
    plugin.on_shape_change(described(sampling_dims(rows)), [])
    at = addresses(plugin.schema.inputs, plugin.schema.outputs, dict(StatefulSamplingPlugin.aliases))
    enqueued(plugin, sampling_dims(rows), at)
    rule = stateful_sampling_launches(SAMPLING, StepShape("decode", rows, rows))
    check_launches(recorder, rule, at, plugin.get_workspace_size(ranged(sampling_dims(rows)), []))


@pytest.mark.parametrize(("tokens", "rows"), [(3, 3), (64, 2), (65, 4), (0, 0)])
def test_a_step_that_is_not_recorded_is_refused_before_anything_is_launched(tokens: int, rows: int) -> None:
    recorder = Recorder()
    plugin = created("PagedAttention", attention_fields(attention_table(attention_shape(), STEPS)), recorder)
    dims = attention_dims(tokens, rows)
    at = addresses(plugin.schema.inputs, plugin.schema.outputs, dict(PagedAttentionPlugin.aliases))
    for call in (
        lambda: plugin.on_shape_change(described(dims), []),
        lambda: plugin.configure_plugin(ranged(dims), []),
        lambda: enqueued(plugin, dims, at),
    ):
        with pytest.raises(DeviceError, match=rf"\({tokens}, {rows}\).*pad it to a bucket"):
            call()
    assert not recorder.launches


def test_caches_bound_elsewhere_are_refused() -> None:
    recorder = Recorder()
    plugin = created("PagedAttention", attention_fields(attention_table(attention_shape(), STEPS)), recorder)
    plugin.attach_to_context(None)
    at = addresses(plugin.schema.inputs, plugin.schema.outputs, {"key_cache_out": "key_cache"})
    with pytest.raises(DeviceError, match="value_cache_out"):
        enqueued(plugin, attention_dims(2, 2), at)
    assert not recorder.launches


def test_nothing_is_launched_on_what_a_build_makes_up() -> None:
    """TensorRT times a plugin on inputs of its own, whose slots and tables point anywhere; kernels load anyway."""
    table, recorder = attention_table(attention_shape(), STEPS), Recorder()
    built = created("PagedAttention", attention_fields(table), recorder, trt.TensorRTPhase.BUILD)
    at = addresses(built.schema.inputs, built.schema.outputs, {})
    for plugin in (built, built.clone(), built.clone().attach_to_context(None)):
        plugin.on_shape_change(described(attention_dims(2, 2)), [])
        enqueued(plugin, attention_dims(2, 2), at)
    assert not recorder.launches
    assert recorder.prepared
    with pytest.raises(DeviceError, match=r"\(3, 3\)"):
        enqueued(built, attention_dims(3, 3), at)
    kept = collection([trt.PluginField(f.name, np.array(f.data), f.type) for f in built.get_fields_to_serialize()])
    served = created("PagedAttention", kept, recorder, trt.TensorRTPhase.RUNTIME).attach_to_context(None)
    enqueued(served, attention_dims(2, 2), addresses(built.schema.inputs, built.schema.outputs, dict(built.aliases)))
    assert recorder.launches


def test_crooked_addresses_are_refused() -> None:
    """Kernels are compiled for addresses that 16 divides: from another they would read past what they should."""
    recorder = Recorder()
    plugin = created("PagedAttention", attention_fields(attention_table(attention_shape(), STEPS)), recorder)
    plugin.attach_to_context(None)
    at = addresses(plugin.schema.inputs, plugin.schema.outputs, dict(plugin.aliases))
    with pytest.raises(DeviceError, match="PagedAttention got context_lens, k at no multiple of 16"):
        enqueued(plugin, attention_dims(2, 2), at | {"k": at["k"] + 8, "context_lens": at["context_lens"] + 4})
    assert not recorder.launches


def test_clones_share_the_table_and_the_launcher() -> None:
    recorder = Recorder()
    plugin = created("PagedAttention", attention_fields(attention_table(attention_shape(), STEPS)), recorder)
    clone = plugin.attach_to_context(None)
    assert clone is not plugin
    del plugin
    at = addresses(clone.schema.inputs, clone.schema.outputs, dict(clone.aliases))
    enqueued(clone.clone(), attention_dims(1, 1), at)
    assert recorder.launches
    for capability in trt.PluginCapabilityType.__members__.values():
        assert clone.get_capability_interface(capability) is clone


def test_one_tactic() -> None:
    plugin = created("StatefulSampling", sampling_fields(), Recorder())
    assert plugin.get_valid_tactics() == [1]
    plugin.set_tactic(1)
    plugin.set_tactic(0)  # what TensorRT calls a plugin's default
    with pytest.raises(DeviceError, match="tactic 2"):
        plugin.set_tactic(2)
