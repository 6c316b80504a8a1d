"""A built-in engine as a process: ``python -m tests.engine_child MODEL_DIR PORT [STEPS]``. Prints its URL, and ends
with its input.

It does no more than ``STEPS`` decoding steps, if the number is given.
"""

import asyncio
import sys
from pathlib import Path

from tests.engine_serving import hold
from tidemill.actors.config import EngineConfig
from tidemill.actors.serving.authority import Authority
from tidemill.actors.serving.builtin.engine import BuiltinEngine


async def main(model_dir: str, port: int, *held_after: int) -> None:
    engine = BuiltinEngine(Path(model_dir), EngineConfig(), authority=Authority(unguarded=True))
    engine.load()
    for steps in held_after:
        hold(engine, after=steps)
    print(await engine.start(port=port), flush=True)
    engine.phase = "serving"
    await asyncio.to_thread(sys.stdin.read)
    await engine.close()


asyncio.run(main(sys.argv[1], *map(int, sys.argv[2:])))
