"""A scheduler's signals end a command in order: its processes and temporary files go with it."""

import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

COMMAND = """
    import tempfile, time
    from rollcorr import cli

    def command():
        with tempfile.TemporaryDirectory() as folder:
            print(folder, flush=True)
            time.sleep(600)

    cli.app = command
    cli.main()
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_scheduler_s_signal_ends_a_command_in_order(name):
    program = [sys.executable, "-c", textwrap.dedent(COMMAND)]
    # nohup and background jobs start with signals ignored, which the command respects; here the test decides.
    default = {"preexec_fn": lambda: [signal.signal(n, signal.SIG_DFL) for n in (signal.SIGTERM, signal.SIGHUP)]}
    process = subprocess.Popen(program, stdout=subprocess.PIPE, text=True, **default)
    folder = Path(process.stdout.readline().strip())
    process.stdout.close()
    assert folder.is_dir()
    process.send_signal(getattr(signal, name))
    assert process.wait() == 128 + getattr(signal, name)
    assert not folder.exists()
