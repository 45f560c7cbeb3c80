"""A brain process for clients, which can be killed and started again at the same address."""

import os
import pathlib
import socket
import subprocess
import tempfile


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Brain:
    """brain with the demo model. Its state (snapshots, stored responses) outlives a kill."""

    def __init__(self, program, *flags):
        self.program = program
        self.flags = flags
        self.state = tempfile.TemporaryDirectory()
        self.url = f"http://127.0.0.1:{free_port()}"
        self.starts = 0
        self.start()

    def start(self):
        folder = pathlib.Path(self.state.name)
        self.starts += 1
        log = open(folder / "log", "ab")
        self.process = subprocess.Popen(
            [self.program, "serve", "--grpc-addr", "127.0.0.1:0"]
            + ["--http-addr", self.url.removeprefix("http://"), "--snapshot-dir", folder / "snapshots"]
            + list(self.flags),
            stdout=subprocess.PIPE,
            stderr=log,
            env={name: value for name, value in os.environ.items() if not name.startswith("BRAIN_")},
        )
        log.close()
        # The ready line is its only one; the pipe ends when brain does.
        if not self.process.stdout.readline().startswith(b"ready"):
            self.process.wait()
            raise RuntimeError("brain did not start:\n" + (folder / "log").read_text())

    def kill(self):
        """As a power cut would."""
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()

    def restart(self):
        self.kill()
        self.start()

    def stop(self):
        self.process.terminate()
        self.process.wait()
        self.process.stdout.close()
        self.state.cleanup()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()
