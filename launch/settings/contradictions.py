"""Contradictions between settings: values that are right one by one and wrong together, refused with the reason."""

from typing import TYPE_CHECKING

from tidemill.actors.rollout_settings import DATASET, served
from tidemill.actors.serving.sglang.arguments import refuse_untried
from tidemill.bus.config import SINGLE_TURN
from tidemill.bus.wire.task_settings import BY_ROLLOUT, RUN_NAME
from tidemill.learner.algorithms.alarms import refuse_unknown
from tidemill.learner.buffer.rules import refuse_rare_pushes, refuse_sampling
from tidemill.learner.data import DataConfig
from tidemill.learner.settings.config import masked

if TYPE_CHECKING:
    from tidemill.launch.settings.run_config import RunConfig


def refuse_contradictions(config: "RunConfig") -> None:
    """Raise ValueError for settings that are right one by one and wrong together."""
    if config.run and not RUN_NAME.fullmatch(config.run):
        raise ValueError(f"run: want 1 to 64 of A-Z a-z 0-9 _ -, got {config.run!r}")
    _refuse_sharing(config)
    refuse_untried(config.engine.sglang.arguments)
    _refuse_routing(config)
    _refuse_stale(config)
    _refuse_rollouts(config)
    _refuse_hooks(config)
    _refuse_rewards(config)
    _refuse_terms(config)
    _refuse_teachers(config)
    _refuse_columns(config)
    _refuse_debug(config)
    _refuse_recorded(config)
    _refuse_megatron(config)
    try:
        refuse_unknown(config.learner.algorithm.alarms)
    except ValueError as bad:
        raise ValueError(f"learner.algorithm.{bad}") from None
    processes = max(config.up.actors, config.up.engines, config.up.scorers)
    if config.bus.auth and config.bus.auth_users < processes:
        want = f"a user for each of {processes} actors, engines or scorers"
        raise ValueError(f"bus.auth_users: want {want}, got {config.bus.auth_users}")
    for name, rollout in config.rollouts.items():
        if rollout.drain_s is not None and rollout.drain_s >= config.up.drain_s:
            want = f"less than up.drain_s = {config.up.drain_s:g}, after which an actor is ended; raise that one"
            raise ValueError(f"rollouts.{name}.drain_s: want {want}, got {rollout.drain_s:g}")
    if config.up.scorers and not config.actor.scorers.enabled:
        got = f"up.scorers: {config.up.scorers}"
        raise ValueError(f"up.scorers: want actor.scorers.enabled: true, or none is asked; got {got}")


def _refuse_sharing(config: "RunConfig") -> None:
    """Raise ValueError for settings that cannot hold where learner and engines share an accelerator."""
    if config.learner.colocated and config.weights.overlap:
        want = "false with learner.colocated: the step has the memory that a push beside it would need"
        raise ValueError(f"weights.overlap: want {want}")
    if config.learner.colocated and config.weights.backend == "nccl":
        want = "auto or gloo with learner.colocated: NCCL refuses two processes on one GPU"
        raise ValueError(f"weights.backend: want {want}, got 'nccl'")
    if config.learner.colocated and config.weights.staging == "cuda":
        want = "host with learner.colocated: the copies would stay on the GPU in the engines' turn"
        raise ValueError(f"weights.staging: want {want}, got 'cuda'")
    if config.learner.colocated and config.engine.kind == "sglang" and config.engine.sglang.url:
        why = "it needs arguments for that"
        raise ValueError(f"engine.sglang.url: want a server that is started here with learner.colocated: {why}")


def _refuse_routing(config: "RunConfig") -> None:
    """Raise ValueError for a replay of the engines' experts that samples cannot have."""
    returns = config.engine.sglang.arguments.get("enable_return_routed_experts")
    if config.engine.routed_experts and returns is False:
        want = "true with learner.routing_replay: rollout, got false; leave it out"
        raise ValueError(f"engine.sglang.arguments.enable_return_routed_experts: want {want}")


