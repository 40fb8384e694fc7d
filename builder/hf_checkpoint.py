"""Reads a Hugging Face folder: JSON configs and safetensors, never pickle (offline)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from ostinato.engines.errors import CheckpointError

from .checkpoint import F32, Checkpoint, Part
from .hf_config import config_from_hf

_FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_INDEX = "model.safetensors.index.json"


def read_hf_folder(folder: Path) -> Checkpoint:
    """Open a checkpoint folder; tensors stay on disk until they are read."""
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder} has no config.json: give a Hugging Face checkpoint folder or a .gguf file")
    config = _table(folder / "config.json")
    generation = _table(folder / "generation_config.json")
    tokenizer = _table(folder / "tokenizer_config.json")
    files = _tensor_files(folder)
    shapes: dict[str, tuple[int, ...]] = {}
    formats: dict[str, str] = {}
    for file in sorted(set(files.values())):
        with _opened(file) as tensors:
            for name in sorted(name for name, owner in files.items() if owner == file):
                part = tensors.get_slice(name)
                if part.get_dtype() not in _FLOATS:
                    raise CheckpointError(
                        f"{file}: {name} is stored as {part.get_dtype()}: this builder reads {', '.join(_FLOATS)}"
                    )
                shapes[name], formats[name] = tuple(part.get_shape()), _FLOATS[part.get_dtype()]

    def read(name: str, part: Part | None = None) -> F32:
        with _opened(files[name]) as tensors:
            stored = tensors.get_slice(name)[_index(part)] if part else tensors.get_tensor(name)
            array: F32 = stored.float().numpy()
        return array

    return Checkpoint(
        path=folder,
        config=config_from_hf(config, str(folder / "config.json")),
        shapes={name: shape for name, shape in shapes.items() if not name.endswith("rotary_emb.inv_freq")},
        formats=formats,
        read=read,
        eos_ids=_eos_ids(folder, config, generation, tokenizer),
        bos_id=_bos_id(folder, config, tokenizer),
    )


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """A safetensors file, mapped: only pages that are touched load. Raises CheckpointError for one that is cut."""
    try:
        with safe_open(file, framework="pt") as tensors:
            yield tensors
    except SafetensorError as error:
        raise CheckpointError(f"{file} does not read as safetensors ({error}): download it again") from None


def _index(part: Part) -> tuple[slice, ...]:
    return (*(slice(None),) * part.axis, slice(part.start, part.stop))


def _table(path: Path) -> dict[str, Any]:
    """A JSON object, or an empty one where there is no such file."""
    if not path.is_file():
        return {}
    try:
        table = json.loads(path.read_text())
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from None
    if not isinstance(table, dict):
        raise CheckpointError(f"{path} holds no JSON object: publish the checkpoint again")
    return table


def _tensor_files(folder: Path) -> dict[str, Path]:
    """Tensor name → the safetensors file that holds it."""
    if (folder / _INDEX).is_file():
        index = _table(folder / _INDEX)
        files = {name: folder / file for name, file in index.get("weight_map", {}).items()}
        if absent := sorted({file.name for file in files.values() if not file.is_file()}):
            raise CheckpointError(f"{folder} lacks the files {', '.join(absent)} that its index names: download them")
    elif (folder / "model.safetensors").is_file():
        with _opened(folder / "model.safetensors") as tensors:
            files = dict.fromkeys(tensors.keys(), folder / "model.safetensors")
    else:
        raise CheckpointError(f"{folder} has no *.safetensors: convert it, as pickled weights are not read")
    return files


def _eos_ids(
    folder: Path, config: dict[str, Any], generation: dict[str, Any], tokenizer: dict[str, Any]
) -> tuple[int, ...]:
    """Every id that any of the three files ends a turn with: models disagree with themselves, so all count."""
    found: set[int] = set()
    for table in (config, generation):
        ids = table.get("eos_token_id")
        found |= set(ids if isinstance(ids, list) else [] if ids is None else [ids])
    token_id = _token_id(folder, tokenizer.get("eos_token"))
    return tuple(sorted(found | ({token_id} if token_id is not None else set())))


def _bos_id(folder: Path, config: dict[str, Any], tokenizer: dict[str, Any]) -> int | None:
    bos = config.get("bos_token_id")
    return bos if isinstance(bos, int) else _token_id(folder, tokenizer.get("bos_token"))


def _token_id(folder: Path, token: Any) -> int | None:
    """The id of a token that tokenizer_config.json spells out, as text or as a table with `content`."""
    text = token.get("content") if isinstance(token, dict) else token
    if text is None:
        return None
    table = _table(folder / "tokenizer.json")
    for added in table.get("added_tokens", []):
        if added["content"] == text:
            return int(added["id"])
    vocab = table.get("model", {}).get("vocab", {})
    pieces = vocab if isinstance(vocab, dict) else {piece: index for index, (piece, _) in enumerate(vocab)}
    if text not in pieces:
        raise CheckpointError(f"{folder}: tokenizer_config.json names {text!r}, which tokenizer.json does not hold")
    return int(pieces[text])
