"""Rules of single families of transformers: a module ``<model_type>`` has a ``FAMILY`` (docs/families.md)."""
