"""The closed loop in one process, with a lag that is exact: the real engine and the real learner taking turns, no bus.

    prompts -> Scheduler (built-in engine, weights of version v - lag) -> reward -> Samples
            -> Plan -> Trainer (Megatron) -> version v + 1

For experiments in which the age of the data is the cause and everything else is held: deterministic for a seed, on one
core. Versions count batches; a batch may be trained in several optimizer steps. Weights of past versions are kept as
tensors and reach the engine as they do in a run: filled into a standby copy and flipped in between two decoding steps.
"""

import functools
import json
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tidemill.actors.generate_body import SamplingParams
from tidemill.actors.serving.builtin.batch import Event
from tidemill.actors.serving.builtin.blocks import blocks_of
from tidemill.actors.serving.builtin.runner import DecoderRunner
from tidemill.actors.serving.builtin.scheduler import Scheduler
from tidemill.actors.serving.builtin.sequence import Model, ResponseRequest
from tidemill.actors.serving.builtin.sequence import Sequence as Response
from tidemill.actors.serving.builtin.shape import ModelShape
from tidemill.actors.serving.builtin.weights import Weights, load_from_directory
from tidemill.actors.text.text import Text
from tidemill.bus.client.addresses import KeptPort
from tidemill.bus.wire.messages import Plan, Sample, Sampling, Span, Status
from tidemill.launch.settings.prepare import PrepareConfig, prepare
from tidemill.learner.algorithms.config import AlgorithmConfig
from tidemill.learner.batch.batch import StepBatch
from tidemill.learner.batch.batching import build_batches
from tidemill.learner.buffer.assignment import assign
from tidemill.learner.settings.config import OptimizerConfig
from tidemill.rewards.builtin.text import digits
from tidemill.rewards.port import RewardRequest

Corrupt = Callable[[list[Sample], "PinnedLoop"], list[Sample]]
"""Function that changes the engine's results, as a fault would."""
Named = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Task:
    """The task to learn, its model and its batches."""

    task: str = "copy"
    num_digits: int = 4
    hidden: int = 64
    heads: int = 16
    intermediate: int = 256
    lr: float = 1e-3
    eps: float = 1e-3
    """Epsilon of Adam. It is large, so that a converged policy is not shaken by its last rare mistakes (docs/log.md).
    """
    groups: int = 32
    group_size: int = 8
    minibatches: int = 4
    max_tokens: int = 1 << 20
    """Largest number of tokens of a micro-batch."""
    held_out: int = 128
    temperature: float = 1.0
    """Temperature of sampling, and of the log-probs on both sides."""

    def prepare_config(self, seed: int) -> PrepareConfig:
        return PrepareConfig(
            task=self.task,
            min_digits=self.num_digits,
            max_digits=self.num_digits,
            count=4096,
            seed=seed,
            model={
                "num_hidden_layers": 1,
                "hidden_size": self.hidden,
                "num_attention_heads": self.heads,
                "num_key_value_heads": self.heads // 2,
                "intermediate_size": self.intermediate,
                "rope_theta": 10.0,
                "max_position_embeddings": 64,
            },
        )


@dataclass(frozen=True, kw_only=True)
class EngineFault:
    """Deviation of an engine from its reports."""

    temperature: float = 0.0
    """Sampling temperature whatever the request has; 0 = that of the request."""
    top_p: float = 1.0
    weights: Callable[["PinnedLoop", int], Named] | None = None
    """Weights served in place of those of a version."""


