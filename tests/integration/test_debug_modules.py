"""Learner and built-in engine agree module by module; planted faults in one of them are found, with the layer."""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import torch
from aiohttp import web
from aiohttp.test_utils import TestServer
from safetensors.torch import load_file, save_file

from tests.engine_serving import serving
from tests.families import write_family
from tests.integration import debug_ranks
from tests.integration.debug_ranks import DENSE, DUMPED, DUMPED_OF_FOUR, EXPERTS, LATENT, PROMPTS
from tests.integration.expert_ranks import VOCAB
from tests.launched import run_tidemill
from tests.learner_steps import run_ranks
from tests.refusals import refusal
from tests.tiny_models import SERVED, write_tiny_model
from tidemill.actors.serving.builtin.scoring import score_directory
from tidemill.launch.cli.main import main
from tidemill.launch.cli.weights import between_tensors, tensors_of
from tidemill.learner.backends.fsdp import backend as fsdp
from tidemill.learner.backends.fsdp import policy as fsdp_policy
from tidemill.learner.backends.megatron.backend import module_outputs
from tidemill.learner.backends.megatron.model import build_policy
from tidemill.learner.debug.comparison import Comparison, compare_modules
from tidemill.learner.debug.train_file import ModuleDump, read_modules, write_modules
from tidemill.learner.layout import parallel

LAYER = "model.layers.1.self_attn"


def dump(outputs: dict[str, np.ndarray], source: str) -> ModuleDump:
    return ModuleDump(source=source, dtype="float32", prompts=PROMPTS, outputs=outputs)


def compared(here: parallel.Parallel, learner: Path, engine: Path) -> Comparison:
    """Compare the learner with the model of one directory and the engine with that of another."""
    policy = build_policy(learner, dtype="float32", parallel=here)
    return compare_modules(
        dump(module_outputs(policy, PROMPTS), "learner"), dump(score_directory(engine, PROMPTS), "engine")
    )


@pytest.mark.parametrize(
    ("family", "changes"), [*((family, {}) for family in SERVED), ("qwen3_moe", {"mlp_only_layers": [0]})]
)
def test_learner_and_engine_agree_in_every_module(
    here: parallel.Parallel, tmp_path: Path, family: str, changes: dict[str, Any]
) -> None:
    model = write_tiny_model(tmp_path, family, **changes)
    found = compared(here, model, model)
    assert found.first is None
    assert found.notes == []
    layers = []
    for layer in (0, 1):
        mixed = family == "qwen3_moe" and layer not in changes.get("mlp_only_layers", ())
        parts = ("attention.qkv", "attention.core", "attention", *(["mlp.experts"] if mixed else []), "mlp")
        layers += [*(f"layers.{layer}.{part}" for part in parts), f"layers.{layer}"]
    assert list(found.compared) == ["embedding", *layers, "norm", "log_probs"]


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_fsdp_and_engine_agree_in_the_modules_of_a_layer(here: parallel.Parallel, tmp_path: Path, family: str) -> None:
    model = write_tiny_model(tmp_path, family)
    policy = fsdp_policy.build_policy(model, dtype="float32", parallel=here)
    dumps = dump(fsdp.module_outputs(policy, PROMPTS), "learner"), dump(score_directory(model, PROMPTS), "engine")
    comparison = compare_modules(*dumps)
    assert comparison.first is None
    layers = [f"layers.{layer}{part}" for layer in (0, 1) for part in (".attention", ".mlp", "")]
    assert list(comparison.compared) == ["embedding", *layers, "norm", "log_probs"]


@pytest.mark.parametrize(
    ("family", "modules", "left_out"),
    [
        ("falcon_h1", [["attention", "mlp"]] * 4, "mamba"),
        ("nemotron_h", [["attention"], ["mlp"], ["attention"], ["mlp"]], "norm"),
    ],
)
def test_layers_of_other_forms_are_dumped(
    here: parallel.Parallel,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    family: str,
    modules: list[list[str]],
    left_out: str,
) -> None:
    caplog.set_level("INFO")
    policy = fsdp_policy.build_policy(write_family(tmp_path, family), dtype="float32", parallel=here)
    outputs = fsdp.module_outputs(policy, PROMPTS[:1])
    layers = [f"layers.{layer}" for layer in range(len(modules))]
    inner = [f"{layer}.{name}" for layer, names in zip(layers, modules, strict=True) for name in names]
    assert set(outputs) == {f"0.{name}" for name in ("embedding", *layers, *inner, "norm", "log_probs")}
    [line] = [message for message in caplog.messages if "left out of the dump" in message]
    assert left_out in line


