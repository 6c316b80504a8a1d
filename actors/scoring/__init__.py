"""Rewards in processes of their own: the server that computes them, and the actors' choice of one."""
