"""A tool: its name, docstring and parameters are what the model is shown."""

FACTORS = {"km": 1000.0, "m": 1.0, "cm": 0.01}


def convert(length: float, unit: str = "m", to: str = "km") -> str:
    """Convert a length from one unit to another: km, m or cm."""
    if unit not in FACTORS or to not in FACTORS:
        return f"known units: {', '.join(FACTORS)}"
    return f"{length * FACTORS[unit] / FACTORS[to]:g} {to}"
