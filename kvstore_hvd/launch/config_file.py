"""The file of ``--config-file``: options of kvhvdrun, one a line, in YAML."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from kvstore_hvd.errors import LaunchError, message

__all__ = ["arguments_of_file"]

_FIX = "give the path of a YAML file with lines such as num-proc: 4"


def arguments_of_file(path: str, known: Mapping[str, Any]) -> dict[str, list[str]]:
    """The options of a YAML file as arguments, by argparse's name; `known` has its actions by the option's name."""
    # `_` and `-` in the names of options are the same.
    try:
        import yaml
    except ModuleNotFoundError:
        fix = "python -m pip install 'kvstore-hvd[yaml]'"
        raise LaunchError(message("--config-file needs PyYAML, which is not installed.", fix=fix)) from None
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
    found: dict[str, list[str]] = {}
    for key, value in root.value:
        name = str(key.value).replace("_", "-")
        action: Any = known.get(name)
        fact, fix = "", f"one line: {name}: VALUE"
        parts = value.value if isinstance(value, yaml.SequenceNode) else [value]
        if action is None:
            fact, close = f"'{key.value}' is no option of kvhvdrun", difflib.get_close_matches(name, known, n=1)
            fix = f"did you mean {close[0]}?" if close else f"one of {', '.join(sorted(known))}."
        elif action.dest in found:
            fact, fix = f"'{name}' is given twice", "leave one of them."
        elif not all(isinstance(part, yaml.ScalarNode) and part.value for part in parts):
            fact = f"'{name}' has no value"
        elif action.nargs == 0 and value.tag != "tag:yaml.org,2002:bool":
            fact, fix = f"{name}: '{value.value}' is not true or false", f"one line: {name}: true"
        if fact:
            raise LaunchError(message(f"{path}:{key.start_mark.line + 1}: {fact}.", fix=fix))
        text = " ".join(part.value for part in parts)
        if action.nargs == 0:
            found[action.dest] = [f"--{name}"] if yaml.safe_load(text) else []
        else:
            found[action.dest] = [f"--{name}={text}"] if action.nargs is None else [f"--{name}", *text.split()]
    return found