def test_latent_attention_is_dumped_without_its_projection(here: parallel.Parallel, tmp_path: Path) -> None:
    policy = build_policy(write_tiny_model(tmp_path, "deepseek_v3"), dtype="float32", parallel=here)
    outputs = module_outputs(policy, PROMPTS, "layers.1.attention*")
    assert set(outputs) == {f"{prompt}.layers.1.attention{part}" for prompt in (0, 1) for part in ("", ".core")}
    assert outputs["0.layers.1.attention.core"].shape == (len(PROMPTS[0]), 4 * 12)


def permuted(tensors: dict[str, torch.Tensor], model: Path) -> None:
    """Exchange the first two heads of the queries of layer 1."""
    weight = tensors[f"{LAYER}.q_proj.weight"]
    size = len(weight) // 4
    weight[: 2 * size] = weight[: 2 * size].roll(size, 0)


def without_bias(tensors: dict[str, torch.Tensor], model: Path) -> None:
    tensors[f"{LAYER}.k_proj.bias"].zero_()


def rotary(tensors: dict[str, torch.Tensor], model: Path) -> None:
    file = model / "config.json"
    config = json.loads(file.read_text())
    assert config["rope_parameters"]["rope_theta"] != 500.0
    config["rope_parameters"]["rope_theta"] = 500.0
    file.write_text(json.dumps(config))


def stale(tensors: dict[str, torch.Tensor], model: Path) -> None:
    """Give the MLP of layer 1 the weights of another version."""
    for name in tensors:
        if name.startswith("model.layers.1.mlp"):
            tensors[name] += 0.01 * torch.randn(tensors[name].shape, generator=torch.Generator().manual_seed(1))


def untied_head(tensors: dict[str, torch.Tensor], model: Path) -> None:
    tensors["lm_head.weight"][40:60] *= 1.5


def dropped_expert(tensors: dict[str, torch.Tensor], model: Path) -> None:
    """Zero an expert of layer 1, to which tokens of the prompts go."""
    tensors[f"{EXPERT.format(6)}.down_proj.weight"].zero_()


def exchanged_experts(tensors: dict[str, torch.Tensor], model: Path) -> None:
    """Exchange two experts of layer 1, but not their rows of the router."""
    for part in PARTS:
        one, other = (tensors[f"{EXPERT.format(number)}.{part}_proj.weight"] for number in (2, 6))
        kept = one.clone()
        one.copy_(other)
        other.copy_(kept)


def unreachable_expert(tensors: dict[str, torch.Tensor], model: Path) -> None:
    """Take the row of an expert out of the router of layer 1: its tokens go to others."""
    tensors["model.layers.1.mlp.gate.weight"][6].zero_()


EXPERT = "model.layers.1.mlp.experts.{}"
PARTS = ("down", "gate", "up")
FAULTS: list[tuple[Callable[..., None], str, str, list[str]]] = [
    (permuted, "qwen2", "layers.1.attention.qkv", [f"{LAYER}.q_proj.weight"]),
    (without_bias, "qwen2", "layers.1.attention.qkv", [f"{LAYER}.k_proj.bias"]),
    (rotary, "qwen2", "layers.0.attention.core", []),
    (stale, "qwen2", "layers.1.mlp", [f"model.layers.1.mlp.{part}_proj.weight" for part in PARTS]),
    (untied_head, "qwen2", "log_probs", ["lm_head.weight"]),
    (dropped_expert, "qwen3_moe", "layers.1.mlp", [f"{EXPERT.format(6)}.down_proj.weight"]),
    (unreachable_expert, "qwen3_moe", "layers.1.mlp.experts", ["model.layers.1.mlp.gate.weight"]),
    (
        exchanged_experts,
        "qwen3_moe",
        "layers.1.mlp",
        [f"{EXPERT.format(number)}.{part}_proj.weight" for number in (2, 6) for part in PARTS],
    ),
]


@pytest.mark.parametrize(("plant", "family", "module", "names"), FAULTS, ids=[one[0].__name__ for one in FAULTS])
def test_a_planted_fault_is_found_with_its_layer(
    here: parallel.Parallel, tmp_path: Path, plant: Callable[..., None], family: str, module: str, names: list[str]
) -> None:
    sound, faulty = write_tiny_model(tmp_path / "sound", family), tmp_path / "faulty"
    shutil.copytree(sound, faulty)
    tensors = load_file(faulty / "model.safetensors")
    plant(tensors, faulty)
    save_file(tensors, faulty / "model.safetensors", metadata={"format": "pt"})
    found = compared(here, sound, faulty)
    assert found.first is not None
    assert found.first.name == module
    differs = between_tensors("", tensors_of(sound), tensors_of(faulty)).differs
    assert [line.partition(":")[0] for line in differs] == names


