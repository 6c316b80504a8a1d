"""Scorers: a reward, a sum of rewards or a reward of groups as an actor calls it, in its own process or in child processes."""
