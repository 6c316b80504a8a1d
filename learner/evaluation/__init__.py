"""Evaluation beside training: when which prompts are issued, and scores of the responses. Knows no model."""
