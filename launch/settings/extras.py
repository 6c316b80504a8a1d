"""The packages of each extra of pyproject.toml, and the error of a command without its extra. Imports none of them."""

from importlib.util import find_spec

from tidemill.bus import exit_codes

# Import names by extra, as in pyproject.toml; small extras first, because `explain` names the first.
EXTRAS = {
    "actor": (),
    "router": ("tokenizers",),
    "math": ("math_verify",),
    "language": ("langdetect",),
    "renderers": ("renderers", "httpx"),
    "prometheus": ("prometheus_client",),
    "metrics": ("tensorboardX",),
    "plots": ("matplotlib",),
    "gguf": ("gguf",),
    "ray": ("ray",),
    "hub": ("huggingface_hub", "httpx2"),
    "engine": ("torch", "safetensors", "tokenizers", "zmq"),
    "learner": (
        *("torch", "megatron", "mbridge", "transformers", "tokenizers", "safetensors"),
        *("einops", "zmq", "pyarrow"),
    ),
}


class PackagesMissing(ValueError):
    """A command was started in an environment without the packages of its extra."""

    exit_code = exit_codes.CONFIG

    def __init__(self, extra: str, packages: tuple[str, ...]) -> None:
        super().__init__(extra, packages)
        self.extra, self.packages = extra, packages

    def __str__(self) -> str:
        names = ", ".join(self.packages)
        return f"want the packages of tidemill[{self.extra}], got none of the name {names}; {cure(self.extra)}"


def cure(extra: str) -> str:
    """Return the command that installs ``extra``, as part of an error message."""
    return f"install them: pip install 'tidemill[{extra}]' (from a checkout: pip install '.[{extra}]')"


def require(*extras: str) -> None:
    """Check that all packages of ``extras`` are installed, without importing them. Raises PackagesMissing."""
    for extra in extras:
        missing = tuple(name for name in EXTRAS[extra] if find_spec(name) is None)
        if missing:
            raise PackagesMissing(extra, missing)


def explain(error: ModuleNotFoundError) -> PackagesMissing | None:
    """Return the error that names the extra of the missing module; None when no extra has it."""
    package = (error.name or "").partition(".")[0]
    extra = next((extra for extra, packages in EXTRAS.items() if package in packages), None)
    return PackagesMissing(extra, (package,)) if extra is not None else None
