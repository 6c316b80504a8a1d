"""The API of OpenAI over an engine."""
