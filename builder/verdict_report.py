"""A verdict as a table for the terminal and as JSON for the record (offline)."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from typing import Any

from rich.table import Table

from ostinato.engines.errors import BuildError
from ostinato.engines.manifest import Manifest

from .verify import MAX_MEAN_KL, MIN_TOP1, NUM_TOKENS, ScheduleResult, Verdict

_CPUINFO = Path("/proc/cpuinfo")


def verdict_table(manifest: Manifest, verdict: Verdict) -> Table:
    """One line a check: what was found, what was wanted, and whether that is enough."""
    title = f"{manifest.name}: weights {manifest.weights}, KV cache {manifest.kv_cache}"
    table = Table("check", "found", "wanted", "", title=title, title_justify="left")
    exact = verdict.must_be_identical
    wanted = "all" if exact else "no bound"
    for result in verdict.schedules:
        table.add_row(result.schedule.name, _found(result), wanted, _word(not (exact and result.differences)))
    if together := _together(verdict):
        found = _share(together.num_as_alone, together.num_prompts)
        good = not exact or together.num_as_alone == together.num_prompts
        table.add_row(f"alone = in a batch of {together.schedule.max_rows}", found, wanted, _word(good))
    if verdict.must_be_as_alone:
        worst = min(verdict.schedules, key=lambda result: result.num_as_alone)
        found = _share(worst.num_as_alone, worst.num_prompts)
        table.add_row("alone = under every schedule", found, "all", _word(verdict.is_as_alone))
    positions = f" over {verdict.num_positions} positions"
    close, same = verdict.mean_kl <= MAX_MEAN_KL, verdict.top1 >= MIN_TOP1
    table.add_row("mean KL", f"{verdict.mean_kl:.1e} nats{positions}", f"at most {MAX_MEAN_KL}", _word(close))
    table.add_row("same best token", f"{verdict.top1:.2%}{positions}", f"at least {MIN_TOP1:.0%}", _word(same))
    table.add_row("verdict", "", "", "good" if verdict.is_good else "FAILED")
    table.caption = f"reference: transformers in float32; {NUM_TOKENS} greedy tokens a prompt"
    return table


def save_verdict(file: Path, manifest: Manifest, verdict: Verdict, command: str) -> None:
    """Put the verdict into `file` under the bundle's name; other bundles' entries stay. Raises BuildError."""
    entries: dict[str, Any] = {}
    if file.exists():
        try:
            entries = dict(json.loads(file.read_text()))
        except (ValueError, TypeError):
            raise BuildError(f"{file} is not a file of verdicts: give --json another name, or remove it") from None
    entries[manifest.name] = _entry(manifest, verdict, command)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(entries, indent=1, sort_keys=True) + "\n")


def _entry(manifest: Manifest, verdict: Verdict, command: str) -> dict[str, Any]:
    together = _together(verdict)
    return {
        "command": command,
        "machine": {"cpu": _cpu_model(), "cores": len(os.sched_getaffinity(0))},
        "identity": manifest.identity,
        "weights": manifest.weights,
        "kv_cache": manifest.kv_cache,
        "reference": "transformers, float32",
        "tokens_a_prompt": NUM_TOKENS,
        "must_be_identical": verdict.must_be_identical,
        "must_be_as_alone": verdict.must_be_as_alone,
        "schedules": [_schedule_entry(result) for result in verdict.schedules],
        "alone_as_in_a_batch": together and together.num_as_alone / together.num_prompts,
        "mean_kl_nats": verdict.mean_kl,
        "same_best_token": verdict.top1,
        "positions": verdict.num_positions,
        "is_good": verdict.is_good,
    }


def _schedule_entry(result: ScheduleResult) -> dict[str, Any]:
    return {
        "name": result.schedule.name,
        "max_rows": result.schedule.max_rows,
        "max_step_tokens": result.schedule.max_step_tokens,
        "prompts": result.num_prompts,
        "as_reference": result.num_identical,
        "as_alone": result.num_as_alone,
        "differences": [[place.prompt, place.token, place.margin] for place in result.differences],
    }


def _found(result: ScheduleResult) -> str:
    found = _share(result.num_identical, result.num_prompts)
    if not result.differences:
        return found
    first = result.differences[0]
    margins = [place.margin for place in result.differences]
    return (
        f"{found}; first difference: prompt {first.prompt}, token {first.token}; "
        f"reference's margin there: {min(margins):.2g} to {max(margins):.2g} logits"
    )


def _together(verdict: Verdict) -> ScheduleResult | None:
    """The result of whole prompts in a batch, None where the bundle takes one row."""
    alone = verdict.schedules[0].schedule
    for result in verdict.schedules:
        schedule = result.schedule
        if schedule.max_rows > 1 and schedule.max_step_tokens == alone.max_step_tokens and not schedule.prefix_cache:
            return result
    return None


def _share(count: int, total: int) -> str:
    return f"{count} of {total} prompts ({count / total:.0%})"


def _word(good: bool) -> str:
    return "ok" if good else "FAILED"


def _cpu_model() -> str:
    lines = _CPUINFO.read_text().splitlines() if _CPUINFO.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()
