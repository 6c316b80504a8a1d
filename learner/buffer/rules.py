"""Rules of the DataSource: sizes, staleness, layout; validated together."""

import hashlib
from dataclasses import asdict, dataclass, field

import msgpack

from tidemill.bus.wire.json_object import JsonMapping
from tidemill.learner.errors import ConfigRefused
from tidemill.learner.settings.config import StalenessConfig


def refuse_rare_pushes(push_every: int, *, max_lag: int) -> None:
    """Raise ConfigRefused for versions so far apart that a step between two of them gets only data that is too old."""
    if push_every - 1 > max_lag:
        want = (
            f"<= staleness.max_lag + 1 = {max_lag + 1} (the steps between two versions would wait for samples "
            "that are too old for them)"
        )
        raise ConfigRefused("weights.push_every", want, push_every)


LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE = 0.01, 100.0
"""Below 0.01 a softmax has nearly one token (SGLang is greedy below 1e-6); above 100 all tokens are equal."""


def refuse_sampling(temperature: float, top_p: float, top_k: int) -> None:
    """Raise ConfigRefused for a sampling distribution that importance weights cannot be computed for."""
    if not temperature >= LOWEST_TEMPERATURE:
        want = f">= {LOWEST_TEMPERATURE:g} (greedy samples have no distribution to correct for)"
        raise ConfigRefused("sampling.temperature", want, temperature)
    if temperature > HIGHEST_TEMPERATURE:
        raise ConfigRefused("sampling.temperature", f"<= {HIGHEST_TEMPERATURE:g}", temperature)
    if top_p != 1.0 or top_k not in (-1, 0):
        want = (
            "top_p 1 and top_k -1 (the learner computes log-probs of the whole distribution, so importance weights of "
            "a truncated one would be wrong)"
        )
        raise ConfigRefused("sampling", want, (top_p, top_k))


_LATER = frozenset({"num_epochs", "filters", "buffer_filters", "over_sampling", "min_group_size"}) | frozenset(
    {"demonstrations", "teacher", "teacher_top_k", "pair_tokens", "shares_prompts", "leaves_out_from"}
)
"""Rules that came after the first release."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataRules:
    """All settings that the DataSource uses, named as in ``learner`` and ``sampling``."""

    run: str
    steps: int
    num_epochs: int = 0
    groups_per_step: int
    min_group_size: int = 0
    """Samples with which the group of a dead task is trained; 0 = all."""
    staleness: StalenessConfig = field(default_factory=StalenessConfig)
    filters: str = ""
    """Description of the filters (``identity_of``); with one, complete groups wait for ``DataSource.judged``."""
    buffer_filters: bool = False
    """True: groups that the filters keep wait for ``DataSource.chosen``, too."""
    push_every: int = 1
    data_parallel: int = 1
    max_tokens_per_micro_batch: int = 8192
    pair_tokens: int = 0
    """Pairs of tokens whose attention costs as much as the weights for one token; 0 = ranks are balanced by tokens."""
    shares_prompts: bool = False
    """True if a rank computes the prompt of a group once. Like the next rule it decides the balance of ranks alone."""
    leaves_out_from: int = 0
    """First step in which ranks leave out masked samples and groups with equal rewards; 0 = no step."""
    minibatches: int = 1
    """Optimizer steps per plan."""
    max_context: int = 0
    """Longer samples are invalid; 0 = any length."""
    temperature: float = 1.0
    """Temperature of the run. A row may have its own, which its task and its samples have then."""
    top_p: float = 1.0
    top_k: int = -1
    seed: int = 0
    """Seed of the order of prompts and of the sampler seeds."""
    prompts_digest: str = ""
    demonstrations: bool = False
    """True if the loss can train demonstrations; else they are invalid."""
    teacher: bool = False
    """True if samples need the scores of a teacher; those without are invalid, except for demonstrations."""
    teacher_top_k: int = 0
    """Number of tokens that the teacher must have listed at each position, with ``teacher``."""
    model: str = ""
    """Description of model and tokenizer with their digests; empty = not known."""

    def __post_init__(self) -> None:
        refuse_rare_pushes(self.push_every, max_lag=self.staleness.max_lag)
        refuse_sampling(self.temperature, self.top_p, self.top_k)

    @property
    def admitted(self) -> int:
        """Largest number of tasks that are open, or trained and not yet published."""
        # AReaL's rule: the groups of the next step, and of each further step for which samples may be old.
        return (self.staleness.max_lag + 1) * self.groups_per_step + round(
            self.staleness.over_sampling * self.groups_per_step
        )

    @property
    def max_filtered(self) -> float:
        """Number of filtered groups after which a step may run with fewer groups."""
        return self.staleness.max_refill * self.groups_per_step

    @property
    def identity(self) -> dict[str, object]:
        """Settings that may not change during a run, because samples do not record their values."""
        names = ("run", "seed", "prompts_digest", "model", "temperature", "top_p", "top_k")
        return {name: getattr(self, name) for name in names}

    def refuse_other_identity(self, recorded: JsonMapping, *, but: str = "") -> None:
        """Raise ConfigRefused if the identity in a checkpoint differs, in an entry other than ``but``."""
        for name, value in self.identity.items():
            if name != but and recorded.get(name, value) != value:
                want = f"{recorded.get(name)!r}, as in the checkpoint (another one needs another run)"
                raise ConfigRefused(name, want, value)

    @property
    def digest(self) -> str:
        """Short digest of all rules, which is recorded with every plan."""
        # With the rules of staleness beside the others, and without later rules that are not set: plans have the digest
        # of earlier releases.
        rules = asdict(self)
        rules |= rules.pop("staleness")
        values = sorted((name, value) for name, value in rules.items() if value or name not in _LATER)
        return hashlib.sha256(msgpack.packb(values)).hexdigest()[:16]
