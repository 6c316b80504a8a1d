"""The models that train: one package each, behind the port in ``learner/trainer/port.py``."""