class LocalEngine:
    """The built-in engine's scheduler with no server in front."""

    def __init__(self, model_dir: Path, *, max_running: int) -> None:
        shape = ModelShape.read(model_dir)
        text = Text.read(model_dir)
        assert text is not None
        self.text, self.eos_ids = text, frozenset(shape.eos_ids)
        weights = self._empty(shape)
        load_from_directory(weights, model_dir)
        self._standby, self._context = self._empty(shape), 64
        self._facts = Model(eos_ids=self.eos_ids, max_context=self._context, text=text)
        self._done, self._open = threading.Event(), 0
        self._scheduler = Scheduler(
            DecoderRunner(weights, num_blocks=max_running * blocks_of(self._context)),
            0,
            max_running=max_running,
            share_prefix=True,
            threads=1,
            post=self._count,
        )
        self._scheduler.start()

    @staticmethod
    def _empty(shape: ModelShape) -> Weights:
        return Weights(shape, dtype=torch.float32, device=torch.device("cpu"))

    def serve(self, named: Named, version: int) -> None:
        """Flip to these weights."""
        for name, target in self._standby.named.items():
            target.copy_(named[name])
        self._standby.finalize()
        self._standby, _ = self._scheduler.flip(self._standby, version).result(60)

    def generate(
        self, prompts: Sequence[np.ndarray[Any, Any]], params: SamplingParams, seeds: Sequence[int]
    ) -> list[Response]:
        """Return one finished response to each prompt."""
        responses = [
            Response(
                ResponseRequest(rid=str(row), prompt=prompt, params=params, seed=seed), model=self._facts, sink=_nobody
            )
            for row, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True))
        ]
        self._open = len(responses)
        self._done.clear()
        self._scheduler.submit(responses).result(60)
        if not self._done.wait(300):
            raise TimeoutError(f"{self._open} responses are unfinished after 300 s")
        if failed := [response.error for response in responses if response.error]:
            raise RuntimeError(failed[0])
        return responses

    def close(self) -> None:
        self._scheduler.close(5.0)

    def _count(self, events: list[Event]) -> None:
        self._open -= sum(ended for _, _, ended in events)
        if not self._open:
            self._done.set()


def _optimizer(task: Task) -> OptimizerConfig:
    return OptimizerConfig(lr=task.lr, beta1=0.9, beta2=0.99, eps=task.eps)


def _nobody(response: Response, num_tokens: int, ended: bool) -> None:
    pass


@functools.cache
def world_of_one() -> Any:
    """Return Megatron's groups for this process alone, joined once."""
    from tidemill.learner.backends.megatron.groups import join
    from tidemill.learner.layout.parallel import choose_device

    with KeptPort() as port:
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port.number))
        torch.set_num_threads(1)
        return join(tensor_parallel_size=1, device=choose_device("cpu"), seed=0)


