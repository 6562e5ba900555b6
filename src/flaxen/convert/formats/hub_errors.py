"""What went wrong between here and the hub, each in a sentence that says what to do."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from flaxen.core.errors import CheckpointError, FlaxenError

Explain = Callable[[Exception], CheckpointError]


@contextmanager
def explaining(explain: Explain) -> Iterator[None]:
    """Turn what `huggingface_hub` and the system raise into a CheckpointError."""
    try:
        yield
    except FlaxenError:
        raise
    # ValueError: a name that is none, an address that cannot be followed.
    except (*unreachable(), OSError, RuntimeError, ValueError) as error:
        raise explain(error) from error


def unreachable() -> tuple[type[Exception], ...]:
    """What the HTTP client of `huggingface_hub` raises when no answer comes, or no good one."""
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    # That client's own base class: its package changed its name between versions.
    return (HfHubHTTPError.__bases__[0], OfflineModeIsEnabled)


def explained(
    error: Exception, repository: str, revision: str | None, site: str
) -> CheckpointError:
    """The error to raise for one that came up while `repository` was asked for."""
    from huggingface_hub import errors

    page, status = f"{site}/{repository}", status_of(error)
    if isinstance(error, errors.GatedRepoError):
        why = (
            f"{repository} is gated: accept its terms at {page}, then log in with "
            "`hf auth login`, set HF_TOKEN or pass token=."
        )
    elif isinstance(error, errors.RevisionNotFoundError):
        why = (
            f"{repository} has no revision {revision!r}. Its branches and tags are at {page}; "
            "a commit is given by its whole hash."
        )
    elif isinstance(error, errors.EntryNotFoundError) and status is not None:
        why = f"{repository} names a file that it does not have ({_first_line(error)})."
    elif isinstance(error, errors.HFValidationError):
        why = f"{repository!r} is no path here, and no hub id (org/name): {_first_line(error)}"
    elif status in (401, 403, 404):
        why = (
            f"{repository!r} is no path here, and the hub has no such repository, or it is "
            "private. Check the name; for a private one log in with `hf auth login`, set HF_TOKEN "
            "or pass token= of an account that may read it."
        )
    elif isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        why = f"The disk became full while {repository} was downloaded. {ROOM}"
    elif isinstance(error, OSError) and error.errno and not isinstance(error, ConnectionError):
        why = f"{repository} cannot be kept in the hub's cache: {error}."
    elif status is not None:
        why = f"{site} answered {status} when asked for {repository}. Try again later."
    else:
        why = (
            f"{repository!r} is no path here. {site} cannot be reached ({_first_line(error)}), and "
            "it is not complete in the hub's cache. Check the connection and load again (files "
            "that arrived are kept), or pass a local folder."
        )
    return CheckpointError(why)


ROOM = "Make room, or set HF_HOME to a folder on another disk."


def status_of(error: Exception) -> int | None:
    """The status of the answer that an error is about."""
    return getattr(getattr(error, "response", None), "status_code", None)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "").rstrip(".:") or type(error).__name__
