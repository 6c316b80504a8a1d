"""The report on the first two steps of a run: the findings from their numbers, each line with a verdict. Pure; knows no
torch.

Source of the questions: "Aligning Precision" of slime's debugging page.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tidemill.bus.system.functions import errors_as
from tidemill.learner.batch.batch import StepBatch

PROMPT_TOKENS, RESPONSE_TOKENS = 32, 64
"""Tokens of either that are decoded."""
PROMPT_CHARACTERS, RESPONSE_CHARACTERS = 60, 120
"""Characters of either that are shown, before they are escaped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Excerpt:
    """The text, and its probability."""

    prompt: str
    """End of the prompt."""
    response: str
    log_prob_mean: float
    """Over all sampled tokens of the sequence, as the engine reported them."""
    missing: str = ""
    """Reason why there is no text; empty = there is."""


def excerpt(batch: StepBatch, model_dir: Path) -> Excerpt | None:
    """Return the first sampled text of this rank, or the reason why it has none; None without a sequence."""
    for row in batch.micro_batches:
        sampled_T = row.loss_mask_T & ~batch.demonstration_N[row.sample_T]
        for start, end in zip(row.cu_seqlens[:-1].tolist(), row.cu_seqlens[1:].tolist(), strict=True):
            if not sampled_T[start:end].any():
                continue
            mean = float(row.rollout_log_probs_T[start:end][sampled_T[start:end]].mean(dtype=np.float64))
            begin = start + int(sampled_T[start:end].argmax()) + 1  # a mask is at the token before its target
            prompt = row.tokens_T[max(start, begin - PROMPT_TOKENS) : begin]
            response = row.tokens_T[begin:end][:RESPONSE_TOKENS]
            try:
                texts = _decoded(model_dir, [prompt.tolist(), response.tolist()])
            except ValueError as error:
                return Excerpt(prompt="", response="", log_prob_mean=mean, missing=str(error))
            return Excerpt(
                prompt=texts[0][-PROMPT_CHARACTERS:], response=texts[1][:RESPONSE_CHARACTERS], log_prob_mean=mean
            )
    return None


def _decoded(model_dir: Path, sequences: Sequence[Sequence[int]]) -> list[str]:
    file = model_dir / "tokenizer.json"
    if not file.exists():
        raise ValueError(f"{file}: no such file")
    # The library raises plain Exception, and the file may have any content.
    with errors_as(lambda error: ValueError(f"{file}: {error}")):
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(file))
        return [tokenizer.decode(list(tokens), skip_special_tokens=False) for tokens in sequences]


