"""The backend of a run."""

from tidemill.learner.trainer.backend import AnyBackend


def open_backend() -> AnyBackend:
    """Return the backend. Its package is imported here: importing Megatron takes seconds."""
    from tidemill.learner.backends.megatron.backend import MegatronBackend

    return MegatronBackend()