# ---- every layout, in a world of two


def renumbered(model: Path, to: Path) -> Path:
    """Write the model with the weights of layers 0 and 1 as those of layers 2 and 3."""
    shutil.copytree(model, to)
    tensors = load_file(model / "model.safetensors")
    for name in tensors:
        for layer in (2, 3):
            if f".layers.{layer}." in name:
                tensors[name] = tensors[name.replace(f".{layer}.", f".{layer - 2}.", 1)].clone()
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    return to


class World:
    """The dumps of one process and of the ranks."""

    def __init__(self, here: parallel.Parallel, root: Path) -> None:
        self.models = {
            family: write_tiny_model(root / family, family, vocab_size=VOCAB, num_hidden_layers=4)
            for family in (DENSE, EXPERTS, LATENT)
        }
        self.out = root / "out"
        self.out.mkdir()
        for family, model in self.models.items():
            outputs = module_outputs(build_policy(model, dtype="float32", parallel=here), PROMPTS)
            write_modules(self.of_one(family), outputs, prompts=PROMPTS, dtype="float32", source="learner")
        offset = renumbered(self.models[DENSE], root / "offset")
        old = write_tiny_model(root / "old", DENSE, vocab_size=VOCAB, num_hidden_layers=4, seed=1)
        faults = [
            ("offset", "PP2", debug_ranks.offset_stage, offset),
            ("stale layer", "TP2", partial(debug_ranks.stale_shard, "decoder.layers.2."), old),
            ("stale mlp", "TP2 without SP", partial(debug_ranks.stale_shard, "decoder.layers.1.mlp."), old),
        ]
        run_ranks(debug_ranks.modules, (self.models, DUMPED, faults), world=2, out=self.out, timeout_s=300)

    def of_one(self, family: str) -> Path:
        return self.out / f"{family}.safetensors"


