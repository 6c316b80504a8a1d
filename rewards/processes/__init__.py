"""Processes of rewards and of other functions of users: forked from one that has imported the function."""