def _refuse_stale(config: "RunConfig") -> None:
    """Raise ValueError for data that is too old, or from a distribution that cannot be corrected for."""
    algorithm, lag, push_every = config.learner.algorithm, config.staleness.max_lag, config.weights.push_every
    if algorithm.uncorrected and lag > 0 and not algorithm.train_without_correction:
        what = f"{algorithm.correction} with staleness.max_lag = {lag} trains on stale data as if it were fresh"
        cure = "use decoupled, tis or bypass, or set learner.algorithm.train_without_correction: true as well"
        raise ValueError(f"learner.algorithm.correction: {what}, which looks healthy and then collapses; {cure}")
    refuse_sampling(config.sampling.temperature, config.sampling.top_p, config.sampling.top_k)
    refuse_rare_pushes(push_every, max_lag=lag)
    if config.learner.checkpoint_every % push_every:
        got = f"{config.learner.checkpoint_every}"
        raise ValueError(f"learner.checkpoint_every: want a multiple of weights.push_every = {push_every}, got {got}")


def _refuse_hooks(config: "RunConfig") -> None:
    """Raise ValueError for a hook that would never be called."""
    learner, algorithm, push_every = config.learner, config.learner.algorithm, config.weights.push_every
    passes = algorithm.needs_reference or algorithm.needs_old(
        minibatches=learner.minibatches, published_every=push_every
    )
    if learner.hooks.before_log_probs and not passes:
        several = "learner.minibatches or weights.push_every above 1 with a proximal anchor"
        want = f"a run with a pass for log-probs before the steps (a reference, a coupled correction, or {several})"
        got = f"{learner.hooks.before_log_probs!r}, which would never be called"
        cure = "remove it, or take learner.hooks.before_step"
        raise ValueError(f"learner.hooks.before_log_probs: want {want}, got {got}; {cure}")


def _refuse_columns(config: "RunConfig") -> None:
    """Raise ValueError for columns of the prompts that other settings would pass over, or that would mislead them."""
    algorithm = config.learner.algorithm
    held_out = [eval_set.data(config.data) for eval_set in config.eval.sets.values()]
    if config.actor.reward and any(data.names_rewards for data in (config.data, *held_out)):
        got = f"actor.reward: {config.actor.reward}, which scores all rows; remove one of them"
        raise ValueError(f"data.reward: want actor.reward_parts with when: {{reward: NAME}}, got {got}")
    constant = algorithm.by_constant
    if config.data.limits_rows and (algorithm.overlong.buffer or constant):
        setting = f"learner.algorithm.{'loss_constant: 0' if constant else 'overlong.buffer'}"
        why = "which refers to one sampling.max_new_tokens of all rows"
        raise ValueError(f"data.sampling_key: want none with {setting}, {why}; remove one of them")


def _places(config: "RunConfig") -> dict[str, DataConfig]:
    """Return the data of training and of each evaluation set, by the section of the configuration."""
    return {"data": config.data} | {
        f"eval.sets.{name}": eval_set.data(config.data) for name, eval_set in config.eval.sets.items()
    }


def _refuse_rollouts(config: "RunConfig") -> None:
    """Raise ValueError for rollouts that cannot be, and for budgets that no sample could keep."""
    rollouts = config.rollouts
    if SINGLE_TURN in rollouts:
        raise ValueError(f"rollouts.{SINGLE_TURN}: want another name; {SINGLE_TURN} is the rollout that asks once")
    served(rollouts, config.actor.rollouts)
    for place, data in _places(config).items():
        named = data.rollouts(rollouts)
        if unknown := sorted(named - set(rollouts)):
            want = f"a name in rollouts ({', '.join(sorted(rollouts)) or 'which has none'}) or {SINGLE_TURN}"
            raise ValueError(f"{place}.rollout: want {want}, got {unknown[0]!r}")


def _refuse_megatron(config: "RunConfig") -> None:
    """Raise ValueError for a checkpoint of Megatron where the weights of ``model.path`` are used."""
    lora, generates = config.learner.lora.rank > 0, config.debug.rollout_only
    if config.model.megatron_checkpoint and (lora or generates):
        why = "learner.lora, whose adapters belong to model.path"
        if generates:
            why = "debug.rollout_only, whose engines load model.path"
        cure = "convert it (tidemill convert), and make the result model.path"
        got = repr(config.model.megatron_checkpoint)
        raise ValueError(f"model.megatron_checkpoint: want none with {why}, got {got}; {cure}")


