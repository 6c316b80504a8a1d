"""The chat template of a model that generates: prompts as text, and the form in which the model writes tool calls."""

from collections.abc import Mapping, Sequence

from tidemill.actors.errors import BadRequest
from tidemill.actors.text.tool_calls import form_of
from tidemill.bus.wire.json_object import JsonMapping
from tidemill.rewards.message_template import MessageTemplate


class ChatTemplate(MessageTemplate):
    """The chat template of a model. Thread-safe."""

    def __init__(self, source: str, special: Mapping[str, str], *, tool_use: str = "") -> None:
        super().__init__(source, special, tool_use=tool_use)
        self.form_of_calls = form_of(tool_use or source)
        """Format in which the model writes tool calls (``tidemill.actors.text.tool_calls``); None = unknown."""

    def render(self, messages: Sequence[JsonMapping], *, tools: object = None, add_generation_prompt: bool = True, **more: object) -> str:
        """Return the prompt as text. Raises BadRequest when the template refuses the messages."""
        try:
            return super().render(messages, tools=tools, add_generation_prompt=add_generation_prompt, **more)
        except ValueError as error:
            raise BadRequest(str(error)) from error
