"""Objects of users' modules, loaded and compared with their call in a process of its own: losses, hooks and bridges may
load torch. The process imports little, because a check starts one for each object.
"""

import json
import subprocess
import sys
from collections.abc import Sequence

from tidemill.bus.system.functions import FunctionRefused, check_call, find_function, find_object

# Seconds in which a module is imported; with torch it takes several, and twenty times as long beside other work.
LOAD_S = 300.0


def defect(path: str, arguments: Sequence[str] = (), offered: Sequence[str] = (), *, kind: str = "function") -> str:
    """Return the reason that the object at ``module:name`` cannot be used; empty if none is known.

    ``arguments``, ``offered``: of the call of a function, as for ``check_call``. ``kind``: function | class | any |
    slime (a generate function, which has the names of slime that its child process provides).
    The process has the module search path of this one. A module that is not imported in time is left to its users.
    """
    request = {"search": sys.path, "path": path, "arguments": arguments, "offered": offered, "kind": kind}
    command = (sys.executable, "-P", "-m", __name__)
    try:
        child = subprocess.run(command, input=json.dumps(request), capture_output=True, text=True, timeout=LOAD_S)
    except subprocess.TimeoutExpired:
        return ""
    if child.returncode:
        last_line = (child.stderr.strip().splitlines() or ["it wrote nothing"])[-1]
        return f"its import ends the process: {last_line}"
    # A module may print while it is imported.
    return str(json.loads(child.stdout.splitlines()[-1]))


def _load(path: str, arguments: Sequence[str], offered: Sequence[str], kind: str) -> str:
    if kind == "slime":
        from tidemill.actors.episodes.programs.slime_generate import provide_names

        provide_names()
    try:
        if kind == "function":
            check_call(find_function(path), arguments, offered, path=path, setting="")
        elif not isinstance(find_object(path), type) and kind == "class":
            return "no class"
    except FunctionRefused as error:
        return error.reason
    return ""


if __name__ == "__main__":
    request = json.load(sys.stdin)
    sys.path[:] = request["search"]
    print("\n" + json.dumps(_load(request["path"], request["arguments"], request["offered"], request["kind"])))
