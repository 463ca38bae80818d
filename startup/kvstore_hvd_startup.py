"""Read at every start of the interpreter (by kvstore_hvd_shim.pth), so that plain ``import mxnet`` works.

MXNet 1.9.1 and 2.0.0b1 cannot be imported on NumPy >= 1.24 or Python >= 3.12 without help; docs/numpy-shim.md of
kvstore_hvd tells what is added. This module only leaves a finder behind: it imports nothing until ``import mxnet``, and
then one file of kvstore_hvd, not the package. ``KVHVD_NUMPY_SHIM=0`` switches it off. It must never raise.
"""

import os
import sys

# As in kvstore_hvd/mxnet_compat/numpy_shim.py, so that only one of the two is installed.
_TAG = "kvstore_hvd.numpy_shim"


class _Finder:
    """Answers for mxnet only, through the shim's own finder, and then steps aside for good."""

    tag = _TAG

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        """Put the shim's finder in the place of this one, and let it answer."""
        if name != "mxnet" or cls not in sys.meta_path:
            return None
        position = sys.meta_path.index(cls)
        try:
            hook = _load_shim().hook()
            sys.meta_path[position] = hook
            return hook.find_spec(name, path, target)
        except Exception:  # noqa: BLE001 - whatever it is, MXNet's own error is the one to see
            if cls in sys.meta_path:
                sys.meta_path.remove(cls)
            return None


def _load_shim():
    from importlib.util import find_spec, module_from_spec, spec_from_file_location

    folder = next(iter(find_spec("kvstore_hvd").submodule_search_locations))
    location = os.path.join(folder, "mxnet_compat", "numpy_shim.py")
    spec = spec_from_file_location("_kvstore_hvd_numpy_shim", location)
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _start():
    if os.environ.get("KVHVD_NUMPY_SHIM", "").strip().lower() in ("0", "false", "no", "off"):
        return
    if "mxnet" not in sys.modules and all(getattr(finder, "tag", None) != _TAG for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder)


_start()
