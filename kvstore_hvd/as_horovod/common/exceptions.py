"""``horovod.common.exceptions``."""

from __future__ import annotations

from kvstore_hvd.errors import HorovodInternalError, HostsUpdatedInterrupt, message

__all__ = [
    "HorovodInternalError",
    "HorovodVersionMismatchError",
    "HostsUpdatedInterrupt",
    "get_version_mismatch_message",
]


def get_version_mismatch_message(name: str, version: str, installed_version: str | None) -> str:
    """The text about a framework whose version is not the one that is installed."""
    fact = f"Framework {name} installed with version {installed_version} but found version {version}."
    return message(fact, fix=f"install one {name}, and import that.")


class HorovodVersionMismatchError(ImportError):
    """A framework has another version than the one that is installed."""

    def __init__(self, name: str, version: str, installed_version: str | None) -> None:
        super().__init__(get_version_mismatch_message(name, version, installed_version), name=name)
        self.version = version
        self.installed_version = installed_version
