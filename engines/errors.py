"""The errors every room raises for someone else's fault (user, disk, stale bundle); built when something is refused.

    OstinatoError
    ├── RecipeError       a recipe or --set value is not usable
    ├── CheckpointError   weights as published do not fit what the builder knows
    ├── BuildError        the builder can't make what the recipe asks for
    ├── BundleError       a bundle is damaged, incomplete, or made for something else
    ├── DeviceError       the machine or library under the executor refused
    └── RequestError      one request is not servable; `param` names the field, `code` the OpenAI error code

A message says what was found, what was wanted and what to do.
"""

from __future__ import annotations


class OstinatoError(Exception):
    """Base of every refusal. `str(error)` is complete on its own and fits one log line."""


class RecipeError(OstinatoError):
    """A recipe can't be used as written."""


class CheckpointError(OstinatoError):
    """A checkpoint has missing, leftover or unknown parts."""


class BuildError(OstinatoError):
    """The builder can't make what was asked for."""


class BundleError(OstinatoError):
    """A bundle can't be opened or published."""


class DeviceError(OstinatoError):
    """The executor's machine or library failed."""


class RequestError(OstinatoError):
    """One request is refused or ended; the loop goes on for the others.

    `param`: the request field at fault, if one is. `code`: a stable machine-readable name.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str = "invalid_value") -> None:
        super().__init__(message)
        self.param = param
        self.code = code
