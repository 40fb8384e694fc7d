"""Where every buffer of a program lies on the device, and a step's inputs in its one upload (arithmetic, at start).

    a step's inputs:   input_ids │ positions │ … │ allowed, by lines │ what another rank sends
                       └───────────── one copy ──────────────┘

The order is the same for all step shapes, the offsets are not: each shape's inputs lie without gaps, and a captured
graph holds the addresses of its own shape. So do outputs, but that tokens come first: a step of any shape finds those
of the step before. All other buffers have one address, for the largest shape.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ostinato.engines.errors import BundleError
from ostinato.engines.io_table import Dim
from ostinato.engines.program import DTYPE_BYTES, Buffer, KernelCall, Program, StepShape
from ostinato.engines.sizes import MAX_LOGIT_BIAS, MAX_LOGPROBS, Limits, ModelSizes
from ostinato.plugins.feed_tokens import FEED_TOKENS

ALIGN = 256  # bytes; what TensorRT asks of addresses, and more than kernels do
TOKENS = "tokens"  # first of what comes down, at one address
TABLES = "block_tables"
MASKS = "allowed"  # last of what is uploaded: only the lines that a step uses go up
PASSED = ("hidden_in", "hidden_out")  # between stages, device to device: last of all, and never on the host
ONE_ADDRESS = ("cache", "state", "cut", "scratch", "weight")
BY_SHAPE = ("input", "output")


@dataclass(frozen=True)
class Place:
    """One tensor within a block of memory."""

    offset: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]

    @property
    def end(self) -> int:
        return self.offset + self.num_bytes


@dataclass(frozen=True)
class Layout:
    """Tensors of one block, each at a multiple of `ALIGN`, in order."""

    places: Mapping[str, Place]

    @property
    def num_bytes(self) -> int:
        """Up to the last one's end, rounded up; 0 for none."""
        return aligned(max((place.end for place in self.places.values()), default=0))