@pytest.fixture(scope="module")
def world(here: parallel.Parallel, tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(here, tmp_path_factory.mktemp("world"))


def assert_same_modules(ours: Path, wanted: Path) -> None:
    found = compare_modules(read_modules(ours), read_modules(wanted))
    assert found.first is None and found.notes == []
    assert list(read_modules(ours).outputs) == list(read_modules(wanted).outputs), "in the order of computation"


@pytest.mark.parametrize(("family", "layout"), DUMPED)
def test_the_modules_of_every_layout_are_those_of_one_process(world: World, family: str, layout: str) -> None:
    """Whole ones, with queries, keys and values of all ranks, and with the layers' numbers in the whole model."""
    assert_same_modules(world.out / f"{family} {layout}.safetensors", world.of_one(family))


@pytest.mark.slow
def test_the_modules_of_four_ranks_are_those_of_one_process(world: World) -> None:
    run_ranks(debug_ranks.modules, (world.models, DUMPED_OF_FOUR, []), world=4, out=world.out, timeout_s=300)
    for family, layout in DUMPED_OF_FOUR:
        assert_same_modules(world.out / f"{family} {layout}.safetensors", world.of_one(family))


@pytest.mark.parametrize(
    ("fault", "module"),
    [("offset", "layers.2.attention.qkv"), ("stale layer", "layers.2.attention.qkv"), ("stale mlp", "layers.1.mlp")],
)
def test_a_fault_of_one_rank_is_found_with_its_layer(
    world: World, fault: str, module: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A stage with the layers of another one, and a tensor-parallel rank with older weights: against the engine, by the
    command.
    """
    engine = tmp_path / "engine.safetensors"
    write_modules(
        engine, score_directory(world.models[DENSE], PROMPTS), prompts=PROMPTS, dtype="float32", source="engine"
    )
    assert main(["debug", "compare", str(world.out / f"{fault}.safetensors"), str(engine)]) == 1
    equal, first, *_ = capsys.readouterr().out.splitlines()
    before = list(dict.fromkeys(name.split(".", 1)[1] for name in read_modules(engine).outputs))
    assert equal == f"equal: {', '.join(before[: before.index(module)])}"
    assert first.startswith(f"DIFFERS first in {module}: ")


def test_names_choose_modules_and_long_prompts_are_refused(here: parallel.Parallel, tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path)
    policy = build_policy(model, dtype="float32", parallel=here)
    want = {
        f"{n}.layers.1{part}"
        for n in (0, 1)
        for part in ("", ".mlp", ".attention", ".attention.qkv", ".attention.core")
    }
    for outputs in (module_outputs(policy, PROMPTS, "layers.1*"), score_directory(model, PROMPTS, "layers.1*")):
        assert outputs.keys() == want
    with refusal(ValueError, got="300 tokens, the largest 1"):
        score_directory(model, [[1] * 300])
    for module in policy.module.modules():
        assert not module._forward_hooks  # none stays in the model


def test_the_commands_score_and_compare(
    here: parallel.Parallel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``debug score`` of an engine's weights against a dump of the learner: equal, and not after a fault."""
    sound, prompts = write_tiny_model(tmp_path / "sound"), tmp_path / "prompts.jsonl"
    prompts.write_text("".join(f"{json.dumps(one)}\n" for one in PROMPTS))
    ours = tmp_path / "learner.safetensors"
    outputs = module_outputs(build_policy(sound, dtype="float32", parallel=here), PROMPTS)
    write_modules(ours, outputs, prompts=PROMPTS, dtype="float32", source="learner")
    other = write_tiny_model(tmp_path / "other", seed=1)
    results = {}
    for model in (sound, other):
        out = tmp_path / f"{model.name}.safetensors"
        assert (
            main(
                [
                    "debug",
                    "score",
                    "--model",
                    str(model),
                    "--prompts",
                    str(prompts),
                    "--names",
                    "*",
                    "--out",
                    str(out),
                    "--json",
                ]
            )
            == 0
        )
        lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert [len(line["log_probs"]) for line in lines] == [6, 2]
        results[model.name] = lines[0]["log_probs"]
        assert main(["debug", "compare", str(ours), str(out)]) == int(model is other)
        assert ("DIFFERS first in embedding" if model is other else "equal: embedding") in capsys.readouterr().out
    np.testing.assert_allclose(results["sound"], outputs["0.log_probs"][:, 0], atol=1e-5)
    assert main(["debug", "score", "--model", str(tmp_path / "none"), "--prompts", str(prompts)]) == 2
    assert "--model: want a directory with a Hugging Face model" in capsys.readouterr().err


def test_both_implementations_score_a_directory_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``--by learner`` builds Megatron's model in the command's own process."""
    model, prompts = write_tiny_model(tmp_path / "model", "llama"), tmp_path / "prompts.jsonl"
    prompts.write_text("".join(f"{json.dumps(one)}\n" for one in PROMPTS))
    outs = {by: tmp_path / f"{by}.safetensors" for by in ("learner", "engine")}
    words = ["debug", "score", "--model", str(model), "--prompts", str(prompts), "--names", "*"]
    done = run_tidemill(*words, "--by", "learner", "--out", str(outs["learner"]))
    assert done.returncode == 0, done.errors
    assert main([*words, "--by", "engine", "--out", str(outs["engine"])]) == 0
    assert capsys.readouterr().out == done.out
    assert main(["debug", "compare", *map(str, outs.values())]) == 0


async def test_a_running_engine_scores_prompts_as_its_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, other = (write_tiny_model(tmp_path / str(seed), seed=seed) for seed in (1, 2))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(f"{json.dumps(one)}\n" for one in PROMPTS))
    by_http, by_other = tmp_path / "engine.safetensors", tmp_path / "other.safetensors"
    words = ["debug", "score", "--prompts", str(prompts)]
    async with serving(model) as served:
        url = served.engine.url
        assert await asyncio.to_thread(main, [*words, "--engine", url, "--out", str(by_http)]) == 0
        over_http = capsys.readouterr().out
        assert await asyncio.to_thread(main, [*words, "--engine", url, "--key-env", "NOT_SET_ANYWHERE"]) == 2
        assert "--key-env: want the variable NOT_SET_ANYWHERE set" in capsys.readouterr().err
        monkeypatch.setenv("SOME_KEY", "k")
        assert await asyncio.to_thread(main, [*words, "--engine", url, "--key-env", "SOME_KEY"]) == 0
    assert await asyncio.to_thread(main, [*words, "--model", str(model)]) == 0
    both = capsys.readouterr().out.splitlines()
    assert both == 2 * over_http.splitlines()
    assert await asyncio.to_thread(main, [*words, "--model", str(other), "--out", str(by_other)]) == 0
    capsys.readouterr()
    assert await asyncio.to_thread(main, ["debug", "compare", str(by_other), str(by_http)]) == 1
    compared = capsys.readouterr().out
    assert "DIFFERS first in log_probs" in compared and "--names '*'" in compared
    assert {name for _, name in (output.split(".", 1) for output in read_modules(by_other).outputs)} == {"log_probs"}


@asynccontextmanager
async def reporting(url: str, info: dict[str, str]) -> AsyncIterator[str]:
    """Serve the scores of the engine at ``url`` as an engine with another /server_info; yield its address."""

    async def score(request: web.Request) -> web.Response:
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{url}/generate", data=await request.read()) as answer,
        ):
            return web.json_response(await answer.json())

    async def server_info(request: web.Request) -> web.Response:
        return web.json_response(info)

    app = web.Application()
    app.add_routes([web.post("/generate", score), web.get("/server_info", server_info)])
    async with TestServer(app) as server:
        yield str(server.make_url("/"))


async def test_the_dtype_of_a_running_engine_decides_what_is_equal(
    here: parallel.Parallel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An output weight that is 1 % too large: found between two sides in float32, below the tolerance of bfloat16."""
    model, other, prompts = write_tiny_model(tmp_path / "model"), tmp_path / "other", tmp_path / "prompts.jsonl"
    prompts.write_text("".join(f"{json.dumps(one)}\n" for one in PROMPTS))
    shutil.copytree(model, other)
    tensors = load_file(other / "model.safetensors")
    tensors["lm_head.weight"] *= 1.01
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    ours = tmp_path / "learner.safetensors"
    outputs = module_outputs(build_policy(model, dtype="float32", parallel=here), PROMPTS)
    write_modules(ours, outputs, prompts=PROMPTS, dtype="float32", source="learner")

    async def ran(*words: str) -> tuple[int, str]:
        """Run a word of ``tidemill debug``; return its exit code and all that it printed."""
        code = await asyncio.to_thread(main, ["debug", *words])
        return code, "".join(capsys.readouterr())

    async def scored(url: str, *words: str) -> tuple[str, int, str]:
        """Return the dtype in the dump of an engine, the exit code of its comparison with the learner, and the notice
        of the default.
        """
        file = tmp_path / "engine.safetensors"
        code, text = await ran("score", "--engine", url, "--prompts", str(prompts), "--out", str(file), *words)
        assert code == 0, text
        notice = next((line for line in text.splitlines() if line.startswith("the engine reports no dtype")), "")
        return read_modules(file).dtype, (await ran("compare", str(ours), str(file)))[0], notice

    async with serving(model) as served:
        assert await scored(served.engine.url) == ("float32", 0, "")
    async with serving(other) as served:
        url = served.engine.url
        assert await scored(url) == ("float32", 1, "")
        code, text = await ran(
            "score", "--engine", url, "--prompts", str(prompts), "--out", str(tmp_path / "no"), "--dtype", "bfloat16"
        )
        assert code == 2 and "--dtype: want float32, which the engine reports, got bfloat16" in text
        for info in ({}, {"dtype": "auto"}):
            async with reporting(url, info) as silent:
                dtype, code, notice = await scored(silent)
                assert (dtype, code) == ("bfloat16", 0) and "bfloat16 is written" in notice
                assert await scored(silent, "--dtype", "float32") == ("float32", 1, "")
        async with reporting(url, {"dtype": "torch.bfloat16"}) as half:
            assert await scored(half) == ("bfloat16", 0, "")


def test_weights_of_two_dtypes_are_compared_in_the_narrower_one() -> None:
    whole = {"w": torch.tensor([1.0, 1.001, 3.0])}
    half = {"w": whole["w"].bfloat16()}
    assert between_tensors("", whole, half).differs == between_tensors("", half, whole).differs == []
    half["w"][2] = 2.5
    for sides in ((whole, half), (half, whole)):
        assert between_tensors("", *sides).differs == ["w: 1 of 3 numbers, largest difference 0.5"]


async def test_an_engines_weights_are_compared_with_a_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Over HTTP, by checksums: a flipped bit is found with its tensor."""
    model = write_tiny_model(tmp_path / "model", tied=True)
    name = "model.layers.1.mlp.up_proj.weight"
    async with serving(model, version=4) as served:
        url = served.engine.url
        assert await asyncio.to_thread(main, ["debug", "weights", url, str(model)]) == 0
        assert "all equal" in capsys.readouterr().out
        served.engine.updates.weights.named[name].view(-1).view(torch.uint8)[7] ^= 16
        assert await asyncio.to_thread(main, ["debug", "weights", str(model), url]) == 1
        shown = capsys.readouterr().out
        assert "DIFFERS in 1 of 24 tensors" in shown and f"  {name} (float32): want sum64" in shown
    assert await asyncio.to_thread(main, ["debug", "weights", str(model)]) == 2
    assert "want two of DIR|CHECKPOINT|URL" in capsys.readouterr().err
    assert await asyncio.to_thread(main, ["debug", "weights", str(model), str(model), "--model", str(model)]) == 2
    assert "--model: want none without --run-dir or a checkpoint" in capsys.readouterr().err
