"""The error tree of the devices: a placement that cannot work, and devices that cannot be read."""

from tidemill.bus import exit_codes


class DeviceError(ValueError):
    """No restart cures it: the configuration, the environment or the machine must change."""

    exit_code = exit_codes.CONFIG


class Refused(DeviceError):
    """A placement that cannot work: the setting or thing at fault, the value wanted, the value found, and a cure."""

    def __init__(self, where: str, wanted: str, found: str, cure: str) -> None:
        super().__init__(where, wanted, found, cure)
        self.where, self.wanted, self.found, self.cure = where, wanted, found, cure

    def __str__(self) -> str:
        return f"{self.where}: want {self.wanted}, got {self.found}; {self.cure}"


class DevicesUnreadable(Refused):
    """The devices of this machine are not known: nvidia-smi failed, or CUDA_VISIBLE_DEVICES names none of them."""
