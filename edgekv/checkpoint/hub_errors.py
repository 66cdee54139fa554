"""What can't be had from the Hub, each in one line with what to do."""

from __future__ import annotations

import dataclasses
import errno
from typing import Any

from edgekv.checkpoint.hub_name import HubName
from edgekv.checkpoint.source import GGUF
from edgekv.errors import CheckpointError

CONFIG = "config.json"


def required_file(name: HubName, file: str, sizes: dict[str, int]) -> str:
    """The file, which must be one of the repository's; sizes: its files, in bytes. Raises CheckpointError."""
    if file in sizes:
        return file
    if file == CONFIG:
        raise no_weights(name, sizes)
    raise CheckpointError(
        f"model={str(name)!r}: the repository has no file {file}; {_offered(name, sizes)}",
        field="model",
        value=str(name),
        accepted=_gguf(name, sizes),
    )


def no_weights(name: HubName, sizes: dict[str, int]) -> CheckpointError:
    """The error for a repository that has no model that can be read as a folder."""
    return CheckpointError(
        f"model={str(name)!r}: the repository has no {CONFIG} with safetensors weights; {_offered(name, sizes)}",
        field="model",
        value=str(name),
        accepted=_gguf(name, sizes),
    )


def _gguf(name: HubName, sizes: dict[str, int]) -> list[str]:
    return [str(dataclasses.replace(name, file=file)) for file in sorted(sizes) if file.endswith(GGUF)]


def _offered(name: HubName, sizes: dict[str, int]) -> str:
    names = _gguf(name, sizes)
    if not names:
        return "only safetensors and GGUF files can be read: look for a repository that has them"
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return f"give one of its GGUF files: {', '.join(names[:8])}{more}"


def transfer_error(hub: Any, name: HubName, error: Exception) -> CheckpointError:
    """A failure of the transfer in one line, with what to do."""
    errors, endpoint = hub.errors, hub.constants.ENDPOINT
    if isinstance(error, errors.GatedRepoError):
        said = f"is gated: accept its terms at {endpoint}/{name.repository}, then set HF_TOKEN"
    elif isinstance(error, errors.RepositoryNotFoundError):
        said = f"is not at {endpoint}, or it is private: check the name, or set HF_TOKEN"
    elif isinstance(error, errors.RevisionNotFoundError):
        said = f"has no revision {name.revision}: give a branch, a tag or a whole commit id"
    elif isinstance(error, errors.OfflineModeIsEnabled):
        said = f"is not whole in {hub.constants.HF_HUB_CACHE}, and HF_HUB_OFFLINE is set: unset it to download"
    elif isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        said = "can't be written (no space left): make room, or set HF_HOME; what is there is kept"
    else:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        said = f"can't be downloaded from {endpoint} ({reason}); try again: it goes on where it stopped"
    return CheckpointError(f"model={str(name)!r}: {said}", field="model", value=str(name))