def _refuse_debug(config: "RunConfig") -> None:
    """Raise ValueError for settings that have no meaning in a debugging mode."""
    debug = config.debug
    modes = ("rollout_only", "load_rollout", "shadow_of")
    mode = next((f"debug.{name}" for name in modes if getattr(debug, name)), "")
    if mode and config.learner.colocated:
        why = "only one side of the run has memory to share"
        raise ValueError(f"learner.colocated: want false with {mode}: {why}, got true")
    if debug.rollout_only and config.learner.from_checkpoint:
        want = f"none with debug.rollout_only, whose engines load model.path, got {config.learner.from_checkpoint!r}"
        raise ValueError(f"learner.from_checkpoint: want {want}; set model.path to the model to generate with")
    if debug.rollout_only and config.learner.lora.adapter:
        want = f"none with debug.rollout_only, whose engines load model.path, got {config.learner.lora.adapter!r}"
        cure = "merge the adapters first (tidemill convert their checkpoint), and make the result model.path"
        raise ValueError(f"learner.lora.adapter: want {want}; {cure}")
    if mode and config.learner.checkpoint.url:
        got = masked(config.learner.checkpoint.url)
        want = f"local with {mode}, whose checkpoints have no weights to come back for"
        raise ValueError(f"learner.checkpoint.store: want {want}, got {got!r}")
    if debug.rollout_only and config.learner.nodes > 1:
        nodes = config.learner.nodes
        raise ValueError(f"learner.nodes: want 1 with debug.rollout_only, which has no ranks, got {nodes}")
    if debug.trains_only and config.eval.every:
        every = config.eval.every
        raise ValueError(f"eval.every: want 0 with {mode}, which has no engine to evaluate with, got {every}")
    if debug.trains_only and config.learner.num_epochs:
        epochs = config.learner.num_epochs
        raise ValueError(
            f"learner.num_epochs: want 0 with {mode}, which reads no prompts, got {epochs}; set learner.steps"
        )
    if debug.trains_only and debug.save_rollout:
        why = "its batches are recorded already"
        raise ValueError(f"debug.save_rollout: want none with {mode}: {why}; remove one of them")


def _refuse_recorded(config: "RunConfig") -> None:
    """Raise ValueError for recorded responses where nothing can use them."""
    recorded = config.recorded_rollouts
    for name, eval_set in config.eval.sets.items():
        if wrong := sorted(eval_set.data(config.data).rollouts(config.rollouts) & recorded):
            want = f"{SINGLE_TURN}, or a rollout that asks the model, got {wrong[0]!r}, whose use is {DATASET}"
            raise ValueError(f"eval.sets.{name}.rollout: want {want}")
    used = config.data.rollouts(config.rollouts) & recorded
    if used:
        return
    cure = f"rollouts: {{NAME: {{use: {DATASET}}}}} and data.rollout: NAME"
    if any(source.responses_key for source in config.data.used):
        got = "none; set them, or remove it"
        raise ValueError(f"data.responses_key: want a rollout of recorded responses with it ({cure}), got {got}")
    if config.learner.algorithm.sft_coef:
        want = f"a rollout of recorded responses with it ({cure}), got none"
        raise ValueError(f"learner.algorithm.sft_coef: want {want}; set them, or 0")


def _refuse_teachers(config: "RunConfig") -> None:
    """Raise ValueError for scores of teachers that nothing uses, and for a loss that no teacher serves."""
    algorithm, teachers = config.learner.algorithm, config.actor.teachers
    if teachers and not algorithm.needs_teacher:
        want = "learner.algorithm.distill.coef > 0 with distill.teacher: engine"
        got = f"distill.coef {algorithm.distill.coef:g}, distill.teacher {algorithm.distill.teacher}"
        cure = "set it, or remove the teachers"
        raise ValueError(f"actor.teachers: nothing uses their scores; want {want}, got {got}; {cure}")
    if algorithm.needs_teacher and not teachers and not config.debug.trains_only:
        teacher = "{NAME: {urls: [http://HOST:PORT]}}"
        cure = "set them, or distill.teacher: reference with kl.reference"
        raise ValueError(f"learner.algorithm.distill.teacher: engine wants actor.teachers: {teacher}, got none; {cure}")
    if algorithm.advantage == "none" and not algorithm.distill.coef:
        why = "none learns nothing from rewards; want learner.algorithm.distill.coef > 0, or another advantage"
        raise ValueError(f"learner.algorithm.advantage: {why}, got distill.coef {algorithm.distill.coef:g}")


