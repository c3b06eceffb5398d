"""Does a stage hold more than its own layers? Peak RSS of each stage process against its weight bytes.

The bound of a stage is 1.15 x its weight bytes (from the files' headers) + 300 MB. loaded: when the
weights are in. worked: after a prompt of 256 tokens and an answer of 8. ratio, and one line a model: the
largest worked / bound over the stages of pipelines of 1, 2 and 3; 1 or less is within the bound.
"""

import asyncio
from dataclasses import dataclass
from pathlib import Path

from bench.engines import answer, model_folder, prompts, running_engine, shards
from bench.record import Spread, tell
from omlx.node.client import PING_EVERY_S
from omlx.node.engine import Engine

MODELS = ("smollm2-135m-instruct-f32", "gemma-3-270m-f32")
STAGES = (1, 2, 3)
PROMPT_TOKENS, ANSWER_TOKENS = 256, 8
VOCABULARY = 40_000


@dataclass(frozen=True, slots=True)
class Peak:
    """One stage's process; all in bytes."""

    weights: int
    loaded: int
    worked: int

    @property
    def bound(self) -> float:
        return 1.15 * self.weights + 300e6


async def peaks_by_now(engine: Engine) -> list[int]:
    """Every stage's peak RSS in bytes, as it answers a ping that was sent from now on."""
    # The next pong may be on its way already; the ones after it are not.
    await asyncio.sleep(3 * PING_EVERY_S)
    pongs = [stage.pong for stage in engine.pipeline.stages]
    return [pong.peak_rss_bytes for pong in pongs if pong is not None]


async def measure(folder: Path, stages: int) -> list[Peak]:
    (prompt,) = prompts(1, PROMPT_TOKENS, VOCABULARY)
    async with running_engine(folder, stages) as engine:
        loaded = [stage.loaded.peak_rss_bytes for stage in engine.pipeline.stages if stage.loaded is not None]
        await answer(engine, prompt, ANSWER_TOKENS)
        worked = await peaks_by_now(engine)
    weights = [stage.weights for stage in shards(folder, stages).stages]
    return [Peak(*sizes) for sizes in zip(weights, loaded, worked, strict=True)]


async def main() -> None:
    for model in MODELS:
        figures: dict[str, Spread] = {}
        worst = 0.0
        for stages in STAGES:
            for index, peak in enumerate(await measure(model_folder(model), stages)):
                name = f"stage_{index}_of_{stages}"
                figures[f"{name}_weights_mb"] = Spread.of([peak.weights / 1e6])
                figures[f"{name}_loaded_mb"] = Spread.of([peak.loaded / 1e6])
                figures[f"{name}_worked_mb"] = Spread.of([peak.worked / 1e6])
                worst = max(worst, peak.worked / peak.bound)
        tell("stage_rss", model, worst, figures)


if __name__ == "__main__":
    asyncio.run(main())
