import importlib.util
import platform
import re
import sys

import kvstore_hvd
from kvstore_hvd import native
from kvstore_hvd.launch import command


def test_check_build(capfd, monkeypatch):
    import mxnet

    def rows(option):
        assert command.main([option]) == 0
        out, _ = capfd.readouterr()
        assert out.startswith(f"kvstore_hvd {kvstore_hvd.__version__}, Python {platform.python_version()}")
        return dict(re.findall(r"^  (.*?): +(.*)$", out, re.MULTILINE))

    found = rows("--check-build")
    assert found["MXNet"] == f"yes: {mxnet.__version__}"
    assert re.fullmatch("yes: sums with (scalar|avx2|avx512)", found["native engine"])
    assert all(found[name].startswith(("yes: ", "no: ")) for name in ("GPUs", "NCCL"))
    assert found["MPI"].startswith("yes: " if importlib.util.find_spec("mpi4py") else "no: ")
    assert found["several hosts"].endswith("under mpirun by its MPI") == found["MPI"].startswith("yes: ")
    assert found["horovod"].startswith("not installed")
    assert found["--config-file"].startswith("yes: PyYAML ")
    for name in ("mxnet", "mpi4py", "kvstore_hvd._native", "yaml"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(vars(native), "simd_target", raising=False)  # kept since the first use
    missing = rows("-cb")
    assert missing["MXNet"].startswith("no: ")
    assert missing["native engine"].startswith("no: ")
    assert missing["MPI"].startswith("no: mpi4py is not installed")
    assert missing["several hosts"] == "yes: by ssh and TCP"
    assert missing["--config-file"].startswith("no: ")