def _refuse_rewards(config: "RunConfig") -> None:
    """Raise ValueError for rewards from which nothing is learnt."""
    algorithm = config.learner.algorithm
    several = "learner.group_size >= 2, got 1: the rewards of a group of one are all equal, so every group "
    several += "would be dropped"
    if config.staleness.filter_zero_variance and config.learner.group_size == 1:
        cure = "turn it off, or raise learner.group_size"
        raise ValueError(f"staleness.filter_zero_variance: want {several}; {cure}")
    if config.staleness.filter_zero_variance and algorithm.by_critic:
        want = f"false with learner.algorithm.advantage: {algorithm.advantage}"
        why = "groups of equal rewards teach a critic too, and without them its values are biased"
        raise ValueError(f"staleness.filter_zero_variance: want {want}: {why}")
    filters = config.data.filters.values()
    equal = [entry.name for entry in filters if entry.use == "equal_rewards" and not entry.count_only]
    if equal and config.learner.group_size == 1:
        cure = "remove it, or raise learner.group_size"
        raise ValueError(f"data.filters.{equal[0]}: want {several}; {cure}")
    parts = config.actor.reward_parts
    if algorithm.advantage == "gdpo" and not parts and not algorithm.gdpo.weights:
        why = "set actor.reward_parts, or learner.algorithm.gdpo.weights with the names that the reward returns"
        raise ValueError(f"learner.algorithm.advantage: gdpo wants several rewards: {why}")
    if parts and (unknown := sorted(name for name in algorithm.gdpo.weights if name.partition(".")[0] not in parts)):
        want = f"names of actor.reward_parts ({', '.join(parts)}), got {', '.join(unknown)}"
        raise ValueError(f"learner.algorithm.gdpo.weights: want {want}")
    if config.actor.reward == BY_ROLLOUT:
        for place, data in _places(config).items():
            if data.single_turns:
                got = f"{BY_ROLLOUT}: {place} has such rows, or may have; name one, or set {place}.rollout"
                raise ValueError(f"actor.reward: want the reward of rows without a program, got {got}")


def _refuse_terms(config: "RunConfig") -> None:
    """Raise ValueError for terms that outweigh the reward, or have nothing to refer to."""
    algorithm = config.learner.algorithm
    if algorithm.distill.coef and algorithm.distill.teacher == "reference" and not algorithm.kl.reference:
        want = "learner.algorithm.kl.reference, the directory of the teacher"
        got = f"{algorithm.distill.coef!r} without one: the teacher would be the model that the run starts from"
        raise ValueError(f"learner.algorithm.distill.coef: want {want}, got {got}")
    for place, limit in config.sampled_limits.items():
        if algorithm.overlong.buffer > limit > 0:
            got = f"{algorithm.overlong.buffer}: every response would lose reward; lower it"
            raise ValueError(f"learner.algorithm.overlong.buffer: want <= {place} = {limit}, got {got}")
        if not limit and (algorithm.overlong.buffer or algorithm.by_constant):
            setting = "overlong.buffer" if algorithm.overlong.buffer else "loss_constant: 0"
            want = f"> 0 with learner.algorithm.{setting}, which refers to the most tokens that an episode may sample"
            raise ValueError(f"{place}: want {want}, got 0")
    if algorithm.kl.target and algorithm.kl.horizon <= 0.2 * config.samples_per_step:
        want = f"> 0.2 x samples per step = {0.2 * config.samples_per_step:g}"
        got = f"{algorithm.kl.horizon:g}: one step could turn the sign of the coefficient"
        raise ValueError(f"learner.algorithm.kl.horizon: want {want}, got {got}")
