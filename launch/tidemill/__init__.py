"""Tidemill: asynchronous off-policy reinforcement learning for language models.

The rooms are packages of their own folders: ``tidemill.bus``, ``tidemill.weightstore``, ``tidemill.rewards``,
``tidemill.actors``, ``tidemill.learner`` and ``tidemill.launch``. Each has the names for users' code in its
``__all__``, imported with their modules on use (``import tidemill.learner`` loads no torch); everything else may
change.
"""
