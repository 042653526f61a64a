"""What stopped an export, in words of the user's code rather than of torch's."""

from __future__ import annotations

from autopipe.runtime.capture.torch_private import BY_VALUES, NO_SHAPE_RULE

_LONGEST = 120
"""Characters of a foreign message that are shown."""


def reason(error: BaseException) -> str:
    """Why a line cannot be exported: known causes in our words, others by their type and the start of their text."""
    causes = list(_chain(error))
    if any(isinstance(cause, BY_VALUES) or "data-dependent" in str(cause) for cause in causes):
        return "an if, a loop or a size depends on the values in a tensor"
    if any(isinstance(cause, NO_SHAPE_RULE) for cause in causes):
        return "an operation has no rule for the shape of its result"
    if any("BatchedTensor" in str(cause) for cause in causes):
        return "torch.func.vmap in a forward cannot be exported"
    return f"{type(error).__name__}: {' '.join(str(error).split())[:_LONGEST]}"


def _chain(error: BaseException | None) -> list[BaseException]:
    """The error and what it came from, the outermost first."""
    found: list[BaseException] = []
    while error is not None and error not in found:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found
