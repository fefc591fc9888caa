"""The exceptions this package raises on purpose. Each message names a field, its value and a way out."""


class RotaryQuantError(Exception):
    """Base class: everything raised on purpose, so that a command line can tell it from a bug."""


class ConfigError(RotaryQuantError, ValueError):
    """A setting that cannot be honoured: unknown key, bad value, contradictory choice."""


class UnsupportedModelError(RotaryQuantError):
    """A model feature that the packed path does not carry."""


class UnsupportedKernelError(RotaryQuantError):
    """A kernel that was asked for by name cannot run here; the message says why."""


class CacheFileError(RotaryQuantError):
    """A cache file that is damaged, or that means something else than its reader expects."""


class CalibrationError(RotaryQuantError, ValueError):
    """A calibration file that is absent or damaged, or that belongs to another checkpoint."""


class NonFiniteError(RotaryQuantError, ValueError):
    """NaN or infinity in keys or values, with the layer and head where it was met."""


class ModelFileError(RotaryQuantError):
    """A model that cannot be found, or whose files are missing or damaged."""
