"""The rollouts of an actor with all that they need: one gateway, and the children of each."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

from tidemill.actors.config import GatewayConfig
from tidemill.actors.engines.responses import Responses
from tidemill.actors.episodes.children import ChildBounds, Children
from tidemill.actors.episodes.gateway import Gateway
from tidemill.actors.episodes.port import ProgramFailed
from tidemill.actors.episodes.rollouts import ProgramRollout
from tidemill.actors.episodes.turn_log import RESUME
from tidemill.actors.errors import BadRow, NoRenderer
from tidemill.actors.rollout_settings import RolloutConfig, RolloutPrograms
from tidemill.actors.router.token_history import ModelText
from tidemill.actors.text.rendering import Renderer
from tidemill.bus.client.addresses import HERE, Reach
from tidemill.bus.streams.episode_turns import TurnStream


@asynccontextmanager
async def opened_rollouts(
    programs: RolloutPrograms,
    responses: Responses,
    turns: TurnStream | None = None,
    at: Reach = HERE,
    gateway_config: GatewayConfig | None = None,
    note_hung: Callable[[str], None] = lambda text: None,
) -> AsyncIterator[dict[str, ProgramRollout]]:
    """Give the rollouts by name. Every program is loaded once, in a child that stays.

    ``turns``: where their episodes are logged; ``at``: where programs ask; ``gateway_config``: its renderer, and calls that are context;
    ``note_hung``: called for each call of a tool that hangs.

    Raises BadRow for a program that cannot be loaded, for a model that is not on this machine, for an address that is not, and for a
    renderer that cannot be used.
    """
    try:
        text = ModelText.read(programs.model, "model.path")
    except ValueError as error:
        raise BadRow(f"{error}: an actor with rollouts needs the model's tokenizer on its machine") from None
    async with AsyncExitStack() as stack:
        config = gateway_config or GatewayConfig()
        gateway = Gateway(text, responses, await _renderer(config, programs.model, text), config.untrained_models)
        try:
            await gateway.start(at)
        except OSError as error:
            raise BadRow(f"actor.gateway.host: want an address of this machine, got {at.bind}: {error}") from None
        stack.push_async_callback(gateway.close)
        found = {}
        for name, rollout in programs.programs.items():
            children = await stack.enter_async_context(_children(name, rollout, programs.model, gateway.url, note_hung))
            try:
                await children.load()
            except ProgramFailed as error:
                raise BadRow(f"rollouts.{name}.use: {error.reason}") from None
            found[name] = ProgramRollout(
                gateway,
                children,
                max_calls_in_flight=rollout.max_calls_in_flight,
                turns=turns,
                again=rollout.again,
                needs_log=rollout.needs_log,
                drain_s=rollout.drain_s,
            )
        yield found


def _children(name: str, config: RolloutConfig, model: str, gateway_url: str, note_hung: Callable[[str], None]) -> Children:
    bounds = ChildBounds(
        processes=config.processes,
        episodes_per_child=config.episodes_per_child,
        memory_mb=config.memory_mb,
        cpu_s=config.cpu_s,
        open_files=config.open_files,
        file_mb=config.file_mb,
    )
    return Children(
        config.program,
        options=config.arguments(model),
        python=config.python,
        bounds=bounds,
        resumes=config.again == RESUME,
        gateway_host=urlsplit(gateway_url).hostname or "",
        note_hung=lambda text: note_hung(f"rollouts.{name}: {text}"),
    )


async def _renderer(config: GatewayConfig, model: str, text: ModelText) -> Renderer | None:
    """Return the gateway's renderer; None = the model's chat template. Raises BadRow."""
    if not config.renderer:
        return None
    try:
        return await asyncio.to_thread(Renderer.read, config.renderer, config.renderer_options, Path(model), text.text)
    except NoRenderer as error:
        raise BadRow(f"actor.gateway.{error}") from None
