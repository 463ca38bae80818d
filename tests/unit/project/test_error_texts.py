"""Every error that a user can meet is one of the package's, and says what to do: by the syntax trees of the sources."""

import ast
import builtins
from pathlib import Path

from kvstore_hvd import errors

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = ROOT / "kvstore_hvd"
TREES = {str(path.relative_to(PACKAGE)): ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}

# Builtin exceptions that a program may meet, because Python or Horovod asks for just these.
PROTOCOLS = ("AttributeError", "NotImplementedError", "SystemExit", "StopIteration")
# Files whose builtin exceptions are caught by their only callers, or belong to another protocol.
INTERNAL = ["base/channel", "config", "gpu/launcher", "horovod/alias", "launch/command", "launch/jobs"]
INTERNAL += ["mxnet_compat/numpy_shim", "timeline", "world/links", "world/meeting"]
# Facts that become part of a text that has a fix.
WITHOUT_FIX = ("errors.py", "gpu/launcher.py", "gpu/nccl.py", "gpu/ring_executor.py", "gpu/streams.py")


def name_of(call):
    return ast.unparse(call.func)


def test_errors_are_ours_and_every_text_has_a_fix():
    faults = []
    for place, tree in TREES.items():
        nodes = list(ast.walk(tree))
        imported = {each.asname or each.name for n in nodes if isinstance(n, ast.ImportFrom) for each in n.names}
        calls = [node.exc for node in nodes if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)]
        for call in calls:
            name, where = name_of(call), f"{place}:{call.lineno}"
            kind = None if name in imported else getattr(builtins, name, None)
            if (
                isinstance(kind, type)
                and issubclass(kind, BaseException)
                and not (name in PROTOCOLS or place[:-3] in INTERNAL)
            ):
                faults.append(f"{where} raises {name}: use one of kvstore_hvd.errors")
        if place in WITHOUT_FIX:
            continue
        texts = [node for node in nodes if isinstance(node, ast.Call) and name_of(node) == "message"]
        faults += [f"{place}:{n.lineno}: no fix" for n in texts if all(each.arg != "fix" for each in n.keywords)]
        for call in calls:
            if (
                name_of(call) in errors.__all__
                and call.args
                and isinstance(call.args[0], (ast.Constant, ast.JoinedStr))
            ):
                text = ast.unparse(call.args[0])
                if "Fix: " not in text:
                    faults.append(f"{place}:{call.lineno}: {text} has no fix")
    assert not faults, "\n".join(faults)
