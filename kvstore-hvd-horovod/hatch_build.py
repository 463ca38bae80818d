"""Refuses to build where Horovod is installed, whose files the wheel would overwrite. Only the sdist is published."""

import sysconfig
from importlib.metadata import distributions

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class Hook(BuildHookInterface):
    """Asks the environment that pip installs into; the build has one of its own."""

    def initialize(self, version, build_data):
        """Called before a build."""
        places = [sysconfig.get_path(name) for name in ("purelib", "platlib")]
        if self.target_name == "wheel" and any(distributions(name="horovod", path=places)):
            raise SystemExit(
                f"Horovod is installed in {places[0]}, and kvstore-hvd-horovod has a module of the same name.\n"
                "  Fix: pip uninstall horovod, or keep Horovod and use kvstore-hvd alone."
            )