REPORTED_STEPS = 2
"""First steps of a run, which are reported; for that, the trainer leaves out no sample of theirs for its advantage."""
OK, LOOK = "ok", "LOOK"
LOOKS = "debug/report_look"
"""Metric: the lines of a step's report that are not good."""
UNLIKELY = 1.0
"""Nats by which the negated mean log-prob of sampled tokens may exceed the entropy, which is its expected value."""
UNIFORM_SHARE = 0.7
"""Share of the entropy of a uniform distribution above which a model has hardly learnt anything."""
FINISHED_SHARE = 0.5
DELTA = {"float32": 1e-3, "bfloat16": 5e-2}
"""Mean |log-prob of the learner - log-prob of the engine| on fresh samples, nats, by dtype of the learner."""
KL_ZERO = 1e-7
"""Mean k3 divergence that is 0 but for rounding."""
GRAD_NORM = 10.0
GROWTH = 1.2
"""Memory after the second step over that after the first one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Facts of a step that are not among its metrics."""

    vocab_size: int
    dtype: str
    log_prob_mean: float | None
    """Mean log-prob of the sampled tokens, as the engines reported them; None = no token is trainable."""
    own_reference: bool
    """True if the reference model has the weights that step 1 starts from."""
    minibatches: int
    memory: Mapping[str, Sequence[float]]
    """Bytes of each rank by kind: ``host`` (resident), ``device`` (peak of the step)."""
    excerpt: Excerpt | None = None
    """A sampled text; None = no token was sampled."""
    before: Mapping[str, Sequence[float]] | None = None
    """``memory`` of the step before; None for the first."""


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the report."""

    subject: str
    finding: str
    good: bool
    look_at: str = ""
    """The place to look at if it is not good."""

    def __str__(self) -> str:
        return f"{OK if self.good else LOOK:<5}{self.subject}: {self.finding}" + (
            "" if self.good else f"; look at: {self.look_at}"
        )


def report(step: int, metrics: Mapping[str, float], facts: Facts) -> list[Line]:
    """Return the lines on step 1 or 2 of a run."""
    lines = [] if step > 1 else [*_rollout(metrics, facts), *_reference(metrics, facts)]
    lines += [*_agreement(metrics, facts), _gradient(metrics)]
    return lines + ([] if facts.before is None else _memory(facts.before, facts.memory))


def _rollout(metrics: Mapping[str, float], facts: Facts) -> list[Line]:
    lines = []
    entropy = metrics.get("train/entropy", 0.0)
    if facts.log_prob_mean is not None:
        look = (
            "whether the checkpoint was loaded and every tensor mapped (tidemill debug weights), then the chat "
            "template: text that does not fit it is unlikely to the model"
        )
        finding = f"mean log-prob of sampled tokens {facts.log_prob_mean:.4f}, {-entropy:.4f} expected"
        lines.append(Line("rollout", finding, -facts.log_prob_mean <= entropy + UNLIKELY, look))
    if facts.excerpt is not None:
        lines.append(_text(facts.excerpt, entropy))
    if "train/entropy" in metrics:
        uniform = math.log(facts.vocab_size)
        finding = f"entropy {metrics['train/entropy']:.4f} (uniform: {uniform:.2f})"
        look = (
            "whether the weights were loaded: a model that knows nothing has nearly the entropy of a uniform "
            "distribution"
        )
        lines.append(Line("entropy", finding, metrics["train/entropy"] <= UNIFORM_SHARE * uniform, look))
    if "train/truncated_share" in metrics:
        finished = 1 - metrics["train/truncated_share"]
        look = "sampling.max_new_tokens, the end tokens of the model, and whether the text is coherent (tidemill tail)"
        lines.append(Line("finished responses", f"{finished:.0%}", finished >= FINISHED_SHARE, look))
    return lines


def _text(sample: Excerpt, entropy: float) -> Line:
    """Return the line with a sampled text: the reader judges its coherence, and the verdict its probability."""
    shown = f"...{sample.prompt!r} -> {sample.response!r}..."
    if sample.missing:
        shown = f"a sampled text cannot be decoded ({sample.missing}); tidemill tail shows those that actors decode"
    look = (
        "the text: if it is gibberish, weights or their mapping (tidemill debug weights); if it is coherent, the chat "
        "template, or a model that was not tuned on such text"
    )
    finding = f"{shown} mean log-prob {sample.log_prob_mean:.4f}"
    return Line("sampled text", finding, -sample.log_prob_mean <= entropy + UNLIKELY, look)


def _agreement(metrics: Mapping[str, float], facts: Facts) -> list[Line]:
    """Compare the learner's log-probs with the engines', on samples of the very weights that are trained."""
    name = next(
        (metric for metric in ("offpolicy/fresh_logprob_diff_abs", "offpolicy/logprob_diff_abs") if metric in metrics),
        "",
    )
    if not name:
        return []
    stale = "" if "fresh" in name else ", of older weights: part of it is the change of the weights"
    finding = f"mean |delta| {metrics[name]:.3g}, max {metrics.get('offpolicy/logprob_diff_max', math.nan):.3g}{stale}"
    look = (
        "activations on both sides (debug.dump_modules, tidemill debug score, tidemill debug compare); dtypes, "
        "temperature and rotary settings of learner and engine"
    )
    limit = DELTA.get(facts.dtype, DELTA["bfloat16"])
    return [Line("log-probs, learner - engine", finding, bool(stale) or metrics[name] <= limit, look)]


def _reference(metrics: Mapping[str, float], facts: Facts) -> list[Line]:
    lines = []
    if "train/kl_reference" in metrics and facts.own_reference:
        kl = metrics["train/kl_reference"]
        look = (
            "kernels that are not deterministic (learner.deterministic, learner.attention): both passes have the "
            "same weights"
        )
        moved = facts.minibatches > 1
        finding = f"KL {kl:.3g}" + (", moved by earlier minibatches" if moved else "")
        lines.append(Line("log-probs, learner - reference", finding, moved or abs(kl) <= KL_ZERO, look))
    if facts.minibatches == 1 and "train/ppo_kl" in metrics:
        look = "the same; and debug.save_train with tidemill debug compare of a dump and its record"
        finding = f"{metrics['train/ppo_kl']:.3g}"
        lines.append(Line("change within the first update", finding, abs(metrics["train/ppo_kl"]) <= KL_ZERO, look))
    return lines


def _gradient(metrics: Mapping[str, float]) -> Line:
    norm = metrics.get("train/grad_norm_max", math.nan)
    skipped = metrics.get("train/skipped_minibatches", 0.0)
    finding = f"norm {norm:.4g}" + (f", {skipped:.0f} optimizer steps skipped" if skipped else "")
    good = math.isfinite(norm) and norm <= GRAD_NORM and not skipped
    look = "the loss and advantages of each token (debug.save_train), the share of rejected tokens, and the dtype"
    return Line("gradient", finding, good, look)


def _memory(before: Mapping[str, Sequence[float]], now: Mapping[str, Sequence[float]]) -> list[Line]:
    """Compare the memory of every rank with that after the step before; the largest of each is shown."""
    lines = []
    for kind in sorted(before.keys() & now.keys()):
        growths = [after / was if was else 1.0 for after, was in zip(now[kind], before[kind], strict=True)]
        largest, growth = max(now[kind]), max(growths)
        finding = f"{largest / 2**20:.0f} MiB, {growth:.2f} x that of the step before"
        if len(growths) > 1:
            ranks = now[kind].index(largest), growths.index(growth)
            finding = (
                f"at most {largest / 2**20:.0f} MiB (rank {ranks[0]}), {growth:.2f} x that of the step before "
                f"(rank {ranks[1]})"
            )
        look = (
            "learner.max_tokens_per_micro_batch, and memory that stays after a step (tidemill debug profile --memory)"
        )
        lines.append(Line(f"memory, {kind}", finding, growth <= GROWTH, look))
    return lines
