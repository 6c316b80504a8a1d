"""Evaluation beside training: when which prompts are issued, and the scores of the responses. Knows no bus and no
model.
"""
