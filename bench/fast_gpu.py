"""What the engine itself costs on a fast GPU: Qwen3-8B's shape with random weights, in bfloat16.

    python -m bench.fast_gpu [FOLDER [BATCH ...]]      # FOLDER is built where it is not there: 16 GB

For 1, 4, 16 and 64 sequences: tokens/s through the engine, against bare loops in a process of their own:
mlx_lm's generate loop (1), plain batched steps, mlx_lm's BatchGenerator. Sides in turn, the order reversed
every round. A step here is the time in which the processor launches it (docs/LOG.md), and the processors of
shared machines change by half from second to second: hence short sides and many rounds. Needs a machine with
a GPU; not among the benches that run everywhere.
"""

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from bench.alternate import Run, alternate, ratio
from bench.engines import prompts, together
from bench.record import Spread, tell
from omlx.cluster.local_actor import compute_environment, place_local
from omlx.ids import ModelId
from omlx.node.engine import Engine
from omlx.node.layout import here
from omlx.node.limits import Limits
from omlx.node.pipeline import Pipeline, PipelineSpec
from omlx.node.scheduler import Scheduler

SHAPE = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
MODEL = "qwen3-8b shape, bf16"
LOOPS = {1: ("generate",), 4: ("steps",), 16: ("steps", "generator"), 64: ("steps", "generator")}
"""What a batch is compared with; the first is what its ratio is told of."""
PROMPT_TOKENS = 64
ANSWER_TOKENS = 128
ROUNDS = 12
MYSELF = (sys.executable, "-m", "bench.fast_gpu")
BARE_CACHE_BYTES = 16 * 2**30
"""MLX would keep what it frees up to the size of the GPU, which the engine's stage shares."""


def build(folder: Path) -> Path:
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm.models.qwen3 import Model, ModelArgs

    if (folder / "config.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    mx.random.seed(0)
    model = Model(ModelArgs.from_dict(SHAPE))
    model.set_dtype(mx.bfloat16)
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(SHAPE))
    return folder


# ------------------------------------------------------------------ the bare side, in its own process


def bare(folder: Path) -> None:
    """Answers lines of (loop, batch) with tokens/s."""
    import mlx.core as mx
    from mlx_lm.utils import load_model

    mx.set_cache_limit(BARE_CACHE_BYTES)
    model, _ = load_model(folder)
    loops = {"generate": _generate, "steps": _steps, "generator": _generator}
    print("ready", flush=True)
    for line in sys.stdin:
        loop, batch = json.loads(line)
        print(json.dumps(loops[loop](model, batch)), flush=True)


def _generate(model, batch: int) -> float:
    import mlx.core as mx
    from mlx_lm.generate import generate_step

    [prompt] = prompts(1, PROMPT_TOKENS, 100_000)
    times = [time.perf_counter() for _ in generate_step(mx.array(prompt), model, max_tokens=ANSWER_TOKENS)]
    return (len(times) - 1) / (times[-1] - times[0])


def _steps(model, batch: int) -> float:
    """Batched steps as fast as they can be asked for: the next is built while the last computes."""
    import mlx.core as mx
    from mlx_lm.models.cache import BatchKVCache

    caches = [BatchKVCache([0] * batch) for _ in model.layers]
    tokens = mx.array(prompts(batch, PROMPT_TOKENS, 100_000))
    y = mx.argmax(model(tokens, cache=caches)[:, -1], axis=-1)
    mx.eval(y)
    started = time.perf_counter()
    for _ in range(ANSWER_TOKENS - 1):
        after = mx.argmax(model(y[:, None], cache=caches)[:, -1], axis=-1)
        mx.async_eval(after)
        y.tolist()
        y = after
    y.tolist()
    return batch * (ANSWER_TOKENS - 1) / (time.perf_counter() - started)


def _generator(model, batch: int) -> float:
    from mlx_lm.generate import BatchGenerator

    generator = BatchGenerator(model, max_tokens=ANSWER_TOKENS, completion_batch_size=batch)
    generator.insert([list(prompt) for prompt in prompts(batch, PROMPT_TOKENS, 100_000)])
    count, started = 0, 0.0
    while count < batch * ANSWER_TOKENS:
        found = generator.next_generated()
        if len(found) == batch and not started:
            started, count = time.perf_counter(), 0
        count += len(found)
        if not found and started:
            break
    generator.close()
    return (count - batch) / (time.perf_counter() - started)


# ------------------------------------------------------------------ the engine's side


async def through_engine(engine: Engine, batch: int) -> float:
    """Tokens/s while all of the batch decode."""
    return await together(engine, prompts(batch, PROMPT_TOKENS, 100_000), ANSWER_TOKENS)


@asynccontextmanager
async def both(folder: Path) -> AsyncIterator[tuple[Engine, asyncio.subprocess.Process]]:
    process = await asyncio.create_subprocess_exec(
        *(*MYSELF, "bare", str(folder)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=os.environ | compute_environment(),
    )
    assert process.stdout is not None
    await process.stdout.readline()
    limits = Limits(places=64, queue=64, stages=1, step_tokens=512, slowdown=2.7, capacity_tokens=10**6)
    # The bare process needs its part.
    spec = PipelineSpec(folder, here([(0, None)], 0.4), load_timeout_s=300, step_timeout_s=120)
    engine = Engine(ModelId("qwen3-8b-shape"), Scheduler(limits), Pipeline(spec, place_local))
    await engine.open(lambda done, total: None)
    try:
        yield engine, process
    finally:
        await engine.close()
        process.terminate()
        await process.wait()


async def main(folder: Path, batches: tuple[int, ...]) -> None:
    # In a process of its own: what it made would stay on the GPU.
    builder = await asyncio.create_subprocess_exec(*MYSELF, "build", str(folder))
    if await builder.wait():
        raise SystemExit("bench: the model was not built")
    for batch in batches:
        # Two processes share the GPU; what MLX keeps of other sizes would fill it.
        async with both(folder) as (engine, process):
            await compare(engine, process, batch)


async def compare(engine: Engine, process: asyncio.subprocess.Process, batch: int) -> None:
    async def plain(loop: str) -> float:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps([loop, batch]).encode() + b"\n")
        rate: float = json.loads(await process.stdout.readline())
        return rate

    loops = LOOPS.get(batch, ("steps",))
    sides: dict[str, Run] = {loop: partial(plain, loop) for loop in loops}
    found = await alternate({"engine": partial(through_engine, engine, batch)} | sides, ROUNDS)
    figures = {f"{name}_tps": Spread.of(values) for name, values in found.items()}
    figures |= {
        f"engine_over_{loop}": Spread.of(a / b for a, b in zip(found["engine"], found[loop], strict=True))
        for loop in loops
    }
    tell(f"fast_gpu_{batch}", MODEL, ratio(found["engine"], found[loops[0]]), figures)


if __name__ == "__main__":
    if sys.argv[1:2] == ["bare"]:
        bare(Path(sys.argv[2]))
    elif sys.argv[1:2] == ["build"]:
        build(Path(sys.argv[2]))
    else:
        where = Path(sys.argv[1]) if len(sys.argv) > 1 else Path("bench/out/qwen3-8b-shape")
        asyncio.run(main(where, tuple(map(int, sys.argv[2:])) or tuple(LOOPS)))
