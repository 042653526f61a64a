"""What stopped an export, in words of the user's code rather than of torch's."""

from __future__ import annotations

from autopipe.runtime.capture.torch_private import BY_VALUES, NO_SHAPE_RULE

_LONGEST = 120
"""Characters of a foreign message that are shown."""

_SAID = {
    "BatchedTensor": "torch.func.vmap in a forward cannot be exported",
    "Batching rule not implemented": "torch.func.vmap in a forward cannot be exported",
    "TensorWrapper": "torch.func.grad in a forward cannot be exported",
    "'Tensor' object has no attribute 'constant'": "torch.func.grad in a forward cannot be exported",
    "SparseTensorImpl": "a sparse tensor in a forward cannot be exported",
    ".numpy() is not supported": "numpy is given the values of a tensor",
    "__format__": "the values of a tensor are made into text",
    "appears to not have been used in the graph": "it takes a gradient in its forward",
    "cannot register a hook on a tensor": "it puts a hook on a tensor",
    "fake tensor in the exported program constant": (
        "it keeps a tensor that it makes where no graph can: in .data, an attribute, a global, or another thread"
    ),
    "Cannot access data pointer": "it reads a tensor's memory, as copy.deepcopy and other libraries do",
    "torch.classes": "it holds an object of a class that is compiled into torch, as quantised layers do",
}
"""What a message of torch's holds, and what it means."""


def reason(error: BaseException) -> str:
    """Why a line cannot be exported: known causes in our words, others by their type and the start of their text."""
    causes = list(_chain(error))
    if any(isinstance(cause, BY_VALUES) or "data-dependent" in str(cause) for cause in causes):
        return "an if, a loop or a size depends on the values in a tensor"
    if any(isinstance(cause, NO_SHAPE_RULE) for cause in causes):
        return "an operation has no rule for the shape of its result"
    said = " ".join(str(cause) for cause in causes)
    if known := next((meaning for text, meaning in _SAID.items() if text in said), None):
        return known
    return f"{type(error).__name__}: {' '.join(str(error).split())[:_LONGEST]}"


def _chain(error: BaseException | None) -> list[BaseException]:
    """The error and what it came from, the outermost first."""
    found: list[BaseException] = []
    while error is not None and error not in found:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found