class PinnedLoop:
    """A run that makes one version with every ``step``."""

    def __init__(
        self,
        directory: Path,
        algorithm: AlgorithmConfig,
        *,
        lag: int = 0,
        seed: int = 0,
        task: Task | None = None,
        versions: int = 1000,
        fault: EngineFault | None = None,
        corrupt: Corrupt | None = None,
        parallel: Any = None,
    ) -> None:
        """``directory``: for model and prompts. ``lag``: versions between sampler and learner, from the lag-th version
        on.

        ``parallel``: Megatron's groups of this process; None = a world of one, joined once.
        """
        from tidemill.learner.backends.megatron.model import build_policy
        from tidemill.learner.backends.megatron.optimizer import MegatronOptimizer
        from tidemill.learner.trainer.backups import OtherModels, WeightBackup
        from tidemill.learner.trainer.trainer import Trainer

        self.task, self.lag, self.seed, self.fault, self.corrupt = (
            task or Task(),
            lag,
            seed,
            fault or EngineFault(),
            corrupt,
        )
        self.directory = directory
        made = prepare(self.task.prepare_config(seed), directory)
        self.engine = LocalEngine(
            made.model, max_running=max(self.task.groups * self.task.group_size, self.task.held_out)
        )
        rows = [json.loads(line) for line in made.prompts.read_text().splitlines()]
        self._prompts = [
            (np.array(self.engine.text.encode(row["prompt"]), np.int32), row["label"], row["prompt"]) for row in rows
        ]
        self.policy = build_policy(made.model, dtype="float32", parallel=parallel or world_of_one())
        optimizer = MegatronOptimizer(self.policy, _optimizer(self.task), steps=versions)
        reference = WeightBackup(self.policy) if algorithm.needs_reference else None
        self.trainer = Trainer(self.policy, optimizer, algorithm, max_lag=lag, others=OtherModels(reference=reference))
        self.version = 0
        self.kept: list[Named] = []
        """Weights kept by an experiment."""
        self.past: deque[Named] = deque([self.weights()], maxlen=lag + 2)
        """Weights of the last versions, the present one last."""

    def step(self) -> dict[str, float]:
        """Sample a batch with the lagged weights and train it; return the metrics of ``Trainer`` and the batch's
        ``reward``.
        """
        step = self.version + 1
        samples = self.rollout()
        if self.corrupt is not None:
            samples = self.corrupt(samples, self)
        metrics = self.trainer.train(self.batch(samples, step))
        self.version = step
        self.past.append(self.weights())
        return metrics | {"reward": float(np.mean([sample.score for sample in samples]))}

    def rollout(self) -> list[Sample]:
        """Return the next batch's samples, by the weights of ``max(0, version - lag)``."""
        version = max(0, self.version - self.lag)
        named = self.past[-1 - min(self.lag, self.version)]
        self.engine.serve(self.fault.weights(self, version) if self.fault.weights else named, version)
        first = self.version * self.task.groups
        chosen = [
            self._prompts[(first + group) % (len(self._prompts) - self.task.held_out)]
            for group in range(self.task.groups)
        ]
        return self._sampled(chosen, first, version)

    def batch(self, samples: list[Sample], step: int) -> StepBatch:
        """Return the trainer's input."""
        sizes = [self.task.group_size] * (len(samples) // self.task.group_size)
        placed = assign(
            [len(sample.tokens) for sample in samples],
            data_parallel=1,
            max_tokens=self.task.max_tokens,
            minibatches=self.task.minibatches,
            group_sizes=sizes,
        )
        plan = Plan(
            epoch=1,
            step=step,
            tasks=np.array(sorted({sample.task for sample in samples}), np.int64),
            seqs=np.arange(len(samples), dtype=np.int64),
            group_sizes=np.array(sizes, np.int32),
            ranks=placed.ranks,
            micro_batches=placed.micro_batches,
            version_steps={span.version: span.version for sample in samples for span in sample.spans},
            oldest_step=None,
            data_parallel=1,
            num_micro_batches=placed.num_micro_batches,
            num_minibatches=placed.num_minibatches,
            config_digest="",
            chain="",
        )
        return build_batches(plan, samples, eos_ids=self.engine.eos_ids)[0]

    def evaluate(self) -> float:
        """Return the share of held-out prompts that the present weights answer exactly, decoding greedily."""
        self.engine.serve(self.past[-1], self.version)
        held_out = self._prompts[-self.task.held_out :]
        params = SamplingParams(max_new_tokens=self.task.num_digits + 1, temperature=0.0)
        answers = self.engine.generate([prompt for prompt, _, _ in held_out], params, [0] * len(held_out))
        right = [
            self.engine.text.decode(answer.tokens) == label
            for answer, (_, label, _) in zip(answers, held_out, strict=True)
        ]
        self.engine.serve(self.past[-1 - min(self.lag, self.version)], max(0, self.version - self.lag))
        return float(np.mean(right))

    def weights(self) -> Named:
        """Return a copy of the present weights, by Hugging Face names."""
        return {name: tensor.detach().clone() for name, tensor in self.policy.export()}

    def close(self) -> None:
        self.engine.close()

    def _sampled(self, chosen: list[tuple[Any, str, str]], first: int, version: int) -> list[Sample]:
        size = self.task.group_size
        params = SamplingParams(
            max_new_tokens=self.task.num_digits + 1,
            temperature=self.fault.temperature or self.task.temperature,
            top_p=self.fault.top_p,
        )
        prompts = [prompt for prompt, _, _ in chosen for _ in range(size)]
        seeds = [
            (self.seed << 32) + (first + group) * size + index for group in range(len(chosen)) for index in range(size)
        ]
        responses = self.engine.generate(prompts, params, seeds)
        return [
            self._sample(response, *chosen[row // size][1:], first + row // size + 1, row % size, version)
            for row, response in enumerate(responses)
        ]

    def _sample(self, response: Response, label: str, prompt: str, task: int, index: int, version: int) -> Sample:
        status = (
            Status.COMPLETED if response.finish is not None and response.finish["type"] == "stop" else Status.TRUNCATED
        )
        text = self.engine.text.decode(response.tokens)
        sample = Sample(
            run="pinned",
            task=task,
            index=index,
            group_size=self.task.group_size,
            attempt="a",
            prompt=prompt,
            tokens=response.context().astype(np.int32),
            response_length=len(response.tokens),
            response=text,
            rollout_log_probs=np.array(response.log_probs, np.float32),
            loss_mask=np.ones(len(response.tokens), np.uint8),
            spans=(Span(version=version, num_tokens=len(response.tokens)),),
            reward=0.0,
            status=status,
            sampling=Sampling(temperature=self.task.temperature, max_new_tokens=self.task.num_digits + 1),
            label=label,
        )
        request = RewardRequest(
            prompt=prompt, response=text, label=label, status=status, tokens=sample.tokens, metadata={}
        )
        return replace(sample, reward=digits(request))
