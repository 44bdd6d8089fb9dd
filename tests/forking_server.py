"""Fork a child per line of stdin, which runs a program as `python` does, but with torch imported already.

`processes.run_python` starts this server and writes the lines; the server answers each with the child's exit code.
"""

import json
import os
import signal
import sys
import warnings

import torch  # noqa: F401

request, code = {}, "raise SystemExit(0)"
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        request = json.loads(line)
        break
    os.write(1, b"%d\n" % os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

if request:
    for number, name in enumerate(["/dev/null", request["stdout"], request["stderr"]]):
        os.dup2(os.open(name, os.O_RDWR), number)
    os.chdir(request["cwd"])
    signal.alarm(request["timeout"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv, code = request["arguments"], compile(request["code"], request["arguments"][0], "exec")
    sys.path[:1] = [request["folder"], *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    if request["strict"]:
        warnings.simplefilter("error")

# The program ends as this file does: with its atexit functions, traceback and exit code.
exec(code, {"__name__": "__main__", "__file__": sys.argv[0]})
