"""The one family of errors. Every message says what was wrong, where, and what to do about it."""


class TLSpectralError(Exception):
    """Base of every error that tl_spectral raises on purpose."""


class InputError(TLSpectralError, ValueError):
    """An argument is out of range, empty, not finite, or of the wrong shape."""


class UnsupportedModelError(TLSpectralError, TypeError):
    """The model has no single residual stream that can be analysed (or cannot be reached)."""


class ModelStateError(TLSpectralError, RuntimeError):
    """The model can be analysed, but not in its present state (train mode, NaN weights, …)."""


class ProvenanceError(TLSpectralError, ValueError):
    """Results of different models, weight bases, texts or options were about to be mixed."""


class CorruptResultError(TLSpectralError, ValueError):
    """A results file is truncated, was edited, or was not written by tl_spectral."""


class TLSpectralWarning(UserWarning):
    """Something a careful reader of the numbers should know."""
