"""A built-in engine as a process: ``python -m tests.engine_child MODEL_DIR PORT``. Prints its URL, and ends with its input."""

import asyncio
import sys
from pathlib import Path

from actors.config import EngineConfig
from actors.serving.builtin.engine import BuiltinEngine


async def main(model_dir: str, port: int) -> None:
    engine = BuiltinEngine(Path(model_dir), EngineConfig())
    engine.load()
    print(await engine.start(port=port), flush=True)
    engine.phase = "serving"
    await asyncio.to_thread(sys.stdin.read)
    await engine.close()


asyncio.run(main(sys.argv[1], int(sys.argv[2])))
