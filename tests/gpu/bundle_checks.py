"""A whole bundle on a GPU: requests through the loop, in captured graphs, against the CPU target (in tests)."""

from __future__ import annotations

from pathlib import Path

from ostinato.builder.pipeline import build
from ostinato.engines.recipe import Recipe
from ostinato.runtime import LLM, RuntimeConfig, SamplingParams
from tests.bundles import LIMITS
from tests.tiny import write_tiny

from .kernel_store import Silent

PROMPTS = [list(range(3, 3 + length)) for length in (1, 5, 17, 40, 90, 2)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.9, top_p=0.9, seed=7, repetition_penalty=1.1, max_tokens=24, ignore_eos=True)


def built(folder: Path, target: str, capability: str) -> Path:
    """A bundle of a tiny random model in float32; `capability`: of the GPU, "" for the CPU target."""
    checkpoint = folder / "checkpoint"
    if not checkpoint.exists():
        write_tiny(checkpoint, "llama", tie_word_embeddings=True, max_position_embeddings=256)
    capabilities = (capability,) if capability else ()
    recipe = Recipe(
        "tiny", str(checkpoint), target, "float32", "float32", LIMITS, compute_capabilities=capabilities
    )  # fmt: skip
    build(recipe, folder / target, Silent())
    return folder / target


def answers(bundle: Path, config: RuntimeConfig) -> list[tuple[int, ...]]:
    """Token ids: all prompts together, greedy and then seeded, then each alone."""
    with LLM(bundle, config, progress=False) as llm:
        made = [*llm.generate(PROMPTS, GREEDY), *llm.generate(PROMPTS, SEEDED)]
        for prompt in PROMPTS:
            made += llm.generate([prompt], GREEDY)
    for completion in made:
        (choice,) = completion.choices
        assert choice.error is None, choice.error
    return [completion.choices[0].token_ids for completion in made]


def check_bundle(folder: Path, target: str, capability: str) -> None:
    """Every decode step is a replay, or refused; greedy tokens alone are those in company."""
    wanted = answers(built(folder, "cpu", ""), RuntimeConfig())
    found = answers(built(folder, target, capability), RuntimeConfig(strict_graphs=bool(capability)))
    count = len(PROMPTS)
    assert found[:count] == wanted[:count]
    assert found[2 * count :] == found[:count]
    assert found[count : 2 * count] == wanted[count : 2 * count]
