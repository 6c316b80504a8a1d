"""Configuration: sections, files, prepared data and models."""
