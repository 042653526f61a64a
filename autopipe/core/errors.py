"""Every error that autopipe raises on purpose.

    AutopipeError                 exit code 2 unless it says otherwise
    ├── UsageError                an argument that cannot be meant
    ├── FileError                 a file that is missing, broken, or of another format or version
    ├── ModelError                the user's model file, model, batch or loss fails
    │   └── CaptureError          the model runs, but cannot be cut; names the line
    ├── ScheduleError             an action table that cannot run; names rank and action
    ├── NoPlanFits       exit 1   every plan needs more memory than there is
    ├── CheckFailed      exit 1   parity is broken
    │   └── RankFailed   exit 1   a rank died, raised or hung
    └── CannotExport     exit 1   the trainer cannot express the plan

A message says what is wrong, with both numbers, then what to do.
"""

from __future__ import annotations


class AutopipeError(Exception):
    """Base of all errors that a user can cause; printed as one line, without a traceback."""

    exit_code = 2


class UsageError(AutopipeError):
    """An argument or a combination of arguments that cannot be meant."""


class FileError(AutopipeError):
    """A file is missing, cannot be read, or does not hold what its place needs."""


class ModelError(AutopipeError):
    """The model file, the model, its batch or its loss fails."""


class CaptureError(ModelError):
    """The model runs, but cannot be captured or cut exactly."""


class ScheduleError(AutopipeError):
    """An action table is incomplete, out of order, misplaced, or would deadlock."""


class NoPlanFits(AutopipeError):
    """Every plan needs more memory than the devices have."""

    exit_code = 1


class CheckFailed(AutopipeError):
    """A plan was run and its losses or gradients are not those of one process."""

    exit_code = 1


class RankFailed(CheckFailed):
    """A rank died, raised or hung."""


class CannotExport(AutopipeError):
    """A trainer cannot express the plan."""

    exit_code = 1
