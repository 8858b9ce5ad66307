"""Errors with names. Each message says what to do about it."""


class OscarError(Exception):
    """Base class of everything this package raises on purpose."""


class ConfigError(OscarError, ValueError):
    """An option has a value that cannot work."""


class UnsupportedError(OscarError, NotImplementedError):
    """The model, the platform or the vLLM feature asked for is not supported."""


class CalibrationError(OscarError, RuntimeError):
    """A calibration failed, or is not of the model that the checkpoint holds: nothing was written."""


class VllmVersionError(OscarError, RuntimeError):
    """The installed vLLM is outside the supported range, or a symbol in it is not what we expect."""


class PoolError(OscarError, RuntimeError):
    """A rule of the BF16 pool is broken: a bug. Most rules are checked by an audit (VLLM_OSCAR_AUDIT=1) only."""


class SidecarError(OscarError, ValueError):
    """A sidecar cannot be used. Subclasses say why."""


class SidecarNotFoundError(SidecarError, FileNotFoundError):
    """No sidecar was found for the model."""


class SidecarCorruptError(SidecarError):
    """The file is truncated, is no safetensors file, or lacks metadata or a tensor."""


class SidecarMismatchError(SidecarError):
    """The sidecar was made for another model."""


class SidecarShapeError(SidecarError):
    """A tensor has a shape that the model does not call for."""


class SidecarNonFiniteError(SidecarError):
    """A tensor holds NaN or infinity."""


class SidecarSingularError(SidecarError):
    """A transform is not invertible, or too badly conditioned to be inverted in BF16."""


class SidecarNotOrthogonalError(SidecarError):
    """The method calls for orthogonal transforms and one of them is not."""
