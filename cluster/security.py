"""The join token, one secret line that makes a process a member of a cluster; and the file of API keys.

Reads and creates the token's file; deriving keys from it is `sonar.transport_keys`. The token is never a command-line
argument nor an environment variable, which other users of a host could read. Called by the head and the agent.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import stat
from pathlib import Path

from sonar.errors import ConfigError

logger = logging.getLogger(__name__)

TOKEN_PREFIX = "sonar-join-"
_TOKEN = re.compile(re.escape(TOKEN_PREFIX) + r"[A-Za-z0-9_-]{43}")


def load_or_create_token(path: Path) -> str:
    """The token in that file; on the first start a new one of 256 bits is written there, readable by its owner alone.

    Raises:
        ConfigError: the file holds something else, or cannot be read or written.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Written under another name and linked: a second head that starts at the same time reads a whole token.
        draft = path.with_name(f"{path.name}.{os.getpid()}")
        with contextlib.suppress(FileExistsError):
            if not path.exists():
                descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                with os.fdopen(descriptor, "w") as file:
                    file.write(f"{TOKEN_PREFIX}{secrets.token_urlsafe(32)}\n")
                    file.flush()
                    os.fsync(file.fileno())
                try:
                    os.link(draft, path)
                finally:
                    draft.unlink()
    except OSError as error:
        raise ConfigError(f"join token {path} cannot be created: {error.strerror}", param="token_file") from error
    return read_token(path)


def read_token(path: Path) -> str:
    """The token in that file.

    Raises:
        ConfigError: there is none.
    """
    try:
        text = path.read_text().strip()
        mode = path.stat().st_mode
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"join token {path} cannot be read ({error}); copy the head's token file to this host", param="token_file"
        ) from error
    if not _TOKEN.fullmatch(text):
        raise ConfigError(
            f"{path} holds no join token ({TOKEN_PREFIX}... and 43 characters); copy the head's token file to this "
            "host, or remove the file to have a head make a new one",
            param="token_file",
        )
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        # Not refused: container platforms mount secrets with wider modes inside a private file system.
        logger.warning("join token %s is open to other users (mode %o); chmod 600 it", path, stat.S_IMODE(mode))
    return text


def read_key_file(path: Path) -> tuple[str, ...]:
    """API keys, one a line, without repeats.

    Raises:
        ConfigError: the file cannot be read or holds no key.
    """
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"api_key_file {path} cannot be read: {error}", param="api_key_file") from error
    keys = tuple(dict.fromkeys(filter(None, lines)))
    if not keys:
        raise ConfigError(f"api_key_file {path} holds no key; write one a line", param="api_key_file")
    return keys
