"""Log-probs of engine and learner differ less where the learner takes the experts that the engine has chosen."""

import asyncio
from pathlib import Path

import pytest

from tests.bench.routing_mismatch import measured


@pytest.mark.parametrize("case", ["bfloat16", "behind"])
async def test_the_mismatch_is_lower_with_the_engines_experts(tmp_path: Path, case: str) -> None:
    """An engine in another dtype, and one with slightly older weights."""
    found = await asyncio.to_thread(measured, tmp_path, case)
    for name in ("mean |difference|", "99th percentile", "KL (k3)"):
        assert found["rollout"][name] < 0.7 * found["none"][name], found
