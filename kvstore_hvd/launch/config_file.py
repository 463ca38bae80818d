"""The file of ``--config-file``: options of kvhvdrun, one a line, in YAML."""

from __future__ import annotations

import difflib
from collections.abc import Collection
from typing import Any

from kvstore_hvd.errors import LaunchError, message

__all__ = ["read_options"]

_FIX = "give the path of a YAML file with lines such as num-proc: 4"


def read_options(
    path: str, valued: Collection[str], flags: Collection[str], lists: Collection[str] = ()
) -> dict[str, Any]:
    """Read a mapping of options from a YAML file; ``_`` and ``-`` in their names are the same."""
    yaml = _yaml()
    try:
        with open(path, encoding="utf-8") as file:
            # Not load: the texts are wanted as they stand there, and where they stand.
            root = yaml.compose(file, Loader=yaml.SafeLoader)
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(message(f"the configuration file cannot be read: {error}.", fix=_FIX)) from None
    except yaml.YAMLError as error:
        raise LaunchError(message(f"the configuration file '{path}' is not YAML: {error}.", fix=_FIX)) from None
    if root is None:
        return {}
    if not isinstance(root, yaml.MappingNode):
        raise LaunchError(message(f"the configuration file '{path}' is no mapping.", fix="one line: num-proc: 4"))
    options: dict[str, Any] = {}
    for key, value in root.value:
        where = f"{path}:{key.start_mark.line + 1}"
        name = str(key.value).replace("_", "-")
        if name not in valued and name not in flags:
            close = difflib.get_close_matches(name, [*valued, *flags], n=1)
            raise LaunchError(
                message(
                    f"{where}: '{key.value}' is no option of kvhvdrun.",
                    fix=f"did you mean {close[0]}?" if close else f"one of {', '.join(sorted([*valued, *flags]))}.",
                )
            )
        if name in options:
            raise LaunchError(message(f"{where}: '{name}' is given twice.", fix="leave one of them."))
        parts = value.value if name in lists and isinstance(value, yaml.SequenceNode) else []
        if parts and all(isinstance(part, yaml.ScalarNode) for part in parts):
            value.value = " ".join(part.value for part in parts)
        elif not isinstance(value, yaml.ScalarNode) or not value.value:
            raise LaunchError(message(f"{where}: '{name}' has no value.", fix=f"one line: {name}: VALUE"))
        if name in flags and value.tag != "tag:yaml.org,2002:bool":
            raise LaunchError(
                message(f"{where}: {name}: '{value.value}' is not true or false.", fix=f"one line: {name}: true")
            )
        options[name] = value.value if name in valued else yaml.safe_load(value.value)
    return options


def _yaml() -> Any:
    try:
        import yaml
    except ModuleNotFoundError:
        raise LaunchError(
            message(
                "--config-file needs PyYAML, which is not installed.", fix="python -m pip install 'kvstore-hvd[yaml]'"
            )
        ) from None
    return yaml
