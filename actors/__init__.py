"""Rollout: the actor that turns tasks into samples, and the engines that generate for it."""
