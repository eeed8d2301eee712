"""Every error that dcoco raises on purpose.

A message names what was wrong, the value, the limit it broke and the remedy. `except DcocoError` catches them all.
"""


class DcocoError(Exception):
    """Base of all errors of dcoco."""


class ParameterError(DcocoError, ValueError):
    """A request carries an argument of the wrong type or out of its range."""


class TargetError(DcocoError):
    """A target can't be loaded or can't be used for speculation (missing weights, state that can't be rolled back)."""


class DrafterError(DcocoError):
    """A drafter or corrector checkpoint is broken or doesn't fit its target."""


class FetchError(DcocoError):
    """Weights can't be downloaded, or what arrived has the wrong digest."""


class ConfigError(DcocoError):
    """A configuration file names an unknown key, or a value that can't be used."""


class EngineError(DcocoError):
    """A request can't be finished: a pass of the model failed, or the engine has stopped."""


class StoppedError(EngineError):
    """The engine takes no more requests: it is shutting down, or has died."""


class QueueFullError(DcocoError):
    """As many requests wait as may wait; try again later."""