@dataclass(frozen=True)
class StepLayout:
    """A program's memory. `blocks`: kind → its tensors, for kinds with one address each.

    `inputs`, `outputs`: step shape's key → its tensors. `uploads`, `downloads`: step shape's key → how many bytes of
    its inputs come from the host, when all mask lines do, and of its outputs go there.
    """

    blocks: Mapping[str, Layout]
    inputs: Mapping[str, Layout]
    outputs: Mapping[str, Layout]
    uploads: Mapping[str, int]
    downloads: Mapping[str, int]

    def plain_spans(self, key: str) -> list[tuple[int, int]]:
        """Where a step's inputs lie that are a few numbers a row or token: bytes from, to; neither masks nor tables."""
        spans: list[tuple[int, int]] = []
        start: int | None = None
        for name, place in self.inputs[key].places.items():
            if name in (TABLES, MASKS, *PASSED):
                start = None
            elif start is None:
                start = place.offset
                spans.append((start, place.end))
            else:
                spans[-1] = (start, place.end)
        return spans

    def num_bytes(self, kind: str) -> int:
        """What a kind's block needs."""
        if kind in BY_SHAPE:
            layouts = self.inputs if kind == "input" else self.outputs
            return max((layout.num_bytes for layout in layouts.values()), default=0)
        return self.blocks[kind].num_bytes

    def upload_bytes(self, key: str, mask_lines: int) -> int:
        """How many bytes go up for a step that uses so many lines of the masks."""
        masks = self.inputs[key].places.get(MASKS)
        if masks is None:
            return self.uploads[key]
        assert mask_lines <= masks.shape[0], f"{mask_lines} mask lines in a step of {masks.shape[0]} rows"
        return masks.offset + mask_lines * (masks.num_bytes // masks.shape[0])


def step_layout(program: Program, limits: Limits, sizes: ModelSizes) -> StepLayout:
    """Lay out a rank's memory. Raises BundleError for a size, a type or a feed that this version does not know."""
    by_shape = [symbols(shape, limits, sizes) for shape in program.step_shapes]
    largest = {name: max(table[name] for table in by_shape) for name in by_shape[0]}
    of_kind = {kind: [one for one in program.buffers if one.kind == kind] for kind in (*ONE_ADDRESS, *BY_SHAPE)}
    ordered = {kind: sorted(of_kind[kind], key=_place_in_copy) for kind in BY_SHAPE}
    keys = [shape.key for shape in program.step_shapes]
    inputs, outputs = (
        {key: pack(ordered[kind], table) for key, table in zip(keys, by_shape, strict=True)} for kind in BY_SHAPE
    )
    _check_feed(program, outputs)
    return StepLayout(
        blocks={kind: pack(of_kind[kind], largest) for kind in ONE_ADDRESS if kind != "weight"}
        | {"weight": _weights(of_kind["weight"], largest)},
        inputs=inputs,
        outputs=outputs,
        uploads={key: _copied(layout) for key, layout in inputs.items()},
        downloads={key: _copied(layout) for key, layout in outputs.items()},
    )


def symbols(shape: StepShape, limits: Limits, sizes: ModelSizes) -> Mapping[str, int]:
    """What the symbols in a program's shapes stand for in one step."""
    return {
        "T": shape.tokens,
        "B": shape.rows,
        "B+1": shape.rows + 1,
        "S": shape.rows,
        "P": limits.max_blocks_per_row,
        "N": limits.num_blocks,
        "R": limits.num_state_lines,
        "V": sizes.vocab_size,
        "W": -(-sizes.vocab_size // 32),
        "M": MAX_LOGIT_BIAS,
        "K": MAX_LOGPROBS,
    }


def pack(buffers: Iterable[Buffer], table: Mapping[str, int]) -> Layout:
    """One after another."""
    places: dict[str, Place] = {}
    offset = 0
    for buffer in buffers:
        place = places[buffer.name] = Place(offset, _dtype(buffer), _shape(buffer, table))
        offset = aligned(place.end)
    return Layout(places)


def aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGN) * ALIGN


def _weights(buffers: Sequence[Buffer], table: Mapping[str, int]) -> Layout:
    """As weights.bin has them."""
    places = {one.name: Place(one.offset, _dtype(one), _shape(one, table)) for one in buffers}
    wrong = [name for name, place in places.items() if place.offset % ALIGN]
    if wrong:
        raise BundleError(f"{wrong[0]} is not at a multiple of {ALIGN} bytes in weights.bin: build the bundle again")
    return Layout(places)


def _place_in_copy(buffer: Buffer) -> int:
    known = {TOKENS: 0, MASKS: 2, **dict.fromkeys(PASSED, 3)}
    return known.get(buffer.name, 1)


def _check_feed(program: Program, outputs: Mapping[str, Layout]) -> None:
    """What feeds a step lies where the step before left it, whatever the shape of either."""
    calls = (call for call in program.calls if isinstance(call, KernelCall) and call.operator == FEED_TOKENS)
    for name in (call.arguments["last_tokens"] for call in calls):
        places = [layout.places.get(name) for layout in outputs.values()]
        if any(place is None or place.offset for place in places):
            raise BundleError(
                f"steps are fed from {name}, which is not first among the outputs: build the bundle again"
            )


def _copied(layout: Layout) -> int:
    """Up to the last tensor that the host sees."""
    return max((place.end for name, place in layout.places.items() if name not in PASSED), default=0)


def _dtype(buffer: Buffer) -> str:
    if buffer.dtype not in DTYPE_BYTES:
        raise BundleError(f"{buffer.name} is of type {buffer.dtype}, which is not known: install a newer ostinato")
    return buffer.dtype


def _shape(buffer: Buffer, table: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(_size(buffer, size, table) for size in buffer.shape)


def _size(buffer: Buffer, size: Dim, table: Mapping[str, int]) -> int:
    if isinstance(size, int):
        return size
    if size not in table:
        raise BundleError(f"{buffer.name} has size {size}, which is not known: install a newer ostinato")
    return table[size]
